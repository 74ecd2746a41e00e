// Mamba-3's preparation with quaternions, and its backward.
#pragma once

#include "check_steps.h"

namespace agreement {

struct QuaternionCase {
    int64_t b, s, m, g, h, r;
    Mamba3Step turns;
    Doubles x[2], weight[2], bias[2], rot, dt, before;
    std::vector<int64_t> segments;

    // B and C [b, s, m, h, r]; the quaternions after the last token.
    void forward(Doubles (&y)[2], Doubles& after) const {
        const int64_t kept = 4 * turns.angles;
        after = before;
        for (Doubles& one : y) one.assign(b * s * m * h * r, 0);
        for (int64_t row = 0; row < b; row++)
            for (int64_t t = 0; t < s; t++)
                for (int64_t head = 0; head < h; head++) {
                    double* q = after.data() + (row * h + head) * kept;
                    const int64_t token = row * s + t;
                    if (t && !segments.empty() && segments[token] != segments[token - 1])
                        for (int64_t i = 0; i < kept; i++) q[i] = i % 4 == 0;
                    advance(turns, dt[token * h + head], rot.data() + (token * h + head) * 3 * turns.angles, q);
                    for (int side = 0; side < 2; side++)
                        for (int64_t j = 0; j < m; j++) {
                            const double* from = x[side].data() + ((token * m + j) * g + head / (h / g)) * r;
                            Doubles v = rms_normed(from, r, 1e-5, weight[side].data());
                            for (int64_t i = 0; i < r; i++) v[i] += bias[side][(head * m + j) * r + i];
                            turn(turns, q, v.data());
                            for (int64_t i = 0; i < r; i++) y[side][((token * m + j) * h + head) * r + i] = v[i];
                        }
                }
    }
};

static void check_quaternions(Draw& draw) {
    const int64_t b = draw.whole(1, 2), s = draw.whole(1, 140), m = draw.whole(1, 3), g = draw.whole(1, 2);
    const int64_t h = g * draw.whole(1, 2), r = draw.whole(1, 24), blocks = draw.whole(0, r / 4);
    QuaternionCase exact = {b, s, m, g, h, r, {}, {}, {}, {}, {}, {}, {}, {}};
    exact.turns.angles = blocks, exact.turns.quaternions = true, exact.turns.rotation_range = 1.5f;
    Floats x[2], weight[2], bias[2], y[2];
    for (int side = 0; side < 2; side++) {
        x[side] = draw.floats(b * s * m * g * r), weight[side] = draw.floats(r), bias[side] = draw.floats(h * m * r);
        y[side].resize(b * s * m * h * r);
        exact.x[side] = wide(x[side]), exact.weight[side] = wide(weight[side]), exact.bias[side] = wide(bias[side]);
    }
    Floats rot = draw.floats(b * s * h * blocks * 3), dt = draw.floats(b * s * h, 0.1, 0.3),
           before = draw.floats(b * h * blocks * 4), after(before.size()), running(b * s * h * blocks * 4);
    exact.rot = wide(rot), exact.dt = wide(dt), exact.before = wide(before);
    if (draw.chance(0.5)) exact.segments = draw.segments(b, s);
    Prepare inputs = {};
    inputs.turns.batch = b, inputs.turns.length = s, inputs.turns.heads = h, inputs.turns.angles = blocks;
    inputs.turns.rot = rot.data(), inputs.turns.rot_token = h * blocks * 3;
    inputs.turns.rot_batch = s * inputs.turns.rot_token, inputs.turns.dt = dt.data();
    inputs.turns.range = 1.5 * M_PI, inputs.turns.before = before.data();
    inputs.turns.segments = exact.segments.empty() ? nullptr : exact.segments.data();
    inputs.pairs.state = r, inputs.pairs.angles = blocks;
    inputs.ranks = m, inputs.groups = g, inputs.eps = 1e-5f;
    for (int side = 0; side < 2; side++) {
        Side& of = side ? inputs.c : inputs.b;
        of.x = x[side].data(), of.x_batch = s * m * g * r, of.x_token = m * g * r;
        of.weight = weight[side].data(), of.bias = bias[side].data();
    }
    QuaternionForward call = {};
    call.inputs = inputs, call.running = running.data(), call.b = y[0].data(), call.c = y[1].data();
    call.after = after.data();
    run("quaternion_prepare", call);
    Doubles want[2], last;
    exact.forward(want, last);
    compare("b", y[0].data(), want[0], 1e-5), compare("c", y[1].data(), want[1], 1e-5);
    compare("after", after.data(), last, 1e-5);

    Floats d_y[2] = {draw.floats(y[0].size()), draw.floats(y[1].size())}, d_after = draw.floats(after.size());
    Floats share(b * s * h * blocks * 3), d_b(x[0].size()), d_c(x[1].size()), d_rot(rot.size()), d_dt(dt.size()),
        d_before(before.size());
    Floats sums(2 * (h * m + 1) * r);
    QuaternionBackward back = {};
    back.inputs = inputs, back.d_b_out = d_y[0].data(), back.d_c_out = d_y[1].data(), back.d_after = d_after.data();
    back.running = running.data(), back.share = share.data(), back.d_b = d_b.data(), back.d_c = d_c.data();
    back.d_rot = d_rot.data(), back.d_dt = d_dt.data(), back.d_before = d_before.data(), back.sums = sums.data();
    run("quaternion_prepare_backward", back);
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
                          exact.forward(want, last);
                          return dot(want[0], d_y[0]) + dot(want[1], d_y[1]) + dot(last, d_after);
                      });
}

}  // namespace agreement
