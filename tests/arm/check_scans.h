// Scans with their backward, and Mamba-3's preparation.
#pragma once

#include "harness.h"

namespace agreement {

struct PrepareCase {
    int64_t b, s, m, g, h, r, a;
    bool neighbours;
    double range, eps;
    Doubles x[2], weight[2], bias[2], rot, dt, before;
    std::vector<int64_t> segments;

    // B and C [b, s, m, h, r]; the angles after the last token, not wrapped.
    void forward(Doubles (&y)[2], Doubles& angle) const {
        angle = before;
        for (Doubles& one : y) one.assign(b * s * m * h * r, 0);
        for (int64_t row = 0; row < b; row++)
            for (int64_t t = 0; t < s; t++)
                for (int64_t head = 0; head < h; head++) {
                    double* theta = angle.data() + (row * h + head) * a;
                    const int64_t token = row * s + t;
                    for (int64_t q = 0; q < a; q++) {
                        if (t && !segments.empty() && segments[token] != segments[token - 1]) theta[q] = 0;
                        theta[q] += dt[token * h + head] * range * tanh(rot[token * a + q]);
                    }
                    for (int side = 0; side < 2; side++)
                        for (int64_t j = 0; j < m; j++) {
                            const double* from = x[side].data() + ((token * m + j) * g + head / (h / g)) * r;
                            Doubles v = rms_normed(from, r, eps, weight[side].data());
                            for (int64_t i = 0; i < r; i++) v[i] += bias[side][(head * m + j) * r + i];
                            for (int64_t q = 0; q < a; q++) {
                                double &one = v[neighbours ? 2 * q : q], &other = v[neighbours ? 2 * q + 1 : q + r / 2];
                                const double kept = one;
                                one = kept * cos(theta[q]) - other * sin(theta[q]);
                                other = kept * sin(theta[q]) + other * cos(theta[q]);
                            }
                            for (int64_t i = 0; i < r; i++) y[side][((token * m + j) * h + head) * r + i] = v[i];
                        }
                }
    }
};

static void check_prepare(Draw& draw) {
    const int64_t b = draw.whole(1, 2), s = draw.whole(1, 140), m = draw.whole(1, 3), g = draw.whole(1, 2);
    const int64_t h = g * draw.whole(1, 2), r = 2 * draw.whole(1, 12), a = draw.whole(0, r / 2);
    Floats x[2], weight[2], bias[2], y[2];
    for (int side = 0; side < 2; side++) {
        x[side] = draw.floats(b * s * m * g * r), weight[side] = draw.floats(r), bias[side] = draw.floats(h * m * r);
        y[side].resize(b * s * m * h * r);
    }
    Floats rot = draw.floats(b * s * a), dt = draw.floats(b * s * h, 0.1, 0.3), before = draw.floats(b * h * a),
           after(b * h * a);
    PrepareCase exact = {
        b, s, m, g, h, r, a, draw.chance(0.5), 1.5 * M_PI, 1e-5, {}, {}, {}, wide(rot), wide(dt), wide(before), {}};
    for (int side = 0; side < 2; side++)
        exact.x[side] = wide(x[side]), exact.weight[side] = wide(weight[side]), exact.bias[side] = wide(bias[side]);
    if (draw.chance(0.5)) exact.segments = draw.segments(b, s);
    Doubles entering(b * ((s + 63) / 64) * h * a + 1);
    Prepare inputs = {};
    inputs.turns.batch = b, inputs.turns.length = s, inputs.turns.heads = h, inputs.turns.angles = a;
    inputs.turns.rot = rot.data(), inputs.turns.rot_batch = s * a, inputs.turns.rot_token = a,
    inputs.turns.dt = dt.data();
    inputs.turns.range = exact.range, inputs.turns.before = before.data();
    inputs.turns.segments = exact.segments.empty() ? nullptr : exact.segments.data();
    inputs.pairs.state = r, inputs.pairs.angles = a, inputs.pairs.neighbours = exact.neighbours;
    inputs.ranks = m, inputs.groups = g, inputs.eps = 1e-5f, inputs.entering = entering.data();
    for (int side = 0; side < 2; side++) {
        Side& of = side ? inputs.c : inputs.b;
        of.x = x[side].data(), of.x_batch = s * m * g * r, of.x_token = m * g * r;
        of.weight = weight[side].data(), of.bias = bias[side].data();
    }
    PrepareForward call = {};
    call.inputs = inputs, call.b = y[0].data(), call.c = y[1].data(), call.after = after.data();
    run("mamba3_prepare", call);
    Doubles want[2], angle;
    exact.forward(want, angle);
    compare("b", y[0].data(), want[0], 1e-5), compare("c", y[1].data(), want[1], 1e-5);
    for (size_t i = 0; i < angle.size(); i++) judge("after", fabs(remainder(after[i] - angle[i], 2 * M_PI)), 1e-5);

    Floats d_y[2] = {draw.floats(y[0].size()), draw.floats(y[1].size())}, d_after = draw.floats(after.size());
    Floats d_theta(b * s * h * a), d_b(x[0].size()), d_c(x[1].size()), d_rot(rot.size()), d_dt(dt.size()),
        d_before(before.size());
    Floats sums(2 * (h * m + 1) * r);
    PrepareBackward back = {};
    back.inputs = inputs, back.d_b_out = d_y[0].data(), back.d_c_out = d_y[1].data(), back.d_after = d_after.data();
    back.d_theta = d_theta.data(), back.d_b = d_b.data(), back.d_c = d_c.data(), back.d_rot = d_rot.data();
    back.d_dt = d_dt.data(), back.d_before = d_before.data(), back.sums = sums.data();
    run("mamba3_prepare_backward", back);
    auto part = [&](int64_t at, int64_t n) { return Floats(sums.begin() + at, sums.begin() + at + n); };
    const int64_t size = h * m * r;
    compare_gradients(draw,
                      {{"b", &exact.x[0], d_b},
                       {"c", &exact.x[1], d_c},
                       {"rot", &exact.rot, d_rot},
                       {"dt", &exact.dt, d_dt},
                       {"before", &exact.before, d_before},
                       {"bias of b", &exact.bias[0], part(0, size)},
                       {"bias of c", &exact.bias[1], part(size, size)},
                       {"weight of b", &exact.weight[0], part(2 * size, r)},
                       {"weight of c", &exact.weight[1], part(2 * size + r, r)}},
                      [&] {
                          exact.forward(want, angle);
                          return dot(want[0], d_y[0]) + dot(want[1], d_y[1]) + dot(angle, d_after);
                      });
}

struct ScanCase {
    int64_t b, s, g, channels, r;
    bool with_softplus;
    Doubles x, dt, z, B, C, a, state, skip, dt_bias;
    std::vector<uint8_t> fresh;

