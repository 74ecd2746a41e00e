// What works on each token by itself, and the convolution.
#pragma once

#include "harness.h"

namespace agreement {

static void check_functions(Draw& draw) {
    const struct {
        double (*exact)(double);
        double low, high;
    } functions[] = {{exp, -80, 80},      {log, 0, 1},    {sigmoid, -30, 30},
                     {softplus, -30, 30}, {sin, -90, 90}, {cos, -90, 90}};
    for (int which = 0; which < 6; which++) {
        const auto& f = functions[which];
        const int64_t n = draw.whole(1, 70);
        Floats x(n), y(n);
        for (float& one : x)
            one = (float)(which == 1 ? exp(draw.whole(-80, 80) + draw.unit()) : f.low + draw.unit() * (f.high - f.low));
        VectorFunction call = {};
        call.which = which, call.x = x.data(), call.y = y.data(), call.n = n;
        run("vector_function", call);
        for (int64_t i = 0; i < n; i++) {
            // Relative errors, but of what swings around zero.
            const double want = f.exact(x[i]), size = which < 4 ? fabs(want) : 1;
            judge("vector_function", fabs(y[i] - want) / size, 5e-7);
        }
    }
}

struct ConvCase {
    int64_t b, s, v, k;
    bool silu;
    Doubles x, weight, bias, window;
    std::vector<int64_t> segments;

    double seen(int64_t row, int64_t p, int64_t t, int64_t c) const {
        if (!segments.empty() && segments[row * s + (p < 0 ? 0 : p)] != segments[row * s + t]) return 0;
        if (p >= 0) return x[(row * s + p) * v + c];
        return window.empty() ? 0 : window[(row * v + c) * k + k + p];
    }
    void forward(Doubles& y, Doubles& after) const {
        y.assign(b * s * v, 0), after.assign(b * v * k, 0);
        for (int64_t row = 0; row < b; row++)
            for (int64_t c = 0; c < v; c++) {
                for (int64_t t = 0; t < s; t++) {
                    double a = bias.empty() ? 0 : bias[c];
                    for (int64_t q = 0; q < k; q++) a += weight[c * k + q] * seen(row, t - k + 1 + q, t, c);
                    y[(row * s + t) * v + c] = silu ? agreement::silu(a) : a;
                }
                for (int64_t q = 0; q < k; q++) after[(row * v + c) * k + q] = seen(row, s - k + q, s - 1, c);
            }
    }
};

static void check_conv(Draw& draw) {
    const int64_t b = draw.whole(1, 3), s = draw.whole(1, 90), v = draw.whole(1, 40), k = draw.whole(1, 6);
    Floats x = draw.floats(b * s * v), weight = draw.floats(v * k), bias, window;
    if (draw.chance(0.7)) bias = draw.floats(v);
    if (draw.chance(0.7)) window = draw.floats(b * v * k);
    ConvCase exact = {b, s, v, k, draw.chance(0.7), wide(x), wide(weight), wide(bias), wide(window), {}};
    if (draw.chance(0.5)) exact.segments = draw.segments(b, s);
    Conv inputs = {};
    inputs.batch = b, inputs.length = s, inputs.width = v, inputs.taps = k, inputs.with_silu = exact.silu;
    inputs.x = x.data(), inputs.x_batch = s * v, inputs.x_token = v, inputs.weight = weight.data();
    inputs.bias = data_or_null(bias), inputs.window = data_or_null(window), inputs.window_batch = v * k;
    inputs.segments = exact.segments.empty() ? nullptr : exact.segments.data();
    Floats y(b * s * v), after(b * v * k);
    ConvForward call = {};
    call.inputs = inputs, call.y = y.data(), call.y_batch = s * v, call.y_token = v;
    call.after = after.data(), call.after_batch = v * k;
    run("causal_conv", call);
    Doubles y_want, after_want;
    exact.forward(y_want, after_want);
    compare("y", y.data(), y_want, 1e-5);
    compare("after", after.data(), after_want, 0);

    Floats d_y = draw.floats(b * s * v), d_after = draw.floats(b * v * k);
    Floats d_x(x.size()), d_weight(weight.size()), d_bias(bias.size()), d_window(window.size());
    ConvBackward back = {};
    back.inputs = inputs, back.d_y = d_y.data(), back.d_y_batch = s * v, back.d_y_token = v;
    back.d_after = d_after.data(), back.after_batch = v * k;
    back.d_x = d_x.data(), back.d_x_batch = s * v, back.d_x_token = v;
    back.d_weight = d_weight.data(), back.d_bias = data_or_null(d_bias);
    back.d_window = data_or_null(d_window), back.d_window_batch = v * k;
    run("causal_conv_backward", back);
    compare_gradients(draw,
                      {{"x", &exact.x, d_x},
                       {"weight", &exact.weight, d_weight},
                       {"bias", &exact.bias, d_bias},
                       {"window", &exact.window, d_window}},
                      [&] {
                          exact.forward(y_want, after_want);
                          return dot(y_want, d_y) + dot(after_want, d_after);
                      });
}

struct FinishCase {
    int64_t rows, ranks, width, group, order;
    double eps;
    Doubles y, x, skip, z, weight, mimo_x, mimo_z, mimo_o;

