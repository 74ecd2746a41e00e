// Mamba-3's decoding step: everything between the two projections.
#pragma once

#include "border.h"
#include "quaternion.h"
#include "rotation.h"
#include "step.h"

namespace MK_ISA {

struct Mamba3Step {
    MK_FIELDS(Mamba3Step,
        int64_t heads, p, r, groups, ranks;
        int64_t angles;                // pairs that rotate, or blocks of four with `quaternions`; 0: none
        bool quaternions;              // each head's own, otherwise angles that heads share
        bool half;                     // pairs are (q, q + r / 2), otherwise (2 q, 2 q + 1)
        bool heavy_tail;               // how decays are activated: heavy tail, otherwise softplus
        const float* dt_bias;          // [heads]
        const float *B_norm, *C_norm;  // [r]
        const float *B_bias, *C_bias;  // [heads][ranks][r]
        const float *mimo_x, *mimo_z, *mimo_o;  // [heads][ranks][p], or all null: one rank without weights
        const float* D;                         // [heads]
        const float* norm_weight;               // [heads * p], normed head by head, or null
        float norm_eps, dt_low, dt_high, a_floor, rotation_range;
    )

    int64_t width() const { return heads * p; }
    int64_t bc() const { return ranks * groups * r; }
    // A cache keeps one angle, or one quaternion, even where nothing rotates.
    int64_t kept() const { return (angles ? angles : 1) * (quaternions ? 4 : 1); }
    // Where the parts of a projected row begin; its first is the gate.
    int64_t x() const { return width(); }
    int64_t b() const { return 2 * width(); }
    int64_t c() const { return b() + bc(); }
    int64_t dt() const { return c() + bc(); }
    int64_t a() const { return dt() + heads; }
    int64_t trapezoid() const { return a() + heads; }
    int64_t rotation() const { return trapezoid() + heads; }
    int64_t projected() const { return rotation() + (quaternions ? heads * kept() / 4 * 3 : kept()); }
    // Floats that mamba3_step_begin fills.
    int64_t shared() const { return 2 * bc() + kept(); }
};

// First, once per row, what the heads share: B and C [ranks][groups][r] with their norms, then the turns per unit of
// step size [angles], where these are shared too.
static void mamba3_step_begin(const Mamba3Step& s, const float* projected, float* shared) {
    for (int64_t at = 0; at < s.bc(); at += s.r) {
        rms_norm(projected + s.b() + at, s.r, s.B_norm, s.norm_eps, shared + at);
        rms_norm(projected + s.c() + at, s.r, s.C_norm, s.norm_eps, shared + s.bc() + at);
    }
    for (int64_t q = 0; q < s.angles && !s.quaternions; q++)
        shared[2 * s.bc() + q] = float(s.rotation_range * M_PI * tanh_of(projected[s.rotation() + q]));
}

// One head's step size and trapezoid.
struct Mamba3Token {
    float dt, decay, gamma, beta;
};

static Mamba3Token mamba3_step_token(const Mamba3Step& s, const float* projected, int64_t head) {
    float dt = softplus_clamped(projected[s.dt() + head] + s.dt_bias[head], s.dt_low, s.dt_high);
    float a = projected[s.a() + head];
    float rate = s.heavy_tail ? (a > 0 ? 1 + a : 1 / (1 - a)) : vsoftplus(splat(a))[0];
    rate = rate < s.a_floor ? s.a_floor : rate;
    float lambda = vsigmoid(splat(projected[s.trapezoid() + head]))[0];
    float decay = vexp(splat(-dt * rate))[0];
    return {dt, decay, lambda * dt, (1 - lambda) * dt * decay};
}

// The carried angles plus this token's, wrapped to [-pi, pi]. In double: step sizes have no limit, and an angle counts
// modulo a turn.
static void mamba3_step_turn(int64_t angles, float dt, const float* turns, const float* before, float* after) {
    for (int64_t q = 0; q < angles; q++) after[q] = float(wrapped(before[q] + double(dt) * turns[q]));
}

// No turn at all.
static void mamba3_step_unturned(const Mamba3Step& s, float* angle) {
    clear(angle, s.kept());
    for (int64_t q = 0; q < s.kept() && s.quaternions; q += 4) angle[q] = 1;
}

// Skip, norm, gate and contraction of the ranks; y is [ranks][p].
static void mamba3_step_read_out(
    const Mamba3Step& s, int64_t head, const float* z, const float* x, float* y, float* out) {
    const int64_t weights = head * s.ranks * s.p;
    vf D = splat(s.D[head]);
    for (int64_t m = 0; m < s.ranks; m++, y += s.p) {
        const int64_t at = weights + m * s.p;
        each_vector(s.p, [&](int64_t i, int64_t count) {
            vf v = load_part(x + i, count);
            if (s.mimo_x) v *= load_part(s.mimo_x + at + i, count);
            store_part(y + i, load_part(y + i, count) + D * v, count);
        });
        float scale = s.norm_weight ? inverse_rms(y, s.p, s.norm_eps) : 1.0f;
        each_vector(s.p, [&](int64_t i, int64_t count) {
            vf value = load_part(y + i, count), gate = load_part(z + i, count);
            if (s.norm_weight) value *= splat(scale) * load_part(s.norm_weight + head * s.p + i, count);
            if (s.mimo_z) gate *= load_part(s.mimo_z + at + i, count);
            value *= vsilu(gate);
            if (s.mimo_o) value *= load_part(s.mimo_o + at + i, count);
            if (m) value += load_part(out + i, count);
            store_part(out + i, value, count);
        });
    }
}

// coef[ranks][p] = weight * x * mimo_x
static void mamba3_step_expand(const Mamba3Step& s, int64_t head, float weight, const float* x, float* coef) {
    for (int64_t m = 0; m < s.ranks; m++)
        each_vector(s.p, [&](int64_t i, int64_t count) {
            vf v = splat(weight) * load_part(x + i, count);
            if (s.mimo_x) v *= load_part(s.mimo_x + (head * s.ranks + m) * s.p + i, count);
            store_part(coef + m * s.p + i, v, count);
        });
}

// What is carried from token to token: state[heads][p][r], k_state[ranks][heads][r], v_state[heads][p],
// angle[heads][kept], each several times.
struct Mamba3Carried {
    MK_FIELDS(Mamba3Carried,
        float *state, *k_state, *v_state, *angle;
    )