    void forward(Doubles& y, Doubles& last) const {
        const int64_t width = g * channels;
        y.assign(b * s * width, 0), last = state;
        for (int64_t row = 0; row < b; row++)
            for (int64_t i = 0; i < width; i++) {
                double* h = last.data() + (row * width + i) * r;
                for (int64_t t = 0; t < s; t++) {
                    const int64_t token = row * s + t, at = token * width + i;
                    const double raw = dt[at] + (dt_bias.empty() ? 0 : dt_bias[i]),
                                 size = with_softplus ? softplus(raw) : raw;
                    double sum = skip.empty() ? 0 : skip[i] * x[at];
                    for (int64_t q = 0; q < r; q++) {
                        if (!fresh.empty() && fresh[token]) h[q] = 0;
                        const int64_t of = (token * g + i / channels) * r + q;
                        h[q] = exp(size * a[i * r + q]) * h[q] + size * x[at] * B[of];
                        sum += h[q] * C[of];
                    }
                    y[at] = sum * (z.empty() ? 1 : silu(z[at]));
                }
            }
    }
};

static void check_scan(Draw& draw) {
    const int64_t b = draw.whole(1, 2), s = draw.whole(1, 70), g = draw.whole(1, 2), channels = draw.whole(1, 30);
    const int64_t r = draw.whole(1, 20), width = g * channels;
    auto some = [&](int64_t n) { return draw.chance(0.7) ? draw.floats(n) : Floats(); };
    Floats x = draw.floats(b * s * width), dt = draw.floats(b * s * width, 0.3, 0.5), z = some(b * s * width);
    Floats B = draw.floats(b * s * g * r), C = draw.floats(b * s * g * r), a = draw.floats(width * r),
           skip = some(width);
    Floats state = draw.floats(b * width * r), dt_bias;
    for (float& one : a) one = -fabsf(one);
    ScanCase exact = {b,       s,       g,       channels, r,           draw.chance(0.6), wide(x), wide(dt),
                      wide(z), wide(B), wide(C), wide(a),  wide(state), wide(skip),       {},      {}};
    if (exact.with_softplus) dt_bias = some(width), exact.dt_bias = wide(dt_bias);
    if (draw.chance(0.5))
        for (int64_t i = 0; i < b * s; i++) exact.fresh.push_back(draw.chance(0.2));
    scan::Scan inputs = {};
    inputs.rows = b, inputs.tokens = s, inputs.groups = g, inputs.channels = channels, inputs.rank = r;
    inputs.part_channels = 16, inputs.softplus = exact.with_softplus;
    auto per_token = [&](Floats& of, int64_t token) {
        scan::PerToken made = {};
        made.data = data_or_null(of), made.row = s * token, made.token = token;
        return made;
    };
    inputs.x = per_token(x, width), inputs.dt = per_token(dt, width), inputs.z = per_token(z, width);
    inputs.b = per_token(B, g * r), inputs.c = per_token(C, g * r), inputs.b.group = inputs.c.group = r;
    inputs.a_ir = a.data(), inputs.state_bir = state.data(), inputs.skip_i = data_or_null(skip);
    inputs.dt_bias_i = data_or_null(dt_bias), inputs.fresh_bs = exact.fresh.empty() ? nullptr : exact.fresh.data();
    Floats y(x.size()), last(state.size());
    ScanForward call = {};
    call.inputs = inputs, call.y_bsi = y.data(), call.last_bir = last.data();
    run("selective_scan", call);
    Doubles y_want, last_want;
    exact.forward(y_want, last_want);
    compare("y", y.data(), y_want, 2e-5), compare("last", last.data(), last_want, 2e-5);

    const int64_t parts = (channels + 15) / 16;
    Floats d_y = draw.floats(y.size()), d_last = draw.floats(last.size()), d_x(x.size()), d_dt(dt.size()),
           d_z(z.size());
    Floats d_a(b * a.size()), d_B(parts * B.size()), d_C(parts * C.size()), d_state(state.size()),
        d_skip(b * skip.size()), d_bias(b * dt_bias.size());
    ScanBackward back = {};
    back.inputs = inputs, back.dy = per_token(d_y, width), back.d_last_bir = d_last.data();
    back.dx_bsi = d_x.data(), back.d_dt_bsi = d_dt.data(), back.dz_bsi = data_or_null(d_z), back.da_bir = d_a.data();
    back.db_kbsgr = d_B.data(), back.dc_kbsgr = d_C.data(), back.d_state_bir = d_state.data();
    back.d_skip_bi = data_or_null(d_skip), back.d_dt_bias_bi = data_or_null(d_bias);
    run("selective_scan_backward", back);
    auto summed = [](const Floats& shares, size_t n) {
        Floats sum(n, 0.0f);
        for (size_t i = 0; i < shares.size(); i++) sum[i % n] += shares[i];
        return sum;
    };
    compare_gradients(draw,
                      {{"x", &exact.x, d_x},
                       {"dt", &exact.dt, d_dt},
                       {"z", &exact.z, d_z},
                       {"a", &exact.a, summed(d_a, a.size())},
                       {"b", &exact.B, summed(d_B, B.size())},
                       {"c", &exact.C, summed(d_C, C.size())},
                       {"state", &exact.state, d_state},
                       {"skip", &exact.skip, summed(d_skip, skip.size())},
                       {"dt_bias", &exact.dt_bias, summed(d_bias, dt_bias.size())}},
                      [&] {
                          exact.forward(y_want, last_want);
                          return dot(y_want, d_y) + dot(last_want, d_last);
                      });
}

struct SsdCase {
    int64_t b, s, m, h, p, g, r;
    Doubles v, B, C, da, w_now, w_later, state;
    std::vector<int64_t> segments;

