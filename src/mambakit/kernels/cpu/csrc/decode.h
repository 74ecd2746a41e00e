// A whole language model on one token of every row: embedding, layers, norm and head in one call.
//
// Three or four parallel regions per layer, since each costs microseconds. Where a row is wanted whole by all threads
// (norms, gates), each makes its own copy instead of waiting for another. States change in place.
#pragma once

#include "border.h"
#include "matvec.h"
#include "rows.h"
#include "step_mamba1.h"
#include "step_mamba2.h"
#include "step_mamba3.h"

namespace MK_ISA {

// The structs have the same fields, in the same order, as those of decode.py.
struct Norm {
    MK_FIELDS(Norm,
        const float *weight, *bias;  // [width]; bias may be null
        int64_t width;
        int64_t centred;  // LayerNorm, otherwise RMSNorm
        double eps;
    )
};

struct DecodeLayer {
    MK_FIELDS(DecodeLayer,
        int64_t family;    // 1, 2 or 3
        const void* step;  // Mamba1Step, Mamba2Step or Mamba3Step
        Norm norm, norm2;
        Matrix in_proj, out_proj;
        Matrix x_proj, dt_proj;  // of Mamba-1
        Matrix fc1, fc2;         // of the gated MLP; no rows: there is none
        float *state, *window, *k_state, *v_state, *angle;  // what the family carries, for all rows
    )
};

struct DecodeModel {
    MK_FIELDS(DecodeModel,
        int64_t width, layers;
        const float* embedding;  // [vocabulary][width]
        const DecodeLayer* layer;
        Norm norm_f;
        Matrix head;
    )
};

static void normalise(const Norm& norm, const float* x, float* y) {
    const int64_t n = norm.width;
    vf mean = {};
    if (norm.centred) {
        vf total = {};
        each_vector(n, [&](int64_t i, int64_t count) { total += load_part(x + i, count); });
        mean = splat(sum(total) / n);
        each_vector(n, [&](int64_t i, int64_t count) { store_part(y + i, load_part(x + i, count) - mean, count); });
        x = y;
    }
    const vf scale = splat(inverse_rms(x, n, (float)norm.eps));
    each_vector(n, [&](int64_t i, int64_t count) {
        vf normed = load_part(x + i, count) * scale * load_part(norm.weight + i, count);
        if (norm.bias) normed += load_part(norm.bias + i, count);
        store_part(y + i, normed, count);
    });
}

// The product of `m` with the rows that `make` makes, each thread for itself.
template <class Make>
static void project(const Matrix& m, int64_t batch, const Results& to, const Make& make) {
    over_rows(m, [&](int64_t begin, int64_t end) {
        multiply(m, begin, end, make_rows(m, batch, make), stored_columns(m), batch, to);
    });
}

static void project_normed(const Matrix& m, const Norm& norm, int64_t batch, const float* x, float* y) {
    project(m, batch, {y, m.rows, false}, [&](int64_t row, float* to) { normalise(norm, x + row * norm.width, to); });
}

static void decode_mamba1(const DecodeLayer& l, int64_t batch, float* residual) {
    const Mamba1Step& s = *(const Mamba1Step*)l.step;
    const int64_t i = s.channels, rank = l.dt_proj.columns, small = rank + 2 * s.r;
    float* projected = scratch<DECODE_PROJECTED>(batch * 2 * i);
    float* x = scratch<DECODE_INNER>(2 * batch * i);
    float *out = x + batch * i, *dt_b_c = scratch<DECODE_SMALL>(batch * small), *dt = scratch<DECODE_DT>(batch * i);
    over_rows(l.in_proj, [&](int64_t begin, int64_t end) {
        const float* rows = make_rows(l.in_proj, batch, [&](int64_t row, float* to) {
            normalise(l.norm, residual + row * l.norm.width, to);
        });
        multiply(l.in_proj, begin, end, rows, stored_columns(l.in_proj), batch, {projected, 2 * i, false});
        // The channels just computed, as far as they are values and not gates.
        const int64_t stop = least(end, i);
        for (int64_t row = 0; row < batch && begin < stop; row++) {
            float* window = l.window + row * i * s.k;
            mamba1_step_conv(s, projected + row * 2 * i, window, window, x + row * i, begin, stop);
        }
    });
    over_rows(l.x_proj, [&](int64_t begin, int64_t end) {
        multiply(l.x_proj, begin, end, filled_up(l.x_proj, x, batch), stored_columns(l.x_proj), batch,
                 {dt_b_c, small, false});
    });
    auto scan = [&](int64_t begin, int64_t end) {
        multiply(l.dt_proj, begin, end, dt_b_c, small, batch, {dt, i, false});
        for (int64_t row = 0; row < batch; row++) {
            float* state = l.state + row * i * s.r;
            const float* b = dt_b_c + row * small + rank;
            mamba1_step_scan(s, projected + row * 2 * i, x + row * i, dt + row * i, b, b + s.r, state, state,
                             out + row * i, begin, end);
        }
    };
    if (batch * i * s.r < STEP_ALONE) scan(0, i);
    else parallel(i, scan);
    project(l.out_proj, batch, {residual, l.norm.width, true},
            [&](int64_t row, float* to) { copy(out + row * i, i, to); });
}

static void decode_mamba2(const DecodeLayer& l, int64_t batch, float* residual) {
    const Mamba2Step& s = *(const Mamba2Step*)l.step;
    const int64_t wide = s.projected(), inner = s.mlp + s.width(), bc = 2 * s.groups * s.r;
    const int64_t window = s.conv_dim() * s.k, state = s.width() * s.r;
    float* projected = scratch<DECODE_PROJECTED>(batch * wide);
    float *out = scratch<DECODE_INNER>(batch * inner), *all_bc = scratch<DECODE_SMALL>(batch * bc);
    project_normed(l.in_proj, l.norm, batch, residual, projected);
    for (int64_t row = 0; row < batch; row++)
        mamba2_step_begin(s, projected + row * wide, l.window + row * window, l.window + row * window, all_bc + row * bc);
    step_parallel(batch, s.heads, s.p * s.r, [&](int64_t row, int64_t begin, int64_t end) {
        mamba2_step(s, projected + row * wide, all_bc + row * bc, l.window + row * window, l.window + row * window,
                    l.state + row * state, l.state + row * state, out + row * inner, begin, end);
    });
    project(l.out_proj, batch, {residual, l.norm.width, true}, [&](int64_t row, float* to) {
        copy(out + row * inner + s.mlp, s.width(), to + s.mlp);
        mamba2_step_finish(s, projected + row * wide, to);
    });
}

static void decode_mamba3(const DecodeLayer& l, int64_t batch, float* residual) {
    const Mamba3Step& s = *(const Mamba3Step*)l.step;
    const int64_t wide = s.projected(), k_state = s.ranks * s.heads * s.r, kept = s.heads * s.kept_angles();
    float* projected = scratch<DECODE_PROJECTED>(batch * wide);
    float *out = scratch<DECODE_INNER>(batch * s.width()), *shared = scratch<DECODE_SMALL>(batch * s.shared());
    project_normed(l.in_proj, l.norm, batch, residual, projected);
    for (int64_t row = 0; row < batch; row++)
        mamba3_step_begin(s, projected + row * wide, shared + row * s.shared());
    step_parallel(batch, s.heads, s.p * s.r, [&](int64_t row, int64_t begin, int64_t end) {
        const Mamba3Carried carried = {l.state + row * s.width() * s.r, l.k_state + row * k_state,
                                       l.v_state + row * s.width(), l.angle + row * kept};
        mamba3_step(s, projected + row * wide, shared + row * s.shared(), carried, carried, out + row * s.width(), begin,
                    end);
    });
    project(l.out_proj, batch, {residual, l.norm.width, true},
            [&](int64_t row, float* to) { copy(out + row * s.width(), s.width(), to); });
}

static void decode_mlp(const DecodeLayer& l, int64_t batch, float* residual) {
    const int64_t hidden = l.fc2.columns;
    float* both = scratch<DECODE_PROJECTED>(batch * 2 * hidden);
    project_normed(l.fc1, l.norm2, batch, residual, both);
    project(l.fc2, batch, {residual, l.norm.width, true}, [&](int64_t row, float* to) {
        const float *value = both + row * 2 * hidden, *gate = value + hidden;
        each_vector(hidden, [&](int64_t i, int64_t count) {
            store_part(to + i, load_part(value + i, count) * vsilu(load_part(gate + i, count)), count);
        });
    });
}

}  // namespace MK_ISA

// logits[batch][head.rows] after the tokens ids[batch].
MK_EXPORT(decode)(const void* decode_model, const int64_t* ids, int64_t batch, float* logits) {
    MK_BEGIN
    using namespace MK_ISA;
    const DecodeModel& model = *(const DecodeModel*)decode_model;
    float* residual = scratch<DECODE_RESIDUAL>(batch * model.width);
    for (int64_t row = 0; row < batch; row++)
        copy(model.embedding + ids[row] * model.width, model.width, residual + row * model.width);
    for (const DecodeLayer* layer = model.layer; layer < model.layer + model.layers; layer++) {
        if (layer->family == 1) decode_mamba1(*layer, batch, residual);
        if (layer->family == 2) decode_mamba2(*layer, batch, residual);
        if (layer->family == 3) decode_mamba3(*layer, batch, residual);
        if (layer->fc1.rows) decode_mlp(*layer, batch, residual);
    }
    project_normed(model.head, model.norm_f, batch, residual, logits);
    MK_END
}