    // All but the state.
    Mamba3Carried at(const Mamba3Step& s, int64_t place) const {
        return {nullptr, k_state + place * s.ranks * s.heads * s.r, v_state + place * s.width(),
                angle + place * s.heads * s.kept()};
    }
};

// Then the heads [head_begin, head_end), in any order and any thread, with the states of these heads; out is [heads * p].
// `note` may be null.
static void mamba3_step(
    const Mamba3Step& s, const float* projected, const float* shared, const Mamba3Carried& before,
    const Mamba3Carried& after, const float* state_in, float* state_out, float* note, float* out, int64_t head_begin,
    int64_t head_end) {
    const int64_t m = s.ranks, p = s.p, r = s.r;
    const Pairs pairs = {r, s.angles, !s.half};
    float* write = scratch<STEP_HEAD>(3 * m * r + 3 * m * p + 2 * (r + 2 * W) + s.angles);
    float *read = write + 2 * m * r, *coef = read + m * r, *y = coef + 2 * m * p;
    float *cosine = y + m * p, *sine = cosine + r + 2 * W;
    Turn turn = {cosine, sine, sine + r + 2 * W};
    for (int64_t head = head_begin; head < head_end; head++) {
        const Mamba3Token token = mamba3_step_token(s, projected, head);
        const float *z = projected + head * p, *x = projected + s.x() + head * p;
        float* angle = after.angle + head * s.kept();
        const float* angle_before = before.angle + head * s.kept();
        if (!s.angles) {
            mamba3_step_unturned(s, angle);
        } else if (s.quaternions) {
            const float* rot = projected + s.rotation() + head * 3 * s.angles;
            advance_quaternions(s.angles, token.dt, s.rotation_range, rot, angle_before, angle);
        } else {
            mamba3_step_turn(s.angles, token.dt, shared + 2 * s.bc(), angle_before, angle);
        }
        if (!s.quaternions) turn.of(angle, pairs);
        auto turned = [&](const float* normed, const float* bias, float* out) {
            if (s.quaternions) turn_blocks(r, s.angles, angle, normed, bias, out);
            else turn_line(pairs, turn, normed, bias, out);
        };
        const float* b = shared + head / (s.heads / s.groups) * r;
        for (int64_t j = 0; j < m; j++) {
            const int64_t bias = (head * m + j) * r, group = j * s.groups * r, kept = (j * s.heads + head) * r;
            copy(before.k_state + kept, r, write + j * r);
            turned(b + group, s.B_bias + bias, write + (m + j) * r);
            turned(b + s.bc() + group, s.C_bias + bias, read + j * r);
            copy(write + (m + j) * r, r, after.k_state + kept);
        }
        // The last token's other half of the trapezoid, and this token's own.
        mamba3_step_expand(s, head, token.beta, before.v_state + head * p, coef);
        mamba3_step_expand(s, head, token.gamma, x, coef + m * p);
        copy(x, p, after.v_state + head * p);
        const int64_t at = (head - head_begin) * p * r;
        const StatePass pass = {p, r, token.decay, 2 * m, m, write, coef, read, state_in + at, state_out + at, y};
        if (note) take_note(pass, note + (head - head_begin) * note_size(p, r, 2 * m));
        pass_state(pass);
        mamba3_step_read_out(s, head, z, x, y, out + head * p);
    }
}

// All rows, which are contiguous.
struct Mamba3StepCall {
    MK_FIELDS(Mamba3StepCall,
        Mamba3Step step;
        int64_t batch;
        const float* projected;  // [batch][projected()]
        Mamba3Carried before, after;
        float* out;                // [batch][heads * p]
        const bool* reset;         // [batch]: rows that start afresh, or null
        const float* fresh_state;  // what those start from, [heads][p][r], or null: zeros
    )
};

// What a row that starts afresh reads of all that is carried. Heads have the state of zeros in common.
static Mamba3Carried mamba3_step_fresh(const Mamba3Step& s, const Rows& rows) {
    if (!rows.reset) return {};
    const int64_t sizes[3] = {s.ranks * s.heads * s.r, s.width(), s.p * s.r};
    int64_t most = 0;
    for (int64_t size : sizes) most = size > most ? size : most;
    float* zeros = (float*)fresh_zeros(rows.reset, most + s.heads * s.kept());
    for (int64_t head = 0; head < s.heads; head++) mamba3_step_unturned(s, zeros + most + head * s.kept());
    return {zeros, zeros, zeros, zeros + most};
}

// What is carried is that at each row's places, but for states: what enters one is what leaves it, where rows have an
// order.
static void mamba3_step(const Mamba3StepCall& call, const Rows& rows, float* notes) {
    const Mamba3Step& s = call.step;
    float* shared = scratch<STEP_ROWS>(call.batch * s.shared());
    const Mamba3Carried fresh = mamba3_step_fresh(s, rows);
    for (int64_t row = 0; row < call.batch; row++)
        mamba3_step_begin(s, call.projected + row * s.projected(), shared + row * s.shared());
    auto step = [&](int64_t row, int64_t begin, int64_t end, const float* in, float* out, float* note) {
        mamba3_step(s, call.projected + row * s.projected(), shared + row * s.shared(),
                    rows.resets(row) ? fresh : call.before.at(s, rows.read(row)), call.after.at(s, rows.written(row)), in, out, note,
                    call.out + row * s.width(), begin, end);
    };
    if (rows.runs) {
        const StatePass of = {s.p, s.r, 0, 2 * s.ranks, s.ranks};
        step_runs(rows, s.heads, of, call.after.state, notes,
                  [&](int64_t row, int64_t head, const float* in, float* out, float* note) {
                      step(row, head, head + 1, in, out, note);
                  });
        return;
    }
    step_parallel(call.batch, s.heads, s.p * s.r, [&](int64_t row, int64_t begin, int64_t end) {
        const int64_t size = s.p * s.r, at = rows.text_of(row) * s.heads * size;
        float* out = call.after.state + at;
        if (!rows.resets(row))
            return step(row, begin, end, call.before.state + at + begin * size, out + begin * size, nullptr);
        for (int64_t head = begin; head < end; head++)
            step(row, head, head + 1, call.fresh_state ? call.fresh_state + head * size : fresh.state, out + head * size,
                 nullptr);
    });
}

static void mamba3_step(const Mamba3StepCall& call) { mamba3_step(call, afresh(call.reset), nullptr); }

}  // namespace MK_ISA
