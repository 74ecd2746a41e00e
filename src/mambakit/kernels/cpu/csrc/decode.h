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
#include "threads.h"

namespace MK_ISA {

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
    const int64_t wide = s.projected(), inner = s.mlp + s.width();
    float *projected = scratch<DECODE_PROJECTED>(batch * wide), *out = scratch<DECODE_INNER>(batch * inner);
    project_normed(l.in_proj, l.norm, batch, residual, projected);
    mamba2_step_heads({s, batch, projected, l.window, l.window, l.state, l.state, out});
    project(l.out_proj, batch, {residual, l.norm.width, true}, [&](int64_t row, float* to) {
        copy(out + row * inner + s.mlp, s.width(), to + s.mlp);
        mamba2_step_finish(s, projected + row * wide, to);
    });
}

static void decode_mamba3(const DecodeLayer& l, int64_t batch, float* residual) {
    const Mamba3Step& s = *(const Mamba3Step*)l.step;
    float *projected = scratch<DECODE_PROJECTED>(batch * s.projected()), *out = scratch<DECODE_INNER>(batch * s.width());
    const Mamba3Carried carried = {l.state, l.k_state, l.v_state, l.angle};
    project_normed(l.in_proj, l.norm, batch, residual, projected);
    mamba3_step({s, batch, projected, carried, carried, out});
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

struct Decode {
    MK_FIELDS(Decode,
        const DecodeModel* model;
        int64_t batch;
        const int64_t* ids;  // [batch]
        float* logits;       // after these tokens, [batch][head.rows]
    )
};

static void decode(const Decode& call) {
    const DecodeModel& model = *call.model;
    const int64_t batch = call.batch, width = model.width;
    float* residual = scratch<DECODE_RESIDUAL>(batch * width);
    for (int64_t row = 0; row < batch; row++)
        copy(model.embedding + call.ids[row] * width, width, residual + row * width);
    for (const DecodeLayer* layer = model.layer; layer < model.layer + model.layers; layer++) {
        if (layer->family == 1) decode_mamba1(*layer, batch, residual);
        if (layer->family == 2) decode_mamba2(*layer, batch, residual);
        if (layer->family == 3) decode_mamba3(*layer, batch, residual);
        if (layer->fc1.rows) decode_mlp(*layer, batch, residual);
    }
    project_normed(model.head, model.norm_f, batch, residual, call.logits);
}

}  // namespace MK_ISA
