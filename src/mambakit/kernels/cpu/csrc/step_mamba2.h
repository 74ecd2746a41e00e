// Mamba-2's decoding step: everything between the two projections.
#pragma once

#include "border.h"
#include "step.h"

namespace MK_ISA {

struct Mamba2Step {
    MK_FIELDS(Mamba2Step,
        int64_t heads, p, r, groups;
        int64_t k;    // taps of the convolution
        int64_t mlp;  // d_inner - d_ssm: channels of the gated MLP beside the state space
        const float *conv_weight, *conv_bias;  // [conv_dim][k]; bias [conv_dim] or null
        const float *dt_bias, *A_log;          // [heads]
        const float* D;                        // [heads], or [heads][p] with D_per_channel
        const float* norm_weight;              // [heads * p], or null: no norm, only the gate
        int64_t norm_group;                    // channels that share a root mean square
        float norm_eps;
        float dt_low, dt_high;
        bool D_per_channel, norm_before_gate;
    )

    int64_t width() const { return heads * p; }
    int64_t conv_dim() const { return width() + 2 * groups * r; }
    // Where the parts of a projected row begin: gate and value of the MLP, gate, convolution's input, step sizes.
    int64_t z() const { return 2 * mlp; }
    int64_t xbc() const { return z() + width(); }
    int64_t dt() const { return xbc() + conv_dim(); }
    int64_t projected() const { return dt() + heads; }
    // The gate follows the state at once, unless a norm stands between.
    bool gate_early() const { return !norm_weight || !norm_before_gate; }
};

// First, once per row: B and C, into bc[2][groups][r], and their part of the window.
static void mamba2_step_begin(
    const Mamba2Step& s, const float* projected, const float* window_in, float* window_out, float* bc) {
    convolve_token(s, s.width(), 2 * s.groups * s.r, window_in, window_out, projected + s.xbc(), bc);
}

static void mamba2_step_skip_and_gate(const Mamba2Step& s, int64_t head, const float* z, const float* x, float* y) {
    each_vector(s.p, [&](int64_t i, int64_t count) {
        vf D = s.D_per_channel ? load_part(s.D + head * s.p + i, count) : splat(s.D[head]);
        vf total = load_part(y + i, count) + D * load_part(x + i, count);
        if (s.gate_early()) total *= vsilu(load_part(z + i, count));
        store_part(y + i, total, count);
    });
}

// Then the heads [head_begin, head_end), in any order and any thread. window is a row's own, whole, state that of these
// heads; out is [mlp + width]. `note` may be null, and `narrow`, which is the state in bfloat16, in place of the others.
static void mamba2_step(
    const Mamba2Step& s, const float* projected, const float* bc, const float* window_in, float* window_out,
    const float* state_in, float* state_out, uint16_t* narrow, float* note, float* out, int64_t head_begin,
    int64_t head_end) {
    const int64_t count = (head_end - head_begin) * s.p;
    float* x = scratch<STEP_HEAD>(count + s.p);
    float* coef = x + count;
    convolve_token(s, head_begin * s.p, count, window_in, window_out, projected + s.xbc(), x);
    for (int64_t head = head_begin; head < head_end; head++, x += s.p) {
        const float* b = bc + head / (s.heads / s.groups) * s.r;
        const float* c = b + s.groups * s.r;
        float* y = out + s.mlp + head * s.p;
        float dt = softplus_clamped(projected[s.dt() + head] + s.dt_bias[head], s.dt_low, s.dt_high);
        float decay = vexp(splat(-dt) * vexp(splat(s.A_log[head])))[0];
        for (int64_t i = 0; i < s.p; i++) coef[i] = dt * x[i];
        const int64_t at = (head - head_begin) * s.p * s.r;
        StatePass pass = {s.p, s.r, decay, 1, 1, b, coef, c, nullptr, nullptr, y};
        if (narrow) pass.narrow = narrow + at;
        else pass.in = state_in + at, pass.out = state_out + at;
        if (note) take_note(pass, note + (head - head_begin) * note_size(s.p, s.r, 1));
        pass_state(pass);
        mamba2_step_skip_and_gate(s, head, projected + s.z() + head * s.p, x, y);
    }
}

static void mamba2_step_norm(const Mamba2Step& s, const float* z, const float* weight, float* y) {
    vf scale = splat(inverse_rms(y, s.norm_group, s.norm_eps));
    each_vector(s.norm_group, [&](int64_t i, int64_t count) {
        vf normed = load_part(y + i, count) * scale * load_part(weight + i, count);
        if (s.norm_before_gate) normed *= vsilu(load_part(z + i, count));
        store_part(y + i, normed, count);
    });
}

// Last, once per row and after all its heads: the norm, and the MLP's channels.
static void mamba2_step_finish(const Mamba2Step& s, const float* projected, float* out) {
    each_vector(s.mlp, [&](int64_t i, int64_t count) {
        store_part(out + i, vsilu(load_part(projected + i, count)) * load_part(projected + s.mlp + i, count), count);
    });
    if (!s.norm_weight) return;
    for (int64_t at = 0; at < s.width(); at += s.norm_group)
        mamba2_step_norm(s, projected + s.z() + at, s.norm_weight + at, out + s.mlp + at);
}

// All rows, which are contiguous.
struct Mamba2StepCall {
    MK_FIELDS(Mamba2StepCall,
        Mamba2Step step;
        int64_t batch;
        const float* projected;  // [batch][projected()]
        const float* window_in;  // [batch][conv_dim][k]
        float* window_out;
        const float* state_in;  // [batch][heads][p][r]
        float* state_out;
        float* out;                // [batch][mlp + heads * p]
        const bool* reset;         // [batch]: rows that start afresh, or null
        const float* fresh_state;  // what those start from, [heads][p][r], or null: zeros
    )
};

// All but mamba2_step_finish. Windows are those at each row's places; what enters a state is what leaves it, where rows
// have an order.
static void mamba2_step_heads(const Mamba2StepCall& call, const Rows& rows, float* notes, uint16_t* narrow = nullptr) {
    const Mamba2Step& s = call.step;
    const int64_t window = s.conv_dim() * s.k, state = s.width() * s.r, bc = 2 * s.groups * s.r;
    const int64_t wide = s.projected(), inner = s.mlp + s.width();
    float* all_bc = scratch<STEP_ROWS>(call.batch * bc);
    const float* zeros = fresh_zeros(rows.reset, window > s.p * s.r ? window : s.p * s.r);
    auto window_in = [&](int64_t row) { return rows.resets(row) ? zeros : call.window_in + rows.read(row) * window; };
    for (int64_t row = 0; row < call.batch; row++)
        mamba2_step_begin(s, call.projected + row * wide, window_in(row), call.window_out + rows.written(row) * window,
                          all_bc + row * bc);
    auto step = [&](int64_t row, int64_t begin, int64_t end, const float* in, float* out, uint16_t* narrow, float* note) {
        mamba2_step(s, call.projected + row * wide, all_bc + row * bc, window_in(row),
                    call.window_out + rows.written(row) * window, in, out, narrow, note, call.out + row * inner, begin, end);
    };
    if (rows.runs) {
        const StatePass of = {s.p, s.r, 0, 1, 1};
        step_runs(rows, s.heads, of, call.state_out, notes,
                  [&](int64_t row, int64_t head, const float* in, float* out, float* note) {
                      step(row, head, head + 1, in, out, nullptr, note);
                  });
        return;
    }
    step_parallel(call.batch, s.heads, s.p * s.r, [&](int64_t row, int64_t begin, int64_t end) {
        const int64_t size = s.p * s.r, at = rows.text_of(row) * state;
        if (narrow) return step(row, begin, end, nullptr, nullptr, narrow + at + begin * size, nullptr);
        float* out = call.state_out + at;
        if (!rows.resets(row))
            return step(row, begin, end, call.state_in + at + begin * size, out + begin * size, nullptr, nullptr);
        for (int64_t head = begin; head < end; head++)
            step(row, head, head + 1, call.fresh_state ? call.fresh_state + head * size : zeros, out + head * size, nullptr,
                 nullptr);
    });
}

static void mamba2_step(const Mamba2StepCall& call) {
    const Mamba2Step& s = call.step;
    mamba2_step_heads(call, afresh(call.reset), nullptr);
    for (int64_t row = 0; row < call.batch; row++)
        mamba2_step_finish(s, call.projected + row * s.projected(), call.out + row * (s.mlp + s.width()));
}

}  // namespace MK_ISA
