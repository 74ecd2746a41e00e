// A multilayer perceptron as a part of a decoded model.
#pragma once

#include "part.h"

namespace MK_ISA {

enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4 };

// erf(x) / 2 + 1 / 2 to 1e-7: Abramowitz and Stegun 7.1.26.
MK_INLINE vf half_erfc_of_minus(vf x) {
    const vf away = vmax(x, -x);
    const vf t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f) * away);
    vf p = splat(0.5f * 1.061405429f);
    p = p * t + splat(0.5f * -1.453152027f);
    p = p * t + splat(0.5f * 1.421413741f);
    p = p * t + splat(0.5f * -0.284496736f);
    p = p * t + splat(0.5f * 0.254829592f);
    const vf tail = p * t * vexp(-away * away);
    return choose(x < splat(0.0f), tail, splat(1.0f) - tail);
}

MK_INLINE vf activated(int64_t activation, vf x) {
    if (activation == SILU) return vsilu(x);
    if (activation == GELU) return x * half_erfc_of_minus(x * splat(0.70710678f));
    // (1 + tanh(u)) / 2 is sigmoid(2 u).
    if (activation == GELU_TANH) return x * vsigmoid(splat(1.5957691216f) * (x + splat(0.044715f) * x * x * x));
    const vf above = choose(x < splat(0.0f), splat(0.0f), x);
    return activation == RELU2 ? above * above : above;
}

struct MlpStep {
    MK_FIELDS(MlpStep,
        int64_t activation;
        bool gated;  // the hidden row is a value and a gate, otherwise a value alone
        float gate_scale;
    )
};

// to[n] from a hidden row of n values, and n gates behind them if there are any.
static void activate_hidden(const MlpStep& s, const float* hidden, int64_t n, float* to) {
    each_vector(n, [&](int64_t i, int64_t count) {
        const vf value = load_part(hidden + i, count);
        vf y;
        if (s.gated) y = value * activated(s.activation, splat(s.gate_scale) * load_part(hidden + n + i, count));
        else y = activated(s.activation, value);
        store_part(to + i, y, count);
    });
}

struct MlpPart {
    MK_FIELDS(MlpPart,
        MlpStep step;
        Matrix fc1, fc2;
    )
};

static void run_part(const MlpPart& m, const Passing& x) {
    const int64_t wide = m.fc1.rows;
    float* hidden = scratch<DECODE_PROJECTED>(x.batch * wide);
    project_normed(m.fc1, x, {hidden, wide, false});
    project(m.fc2, x.batch, x.onto, [&](int64_t row, float* to) {
        activate_hidden(m.step, hidden + row * wide, m.fc2.columns, to);
    });
}

}  // namespace MK_ISA
