// The gradients of selective_scan.h from its inputs alone. With g_t = dL/dh_t and dy the gradient before the gate,
//
//     g_t = c_t dy_t + decay_{t+1} g_{t+1}                    db_t = sum_i u_t g_t,   dc_t = sum_i dy_t h_t
//     du_t = sum_r b_t g_t                                    dx_t = dt_t du_t + skip dy_t
//     e_t = g_t decay_t h_{t-1}, the exponent's gradient      da = sum_t dt_t e_t,    ddt_t = x_t du_t + sum_r a e_t
//
// A part first runs forward and keeps the state that enters each block of tokens. Then it takes the blocks from last to
// first: it runs forward through a block once more, keeping decay_t and decay_t h_{t-1} of a few states of one vector,
// which fit in cache, and comes back through them. States in different runs of RUN meet only in sums over r, so one run
// after the other goes through the whole sequence, and no scratch grows with the rank.
//
// Sums over channels: every part has its own db and dc, added up in a fixed order outside, so that results do not depend
// on the number of threads.
#pragma once

#include "selective_scan.h"

namespace MK_ISA::scan {

// The inputs of the forward, what comes in beside them, and where the gradients go; null for those that are not wanted.
// All but `dy` are contiguous. Sums over rows, and over the parts `k` of a group, are left to the caller.
struct ScanBackward {
    MK_FIELDS(ScanBackward,
        Scan inputs;
        PerToken dy;
        const float* d_last_bir;
        void *dx_bsi, *d_dt_bsi, *dz_bsi;  // bfloat16 only for at most RUN states
        float *da_bir, *db_kbsgr, *dc_kbsgr, *d_state_bir, *d_skip_bi, *d_dt_bias_bi;
    )
};

constexpr int64_t RUN = 16;  // states that go through the sequence together
constexpr int FEW = W > 8 ? 8 : 4;  // of them, how many at a time have their state, gradient and da in registers

// Scratch of one part and run of states.
struct BackwardBlock : Block {
    float *x, *dy;            // gathered beside dt and u
    float *y, *du, *d_log2;   // sums over the states: of c h, of b g, and of a e in units of log2
    float *decay, *carried;   // [token][state of the few][lane]: decay_t, and decay_t h_{t-1}
    float *db, *dc;           // [token][state of the run][lane], summed over the part's vectors
};

template <class Number>
static void gather_tokens_backward(const Scan& s, const Part& part, const PerToken& dy, BackwardBlock& block) {
    gather_tokens<Number>(s, part, block);
    for (int64_t t = 0; t < block.count; t++)
        for (int64_t v = 0; v < part.vectors; v++) {
            int64_t lanes = part.lanes(v);
            vf dy_t = load_part(part.at<Number>(dy, block.begin + t, v), lanes);
            if (s.z.data) {
                vf z = load_part(part.at<Number>(s.z, block.begin + t, v), lanes);
                dy_t *= z * sigmoid_of(z);
            }
            store(block.dy + place(v, t), dy_t);
            store(block.x + place(v, t), load_part(part.at<Number>(s.x, block.begin + t, v), lanes));
        }
}

// scan_states once more, keeping what the way back needs. `h` is left alone.
template <int n>
static void recompute_states(
    const Scan& s, const Part& part, const BackwardBlock& block, int64_t v, int64_t first, const float* a,
    const float* h, Lookahead& ahead) {
    const float *dt = block.dt + place(v, 0), *u = block.u + place(v, 0);
    const float* b = block.b + first;
    const uint8_t* fresh = s.fresh_bs ? s.fresh_bs + part.row * s.tokens + block.begin : nullptr;
    vf state[n];
    for (int r = 0; r < n; r++) state[r] = load(h + r * W);
    for (int64_t t = 0; t < block.count; t++, b += block.b_step) {
        ahead.step();
        vf dt_t = load(dt + t * W), u_t = load(u + t * W);
        vf link = splat(fresh && fresh[t] ? 0.0f : 1.0f);
        float *decay = block.decay + t * n * W, *carried = block.carried + t * n * W;
#pragma GCC unroll 16
        for (int r = 0; r < n; r++) {
            vf decay_t = decay_of(dt_t * load(a + r * W));
            if (fresh) decay_t *= link;
            vf carried_t = decay_t * state[r];
            store(decay + r * W, decay_t);
            store(carried + r * W, carried_t);
            state[r] = carried_t + u_t * splat(b[r]);
        }
    }
}

// Back through what recompute_states kept. `g` is decay_{t+1} g_{t+1} of the token after the block on entry, and of the
// block's first token on return; `in_run` counts the first state within its run.
template <int n>
static void scan_states_back(
    const Scan& s, const Part& part, const BackwardBlock& block, int64_t v, int64_t first, int64_t in_run,
    const float* a, float* g, float* da) {
    vf link[n], da_r[n];
    for (int r = 0; r < n; r++) link[r] = load(g + r * W), da_r[r] = load(da + r * W);
    for (int64_t t = block.count - 1; t >= 0; t--) {
        const float *b = block.b + t * block.b_step + first, *c = block.c + t * block.c_step + first;
        int64_t at = place(v, t);
        vf dt_t = load(block.dt + at), u_t = load(block.u + at), dy_t = load(block.dy + at);
        vf y_t = load(block.y + at), du_t = load(block.du + at), d_log2_t = load(block.d_log2 + at);
        const float *decay = block.decay + t * n * W, *carried = block.carried + t * n * W;
        float *db = block.db + (t * RUN + in_run) * W, *dc = block.dc + (t * RUN + in_run) * W;
#pragma GCC unroll 16
        for (int r = 0; r < n; r++) {
            vf carried_t = load(carried + r * W), b_t = splat(b[r]), c_t = splat(c[r]);
            vf h_t = carried_t + u_t * b_t;
            vf g_t = link[r] + dy_t * c_t;
            store(dc + r * W, load(dc + r * W) + dy_t * h_t);
            store(db + r * W, load(db + r * W) + u_t * g_t);
            y_t += h_t * c_t;
            du_t += g_t * b_t;
            vf e_t = g_t * carried_t;
            d_log2_t += e_t * load(a + r * W);
            da_r[r] += e_t * dt_t;
            link[r] = g_t * load(decay + r * W);
        }
        store(block.y + at, y_t);
        store(block.du + at, du_t);
        store(block.d_log2 + at, d_log2_t);
    }
    for (int r = 0; r < n; r++) store(g + r * W, link[r]), store(da + r * W, da_r[r]);
}

// The gradients per token and channel. All are linear in the sums over states, so each run of states adds its share;
// the first also has what does not depend on states. Adds to d_skip and d_dt_bias, [vector][lane].
template <class Number>
static void write_gradients(
    const Scan& s, const Part& part, const ScanBackward& grads, const BackwardBlock& block, bool add, float* d_skip,
    float* d_dt_bias) {
    int64_t width = s.groups * s.channels;
    for (int64_t t = 0; t < block.count; t++)
        for (int64_t v = 0; v < part.vectors; v++) {
            int64_t lanes = part.lanes(v), at = place(v, t), token = block.begin + t;
            int64_t out = (part.row * s.tokens + token) * width + part.first + v * W;
            vf x = load(block.x + at), du = load(block.du + at), y = load(block.y + at), dy = load(block.dy + at);
            vf dx = load(block.dt + at) * du;
            vf d_dt = x * du + splat(LN_2) * load(block.d_log2 + at);
            if (s.softplus) d_dt *= sigmoid_of(step_size<Number>(s, part, token, v).raw);
            if (s.skip_i && !add) {
                vf skip = load_part(s.skip_i + part.first + v * W, lanes);
                dx += skip * dy;
                y += skip * x;
                store(d_skip + v * W, load(d_skip + v * W) + x * dy);
            }
            if (grads.dx_bsi) put_part((Number*)grads.dx_bsi + out, dx, lanes, add);
            if (grads.d_dt_bsi) put_part((Number*)grads.d_dt_bsi + out, d_dt, lanes, add);
            store(d_dt_bias + v * W, load(d_dt_bias + v * W) + d_dt);
            if (grads.dz_bsi) {
                vf z = load_part(part.at<Number>(s.z, token, v), lanes), open = sigmoid_of(z);
                vf d_gated = load_part(part.at<Number>(grads.dy, token, v), lanes);
                put_part((Number*)grads.dz_bsi + out, d_gated * y * silu_slope(z, open), lanes, add);
            }
        }
}

// Sums over the part's channels into its own db or dc.
static void write_channel_sums(
    const Scan& s, const Part& part, const Block& block, int64_t first, int64_t n, const float* lanes, float* to_kbsgr) {
    if (!to_kbsgr) return;
    for (int64_t t = 0; t < block.count; t++) {
        int64_t token = (part.index * s.rows + part.row) * s.tokens + block.begin + t;
        float* to = to_kbsgr + (token * s.groups + part.group) * s.rank + first;
        for (int64_t r = 0; r < n; r++) to[r] = sum(load(lanes + (t * RUN + r) * W));
    }
}

// The states [first, first + n) of a part, through the whole sequence and back.
template <class Number>
static void scan_run_back(
    const Scan& s, const Part& part, const ScanBackward& grads, int64_t first, int64_t n, float* d_skip,
    float* d_dt_bias) {
    int64_t blocks = ceil_div(s.tokens, BLOCK);
    int64_t states = part.vectors * n * W, tokens = part.vectors * BLOCK * W, few = BLOCK * FEW * W;
    int64_t run = BLOCK * RUN * W;
    float* next = scratch<SCAN_PART>((blocks + 4) * states + 7 * tokens + 2 * few + 2 * run +
                                     s.narrow * 2 * BLOCK * s.rank);
    auto take = [&](int64_t floats) { return (next += floats) - floats; };
    float *a = take(states), *g = take(states), *da = take(states);
    float* entering = take((blocks + 1) * states);  // the state before each block
    BackwardBlock block;
    block.dt = take(tokens), block.u = take(tokens), block.x = take(tokens), block.dy = take(tokens);
    block.y = take(3 * tokens), block.du = block.y + tokens, block.d_log2 = block.du + tokens;
    block.decay = take(few), block.carried = take(few);
    block.db = take(2 * run), block.dc = block.db + run;
    block.room = take(s.narrow * 2 * BLOCK * s.rank);

    int64_t matrix = part.first * s.rank + first, of_row = part.row * s.groups * s.channels * s.rank + matrix;
    gather_states(part, s.a_ir + matrix, s.rank, n, LOG2_E, a);
    for (int64_t i = 0; i < states; i++) a[i] = a[i] < -FLT_MAX ? -FLT_MAX : a[i];  // it multiplies decays of zero
    gather_states(part, s.state_bir ? s.state_bir + of_row : nullptr, s.rank, n, 1.0f, entering);
    gather_states(part, grads.d_last_bir + of_row, s.rank, n, 1.0f, g);
    clear(da, states);

    for (int64_t m = 0; m + 1 < blocks; m++) {
        float* h = entering + (m + 1) * states;
        copy(h - states, states, h);
        block.begin = m * BLOCK, block.count = BLOCK;
        gather_tokens<Number>(s, part, block);
        int64_t next = block.begin + BLOCK;
        Lookahead ahead = {part, {s.x, s.dt}, next, least(next + BLOCK, s.tokens), s.narrow};
        for (int64_t v = 0; v < part.vectors; v++)
            for_states<W>(n, 0, [&](auto count, int64_t r) {
                int64_t at = (v * n + r) * W;
                scan_states<count.value, false>(s, part, block, v, first + r, a + at, h + at, nullptr, ahead);
            });
    }
    for (int64_t m = blocks - 1; m >= 0; m--) {
        block.begin = m * BLOCK, block.count = least(BLOCK, s.tokens - block.begin);
        gather_tokens_backward<Number>(s, part, grads.dy, block);
        clear(block.y, 3 * tokens);
        clear(block.db, 2 * run);
        Lookahead ahead = {part, {s.x, s.dt, s.z, grads.dy}, m ? block.begin - BLOCK : 0, block.begin, s.narrow};
        for (int64_t v = 0; v < part.vectors; v++)
            for_states<FEW>(n, 0, [&](auto count, int64_t r) {
                int64_t at = (v * n + r) * W;
                recompute_states<count.value>(s, part, block, v, first + r, a + at, entering + m * states + at, ahead);
                scan_states_back<count.value>(s, part, block, v, first + r, r, a + at, g + at, da + at);
            });
        write_gradients<Number>(s, part, grads, block, first > 0, d_skip, d_dt_bias);
        write_channel_sums(s, part, block, first, n, block.db, grads.db_kbsgr);
        write_channel_sums(s, part, block, first, n, block.dc, grads.dc_kbsgr);
    }
    if (grads.da_bir) scatter_states(part, da, n, grads.da_bir + of_row, s.rank);
    if (grads.d_state_bir) scatter_states(part, g, n, grads.d_state_bir + of_row, s.rank);
}

template <class Number>
static void scan_part_back(const Scan& s, const Part& part, const ScanBackward& grads) {
    float *d_skip = scratch<SCAN_SUMS>(2 * part.vectors * W), *d_dt_bias = d_skip + part.vectors * W;
    clear(d_skip, 2 * part.vectors * W);
    for (int64_t first = 0; first == 0 || first < s.rank; first += RUN)  // once without states: there is the skip
        scan_run_back<Number>(s, part, grads, first, least(RUN, s.rank - first), d_skip, d_dt_bias);
    int64_t out = part.row * s.groups * s.channels + part.first;
    if (grads.d_skip_bi) copy(d_skip, part.channels, grads.d_skip_bi + out);
    if (grads.d_dt_bias_bi) copy(d_dt_bias, part.channels, grads.d_dt_bias_bi + out);
}

}  // namespace MK_ISA::scan

namespace MK_ISA {

using scan::ScanBackward;

static void selective_scan_backward(const ScanBackward& call) {
    with_numbers(call.inputs.narrow, [&](auto number) {
        scan::for_parts(call.inputs, [&](const scan::Part& part) {
            scan::scan_part_back<decltype(number)>(call.inputs, part, call);
        });
    });
}

}  // namespace MK_ISA