    // h_t = e^da h + w_later u, y_t = (e^da h + w_now u) c, with u the sum over ranks of v (x) b.
    void forward(Doubles& y, Doubles& last) const {
        y.assign(v.size(), 0), last = state;
        for (int64_t row = 0; row < b; row++)
            for (int64_t head = 0; head < h; head++) {
                double* own = last.data() + (row * h + head) * p * r;
                for (int64_t t = 0; t < s; t++) {
                    const int64_t token = row * s + t, at = token * h + head;
                    const bool starts = t && !segments.empty() && segments[token] != segments[token - 1];
                    for (int64_t i = 0; i < p; i++)
                        for (int64_t q = 0; q < r; q++) {
                            double &kept = own[i * r + q], u = 0;
                            kept = starts ? 0 : kept * exp(da[at]);
                            for (int64_t j = 0; j < m; j++)
                                u += v[((token * m + j) * h + head) * p + i] *
                                     B[((token * m + j) * g + head / (h / g)) * r + q];
                            for (int64_t j = 0; j < m; j++)
                                y[((token * m + j) * h + head) * p + i] +=
                                    (kept + w_now[at] * u) * C[((token * m + j) * g + head / (h / g)) * r + q];
                            kept += w_later[at] * u;
                        }
                }
            }
    }
};

static void check_ssd(Draw& draw) {
    const int64_t b = draw.whole(1, 2), s = draw.whole(1, 45), m = draw.chance(0.5) ? 1 : draw.whole(2, 4),
                  g = draw.whole(1, 2);
    const int64_t h = g * draw.whole(1, 3), p = draw.whole(1, 18), r = draw.whole(1, 20);
    Floats v = draw.floats(b * s * m * h * p), B = draw.floats(b * s * m * g * r), C = draw.floats(b * s * m * g * r);
    Floats da = draw.floats(b * s * h, 0.3), w_now = draw.floats(b * s * h), w_later = draw.floats(b * s * h),
           state = draw.floats(b * h * p * r);
    for (float& one : da) one = -fabsf(one);
    SsdCase exact = {b,           s, m, h, p, g, r, wide(v), wide(B), wide(C), wide(da), wide(w_now), wide(w_later),
                     wide(state), {}};
    if (draw.chance(0.5)) exact.segments = draw.segments(b, s);
    auto sequence = [&](Floats& of) {
        ssd::Sequence made = {};
        made.data = of.data(), made.token_stride = (int64_t)of.size() / (b * s),
        made.batch_stride = (int64_t)of.size() / b;
        return made;
    };
    ssd::Ssd inputs = {};
    inputs.b = b, inputs.s = s, inputs.m = m, inputs.h = h, inputs.p = p, inputs.g = g, inputs.r = r;
    inputs.chunk_len = draw.whole(1, s < 24 ? s : 24);
    inputs.v_bsmhp = sequence(v), inputs.b_bsmgr = sequence(B), inputs.c_bsmgr = sequence(C),
    inputs.da_bsh = sequence(da);
    inputs.w_now_bsh = sequence(w_now), inputs.w_later_bsh = sequence(w_later), inputs.state_bhpr = state.data();
    inputs.segments_bs = exact.segments.empty() ? nullptr : exact.segments.data();
    Floats y(v.size()), last(state.size());
    SsdForward call = {};
    call.inputs = inputs, call.y_bsmhp = y.data(), call.last_bhpr = last.data();
    run("ssd_forward", call);
    Doubles y_want, last_want;
    exact.forward(y_want, last_want);
    compare("y", y.data(), y_want, 2e-5), compare("last", last.data(), last_want, 2e-5);

    const int64_t ranges = b * h < 3 ? b * h : 3;
    Floats d_y = draw.floats(y.size()), d_last = draw.floats(last.size()), shares((ranges - 1) * 2 * s * m * r + 1);
    Floats d_v(v.size()), d_B(B.size()), d_C(C.size()), d_da(da.size()), d_now(da.size()), d_later(da.size()),
        d_state(state.size());
    SsdBackward back = {};
    back.inputs = inputs, back.d_y_bsmhp = sequence(d_y), back.d_last_bhpr = d_last.data(), back.d_v_bsmhp = d_v.data();
    back.d_b_bsmgr = d_B.data(), back.d_c_bsmgr = d_C.data(), back.d_da_bsh = d_da.data(),
    back.d_w_now_bsh = d_now.data();
    back.d_w_later_bsh = d_later.data(), back.d_state_bhpr = d_state.data(), back.ranges = ranges,
    back.shares = shares.data();
    run("ssd_backward", back);
    compare_gradients(draw,
                      {{"v", &exact.v, d_v},
                       {"b", &exact.B, d_B},
                       {"c", &exact.C, d_C},
                       {"da", &exact.da, d_da},
                       {"w_now", &exact.w_now, d_now},
                       {"w_later", &exact.w_later, d_later},
                       {"state", &exact.state, d_state}},
                      [&] {
                          exact.forward(y_want, last_want);
                          return dot(y_want, d_y) + dot(last_want, d_last);
                      });
}

}  // namespace agreement