    Doubles forward() const {
        Doubles out(rows * width, 0);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t m = 0; m < ranks; m++) {
                Doubles u(width), gate(width, 1);
                for (int64_t i = 0; i < width; i++) {
                    u[i] = y[(row * ranks + m) * width + i];
                    if (!x.empty()) u[i] += skip[i] * x[row * width + i] * (mimo_x.empty() ? 1 : mimo_x[m * width + i]);
                    if (!z.empty()) gate[i] = silu(z[row * width + i] * (mimo_z.empty() ? 1 : mimo_z[m * width + i]));
                    if (order != NORM_FIRST) u[i] *= gate[i];
                }
                for (int64_t at = 0; order != NO_NORM && at < width; at += group) {
                    Doubles normed =
                        rms_normed(u.data() + at, group, eps, weight.empty() ? nullptr : weight.data() + at);
                    for (int64_t i = 0; i < group; i++) u[at + i] = normed[i];
                }
                for (int64_t i = 0; i < width; i++) {
                    if (order == NORM_FIRST) u[i] *= gate[i];
                    out[row * width + i] += u[i] * (mimo_o.empty() ? 1 : mimo_o[m * width + i]);
                }
            }
        return out;
    }
};

static void check_finish(Draw& draw) {
    const int64_t rows = draw.whole(1, 40), ranks = draw.chance(0.5) ? 1 : draw.whole(2, 4);
    const int64_t group = draw.whole(1, 40), width = group * draw.whole(1, 3), order = draw.whole(0, 2);
    auto some = [&](double share, int64_t n) { return draw.chance(share) ? draw.floats(n) : Floats(); };
    Floats y = draw.floats(rows * ranks * width), x = some(0.7, rows * width), z = some(0.8, rows * width);
    Floats skip = x.empty() ? Floats() : draw.floats(width), weight = order == NO_NORM ? Floats() : some(0.8, width);
    Floats mimo_x, mimo_z, mimo_o;
    if (ranks > 1) {
        if (!x.empty()) mimo_x = draw.floats(ranks * width);
        if (!z.empty()) mimo_z = draw.floats(ranks * width);
        mimo_o = draw.floats(ranks * width);
    }
    FinishCase exact = {rows,    ranks,      width,   group,        order,        1e-3,         wide(y),
                        wide(x), wide(skip), wide(z), wide(weight), wide(mimo_x), wide(mimo_z), wide(mimo_o)};
    Finish inputs = {};
    inputs.rows = rows, inputs.ranks = ranks, inputs.width = width, inputs.group = group, inputs.order = order;
    inputs.eps = 1e-3f, inputs.y = y.data(), inputs.y_row = ranks * width;
    inputs.x = data_or_null(x), inputs.x_row = width, inputs.skip = data_or_null(skip);
    inputs.z = data_or_null(z), inputs.z_row = width, inputs.weight = data_or_null(weight);
    inputs.mimo_x = data_or_null(mimo_x), inputs.mimo_z = data_or_null(mimo_z), inputs.mimo_o = data_or_null(mimo_o);
    Floats out(rows * width);
    FinishForward call = {};
    call.inputs = inputs, call.out = out.data();
    run("finish", call);
    compare("out", out.data(), exact.forward(), 1e-5);

    Floats d_out = draw.floats(rows * width), d_y(y.size()), d_x(x.size()), d_z(z.size()),
           sums((2 + 3 * ranks) * width);
    FinishBackward back = {};
    back.inputs = inputs, back.d_out = d_out.data(), back.d_out_row = width;
    back.d_y = d_y.data(), back.d_x = data_or_null(d_x), back.d_z = data_or_null(d_z), back.sums = sums.data();
    run("finish_backward", back);
    auto part = [&](int64_t at, int64_t n) {
        return Floats(sums.begin() + at * width, sums.begin() + (at + n) * width);
    };
    compare_gradients(draw,
                      {{"y", &exact.y, d_y},
                       {"x", &exact.x, d_x},
                       {"z", &exact.z, d_z},
                       {"skip", &exact.skip, part(0, 1)},
                       {"weight", &exact.weight, part(1, 1)},
                       {"mimo_x", &exact.mimo_x, part(2, ranks)},
                       {"mimo_z", &exact.mimo_z, part(2 + ranks, ranks)},
                       {"mimo_o", &exact.mimo_o, part(2 + 2 * ranks, ranks)}},
                      [&] { return dot(exact.forward(), d_out); });
}

static void check_ranks(Draw& draw) {
    const int64_t rows = draw.whole(1, 50), ranks = draw.whole(1, 5), width = draw.whole(1, 40);
    Floats x = draw.floats(rows * width), weight = draw.floats(ranks * width), v(rows * ranks * width);
    Doubles wide_x = wide(x), wide_weight = wide(weight);
    auto forward = [&] {
        Doubles y(v.size());
        for (int64_t i = 0; i < (int64_t)y.size(); i++)
            y[i] = wide_x[i / (ranks * width) * width + i % width] * wide_weight[i % (ranks * width)];
        return y;
    };
    Ranks inputs = {};
    inputs.rows = rows, inputs.ranks = ranks, inputs.width = width;
    inputs.x = x.data(), inputs.x_row = width, inputs.weight = weight.data();
    ExpandRanks call = {};
    call.inputs = inputs, call.v = v.data();
    run("expand_ranks", call);
    compare("v", v.data(), forward(), 1e-6);
    Floats d_v = draw.floats(v.size()), d_x(x.size()), d_weight(weight.size());
    ExpandRanksBackward back = {};
    back.inputs = inputs, back.d_v = d_v.data(), back.d_x = d_x.data(), back.d_weight = d_weight.data();
    run("expand_ranks_backward", back);
    compare_gradients(draw, {{"x", &wide_x, d_x}, {"weight", &wide_weight, d_weight}},
                      [&] { return dot(forward(), d_v); });
}

}  // namespace agreement
