// Decoding steps of one row as plain loops; whole_model.h has them too.
#pragma once

#include "harness.h"

namespace agreement {

// The newest output of the convolution of n channels, and their window [n][k] after it.
static Doubles convolved(int64_t n, int64_t k, const float* weight, const float* bias, const double* x,
                         double* window) {
    Doubles y(n);
    for (int64_t c = 0; c < n; c++) {
        double* own = window + c * k;
        for (int64_t q = 0; q + 1 < k; q++) own[q] = own[q + 1];
        own[k - 1] = x[c];
        double sum = bias ? bias[c] : 0;
        for (int64_t q = 0; q < k; q++) sum += weight[c * k + q] * own[q];
        y[c] = silu(sum);
    }
    return y;
}

// projected is [2][channels], dt before softplus; B and C are [r].
static Doubles mamba1_scan(const Mamba1Step& s, const double* projected, const double* x, const double* dt,
                           const double* B, const double* C, double* state) {
    Doubles y(s.channels);
    for (int64_t i = 0; i < s.channels; i++) {
        const double size = softplus(dt[i]);
        double sum = s.D[i] * x[i];
        for (int64_t q = 0; q < s.r; q++) {
            double& h = state[i * s.r + q];
            h = exp(-size * exp((double)s.A_log[i * s.r + q])) * h + size * x[i] * B[q];
            sum += h * C[q];
        }
        y[i] = sum * silu(projected[s.channels + i]);
    }
    return y;
}

static Doubles mamba2_token(const Mamba2Step& s, const double* projected, double* window, double* state) {
    const int64_t width = s.heads * s.p, gr = s.groups * s.r, channels = width + 2 * gr;
    const double *z = projected + 2 * s.mlp, *dt = z + width + channels;
    Doubles xbc = convolved(channels, s.k, s.conv_weight, s.conv_bias, z + width, window), out(s.mlp + width);
    for (int64_t i = 0; i < s.mlp; i++) out[i] = silu(projected[i]) * projected[s.mlp + i];
    const bool gate_first = !s.norm_weight || !s.norm_before_gate;
    for (int64_t head = 0; head < s.heads; head++) {
        const double size = clamped(softplus(dt[head] + s.dt_bias[head]), s.dt_low, s.dt_high);
        const double *B = xbc.data() + width + head / (s.heads / s.groups) * s.r, *C = B + gr;
        for (int64_t i = head * s.p; i < (head + 1) * s.p; i++) {
            double sum = s.D[s.D_per_channel ? i : head] * xbc[i];
            for (int64_t q = 0; q < s.r; q++) {
                double& h = state[i * s.r + q];
                h = exp(-size * exp((double)s.A_log[head])) * h + size * xbc[i] * B[q];
                sum += h * C[q];
            }
            out[s.mlp + i] = sum * (gate_first ? silu(z[i]) : 1);
        }
    }
    for (int64_t at = 0; s.norm_weight && at < width; at += s.norm_group) {
        Doubles normed = rms_normed(out.data() + s.mlp + at, s.norm_group, s.norm_eps, s.norm_weight + at);
        for (int64_t i = 0; i < s.norm_group; i++) out[s.mlp + at + i] = normed[i] * (gate_first ? 1 : silu(z[at + i]));
    }
    return out;
}

// What Mamba-3 carries, of one row.
struct Carried3 {
    Doubles state, k, v, angle;
};

static void hamilton(const double* a, const double* b, double* product) {
    const double made[4] = {
        a[0] * b[0] - a[1] * b[1] - a[2] * b[2] - a[3] * b[3], a[0] * b[1] + a[1] * b[0] + a[2] * b[3] - a[3] * b[2],
        a[0] * b[2] - a[1] * b[3] + a[2] * b[0] + a[3] * b[1], a[0] * b[3] + a[1] * b[2] - a[2] * b[1] + a[3] * b[0]};
    memcpy(product, made, sizeof made);
}

// One head's rotation after a token, and a vector turned by it.
static void advance(const Mamba3Step& s, double dt, const double* rot, double* angle) {
    for (int64_t q = 0; q < s.angles && !s.quaternions; q++) angle[q] += dt * s.rotation_range * M_PI * tanh(rot[q]);
    for (int64_t q = 0; q < s.angles && s.quaternions; q++) {
        const double* axis = rot + 3 * q;
        const double size = sqrt(axis[0] * axis[0] + axis[1] * axis[1] + axis[2] * axis[2]);
        const double half = dt * s.rotation_range * M_PI / 2 * tanh(size), by = size > 0 ? sin(half) / size : 0;
        const double turn[4] = {cos(half), by * axis[0], by * axis[1], by * axis[2]};
        hamilton(turn, angle + 4 * q, angle + 4 * q);
        double squares = 0;
        for (int i = 0; i < 4; i++) squares += angle[4 * q + i] * angle[4 * q + i];
        for (int i = 0; i < 4; i++) angle[4 * q + i] /= sqrt(squares);
    }
}
static void turn(const Mamba3Step& s, const double* angle, double* x) {
    for (int64_t q = 0; q < s.angles; q++) {
        if (s.quaternions) {
            const double back[4] = {angle[4 * q], -angle[4 * q + 1], -angle[4 * q + 2], -angle[4 * q + 3]};
            hamilton(back, x + 4 * q, x + 4 * q);
            continue;
        }
        double &one = x[s.half ? q : 2 * q], &other = x[s.half ? q + s.r / 2 : 2 * q + 1];
        const double kept = one;
        one = kept * cos(angle[q]) - other * sin(angle[q]);
        other = kept * sin(angle[q]) + other * cos(angle[q]);
    }
}

static Doubles mamba3_token(const Mamba3Step& s, const double* projected, Carried3& carried) {
    const int64_t width = s.heads * s.p, bc = s.ranks * s.groups * s.r,
                  kept = (s.angles ? s.angles : 1) * (s.quaternions ? 4 : 1);
    const double *x = projected + width, *b = x + width, *c = b + bc, *dts = c + bc, *rot = dts + 3 * s.heads;
    Doubles out(width, 0);
    for (int64_t head = 0; head < s.heads; head++) {
        const double dt = clamped(softplus(dts[head] + s.dt_bias[head]), s.dt_low, s.dt_high), a = dts[s.heads + head];
        const double rate = s.heavy_tail ? (a > 0 ? 1 + a : 1 / (1 - a)) : softplus(a);
        const double decay = exp(-dt * (rate < s.a_floor ? s.a_floor : rate)),
                     lambda = sigmoid(dts[2 * s.heads + head]);
        double *angle = carried.angle.data() + head * kept, *state = carried.state.data() + head * s.p * s.r;
        advance(s, dt, s.quaternions ? rot + 3 * head * s.angles : rot, angle);
        for (int64_t i = 0; i < s.p * s.r; i++) state[i] *= decay;
        for (int64_t m = 0; m < s.ranks; m++) {
            const int64_t group = (m * s.groups + head / (s.heads / s.groups)) * s.r;
            Doubles B = rms_normed(b + group, s.r, s.norm_eps, s.B_norm);
            for (int64_t q = 0; q < s.r; q++) B[q] += s.B_bias[(head * s.ranks + m) * s.r + q];
            turn(s, angle, B.data());
            double *last = carried.k.data() + (m * s.heads + head) * s.r, *v = carried.v.data() + head * s.p;
            for (int64_t i = 0; i < s.p; i++) {
                const double by = s.mimo_x ? s.mimo_x[(head * s.ranks + m) * s.p + i] : 1;
                for (int64_t q = 0; q < s.r; q++)
                    state[i * s.r + q] +=
                        (1 - lambda) * dt * decay * v[i] * by * last[q] + lambda * dt * x[head * s.p + i] * by * B[q];
            }
            for (int64_t q = 0; q < s.r; q++) last[q] = B[q];
        }
        for (int64_t i = 0; i < s.p; i++) carried.v[head * s.p + i] = x[head * s.p + i];
        for (int64_t m = 0; m < s.ranks; m++) {
            const int64_t group = (m * s.groups + head / (s.heads / s.groups)) * s.r,
                          weights = (head * s.ranks + m) * s.p;
            Doubles C = rms_normed(c + group, s.r, s.norm_eps, s.C_norm), y(s.p);
            for (int64_t q = 0; q < s.r; q++) C[q] += s.C_bias[(head * s.ranks + m) * s.r + q];
            turn(s, angle, C.data());
            for (int64_t i = 0; i < s.p; i++) {
                y[i] = s.D[head] * x[head * s.p + i] * (s.mimo_x ? s.mimo_x[weights + i] : 1);
                for (int64_t q = 0; q < s.r; q++) y[i] += state[i * s.r + q] * C[q];
            }
            if (s.norm_weight) y = rms_normed(y.data(), s.p, s.norm_eps, s.norm_weight + head * s.p);
            for (int64_t i = 0; i < s.p; i++) {
                const double gate = projected[head * s.p + i] * (s.mimo_z ? s.mimo_z[weights + i] : 1);
                out[head * s.p + i] += y[i] * silu(gate) * (s.mimo_o ? s.mimo_o[weights + i] : 1);
            }
        }
    }
    return out;
}

// Keeps the parameters of a step that it draws.
struct Kept {
    std::vector<Floats> all;
    const float* keep(Floats x) {
        all.push_back(std::move(x));
        return all.back().data();
    }
};

static Mamba1Step draw_mamba1(Draw& draw, Kept& kept) {
    Mamba1Step s = {};
    s.channels = draw.whole(1, 45), s.r = draw.whole(1, 20), s.k = draw.whole(1, 5);
    s.conv_weight = kept.keep(draw.floats(s.channels * s.k)), s.A_log = kept.keep(draw.floats(s.channels * s.r, 0.5));
    s.D = kept.keep(draw.floats(s.channels));
    if (draw.chance(0.7)) s.conv_bias = kept.keep(draw.floats(s.channels));
    return s;
}

static Mamba2Step draw_mamba2(Draw& draw, Kept& kept) {
    Mamba2Step s = {};
    s.groups = draw.whole(1, 2), s.heads = s.groups * draw.whole(1, 3), s.p = draw.whole(1, 20),
    s.r = draw.whole(1, 40);
    s.k = draw.whole(1, 5), s.mlp = draw.chance(0.3) ? draw.whole(1, 20) : 0;
    const int64_t width = s.heads * s.p, channels = width + 2 * s.groups * s.r;
    s.conv_weight = kept.keep(draw.floats(channels * s.k)), s.dt_bias = kept.keep(draw.floats(s.heads));
    if (draw.chance(0.7)) s.conv_bias = kept.keep(draw.floats(channels));
    s.A_log = kept.keep(draw.floats(s.heads, 0.5)), s.D_per_channel = draw.chance(0.3);
    s.D = kept.keep(draw.floats(s.D_per_channel ? width : s.heads));
    s.norm_group = draw.chance(0.5) ? width : s.p, s.norm_eps = 1e-5f, s.norm_before_gate = draw.chance(0.4);
    if (draw.chance(0.8)) s.norm_weight = kept.keep(draw.floats(width));
    s.dt_low = 0.01f, s.dt_high = 2.0f;
    return s;
}

static Mamba3Step draw_mamba3(Draw& draw, Kept& kept) {
    Mamba3Step s = {};
    s.groups = draw.whole(1, 2), s.heads = s.groups * draw.whole(1, 3), s.p = draw.whole(1, 20),
    s.ranks = draw.whole(1, 4);
    s.quaternions = draw.chance(0.5), s.half = draw.chance(0.5), s.heavy_tail = draw.chance(0.5);
    s.r = (s.quaternions ? 4 : 2) * draw.whole(1, 9), s.angles = draw.whole(0, s.r / (s.quaternions ? 4 : 2));
    s.dt_bias = kept.keep(draw.floats(s.heads)), s.D = kept.keep(draw.floats(s.heads));
    s.B_norm = kept.keep(draw.floats(s.r)), s.C_norm = kept.keep(draw.floats(s.r));
    s.B_bias = kept.keep(draw.floats(s.heads * s.ranks * s.r)),
    s.C_bias = kept.keep(draw.floats(s.heads * s.ranks * s.r));
    if (s.ranks > 1)
        for (const float** weights : {&s.mimo_x, &s.mimo_z, &s.mimo_o})
            *weights = kept.keep(draw.floats(s.heads * s.ranks * s.p));
    if (draw.chance(0.5)) s.norm_weight = kept.keep(draw.floats(s.heads * s.p));
    s.norm_eps = 1e-5f, s.dt_low = 0, s.dt_high = 5, s.a_floor = 1e-4f,
    s.rotation_range = draw.chance(0.5) ? 1.0f : 2.0f;
    return s;
}

// No turn, in every place for one.
static Floats unturned(const Mamba3Step& s, int64_t rows) {
    Floats angle(rows * s.heads * s.kept(), 0.0f);
    for (size_t i = 0; i < angle.size() && s.quaternions; i += 4) angle[i] = 1;
    return angle;
}

// Rows of `reset` start afresh, where there is any.
static std::vector<uint8_t> draw_resets(Draw& draw, int64_t batch) {
    std::vector<uint8_t> reset;
    for (int64_t row = 0; row < batch; row++) reset.push_back(draw.chance(0.4));
    return draw.chance(0.5) ? reset : std::vector<uint8_t>();
}

// A row of what is carried: as it is or, where it starts afresh, zeros or what it starts from.
static Doubles entering(const Floats& all, int64_t row, int64_t n, const std::vector<uint8_t>& reset,
                        const float* fresh = nullptr) {
    if (reset.empty() || !reset[row]) return wide(all.data() + row * n, n);
    return fresh ? wide(fresh, n) : Doubles(n, 0.0);
}

static void check_mamba1_step(Draw& draw) {
    Kept kept;
    const Mamba1Step s = draw_mamba1(draw, kept);
    const int64_t b = draw.whole(1, 4), rank = draw.whole(1, 5), i = s.channels, small = rank + 2 * s.r;
    Floats projected = draw.floats(b * 2 * i), window = draw.floats(b * i * s.k), x(b * i), window_out(window.size());
    Floats dt = draw.floats(b * i), dt_b_c = draw.floats(b * small), state = draw.floats(b * i * s.r),
           state_out(state.size()), out(b * i);
    const std::vector<uint8_t> reset = draw_resets(draw, b);
    Mamba1StepConv conv = {};
    conv.step = s, conv.batch = b, conv.projected = projected.data(), conv.window_in = window.data();
    conv.window_out = window_out.data(), conv.x = x.data(),
    conv.reset = reset.empty() ? nullptr : (const bool*)reset.data();
    run("mamba1_step_conv", conv);
    Mamba1StepScan scan = {};
    scan.step = s, scan.batch = b, scan.dt_rank = rank, scan.projected = projected.data(), scan.x = x.data(),
    scan.dt = dt.data();
    scan.dt_b_c = dt_b_c.data(), scan.state_in = state.data(), scan.state_out = state_out.data(), scan.out = out.data();
    scan.reset = conv.reset;
    run("mamba1_step_scan", scan);
    for (int64_t row = 0; row < b; row++) {
        const Doubles of_row = wide(projected.data() + row * 2 * i, 2 * i),
                      bc = wide(dt_b_c.data() + row * small + rank, 2 * s.r);
        Doubles own_window = entering(window, row, i * s.k, reset), own = entering(state, row, i * s.r, reset);
        const Doubles x_want = convolved(i, s.k, s.conv_weight, s.conv_bias, of_row.data(), own_window.data());
        compare("x", x.data() + row * i, x_want, 1e-5);
        compare("window", window_out.data() + row * i * s.k, own_window, 0);
        const Doubles y = mamba1_scan(s, of_row.data(), x_want.data(), wide(dt.data() + row * i, i).data(), bc.data(),
                                      bc.data() + s.r, own.data());
        compare("out", out.data() + row * i, y, 2e-5), compare("state", state_out.data() + row * i * s.r, own, 2e-5);
    }
}

static void check_mamba2_step(Draw& draw) {
    Kept kept;
    const Mamba2Step s = draw_mamba2(draw, kept);
    const int64_t b = draw.whole(1, 4), size = s.width() * s.r, wide_row = s.projected(), inner = s.mlp + s.width(),
                  w = s.conv_dim() * s.k;
    Floats projected = draw.floats(b * wide_row), window = draw.floats(b * w), state = draw.floats(b * size);
    Floats window_out(b * w), state_out(b * size), out(b * inner);
    const std::vector<uint8_t> reset = draw_resets(draw, b);
    Mamba2StepCall call = {};
    call.step = s, call.batch = b, call.projected = projected.data(), call.window_in = window.data(),
    call.window_out = window_out.data();
    call.state_in = state.data(), call.state_out = state_out.data(), call.out = out.data();
    call.reset = reset.empty() ? nullptr : (const bool*)reset.data();
    if (draw.chance(0.5)) call.fresh_state = kept.keep(draw.floats(size));
    run("mamba2_step", call);
    for (int64_t row = 0; row < b; row++) {
        Doubles own_window = entering(window, row, w, reset), own = entering(state, row, size, reset, call.fresh_state);
        const Doubles y =
            mamba2_token(s, wide(projected.data() + row * wide_row, wide_row).data(), own_window.data(), own.data());
        compare("out", out.data() + row * inner, y, 5e-5),
            compare("window", window_out.data() + row * w, own_window, 0);
        compare("state", state_out.data() + row * size, own, 1e-5);
    }
}

static void compare_rotation(const Mamba3Step& s, const float* got, const Doubles& want) {
    if (s.quaternions) return compare("rotation", got, want, 1e-5);
    for (size_t i = 0; i < want.size(); i++) judge("rotation", fabs(remainder(got[i] - want[i], 2 * M_PI)), 1e-5);
}

static void check_mamba3_step(Draw& draw) {
    Kept kept;
    const Mamba3Step s = draw_mamba3(draw, kept);
    const int64_t b = draw.whole(1, 4), size = s.width() * s.r, wide_row = s.projected(), ks = s.ranks * s.heads * s.r,
                  as = s.heads * s.kept();
    Floats projected = draw.floats(b * wide_row), state = draw.floats(b * size), k = draw.floats(b * ks),
           v = draw.floats(b * s.width());
    Floats angle = s.angles ? draw.floats(b * as) : unturned(s, b), fresh_angle = unturned(s, 1);
    Floats state_out(state.size()), k_out(k.size()), v_out(v.size()), angle_out(angle.size()), out(b * s.width());
    const std::vector<uint8_t> reset = draw_resets(draw, b);
    Mamba3StepCall call = {};
    call.step = s, call.batch = b, call.projected = projected.data(), call.out = out.data();
    call.before.state = state.data(), call.before.k_state = k.data(), call.before.v_state = v.data(),
    call.before.angle = angle.data();
    call.after.state = state_out.data(), call.after.k_state = k_out.data(), call.after.v_state = v_out.data(),
    call.after.angle = angle_out.data();
    call.reset = reset.empty() ? nullptr : (const bool*)reset.data();
    if (draw.chance(0.5)) call.fresh_state = kept.keep(draw.floats(size));
    run("mamba3_step", call);
    for (int64_t row = 0; row < b; row++) {
        Carried3 own = {entering(state, row, size, reset, call.fresh_state), entering(k, row, ks, reset),
                        entering(v, row, s.width(), reset), entering(angle, row, as, reset, fresh_angle.data())};
        const Doubles y = mamba3_token(s, wide(projected.data() + row * wide_row, wide_row).data(), own);
        compare("out", out.data() + row * s.width(), y, 5e-5),
            compare("state", state_out.data() + row * size, own.state, 2e-5);
        compare("k", k_out.data() + row * ks, own.k, 1e-5), compare("v", v_out.data() + row * s.width(), own.v, 0);
        compare_rotation(s, angle_out.data() + row * as, own.angle);
    }
}

}  // namespace agreement
