// The three Mambas as parts of a decoded model. States of heads lie text by text and have notes, everything else that is
// carried lies place by place.
#pragma once

#include "part.h"
#include "step_mamba1.h"
#include "step_mamba2.h"
#include "step_mamba3.h"

namespace MK_ISA {

struct Mamba1Part {
    MK_FIELDS(Mamba1Part,
        Mamba1Step step;
        Matrix in_proj, x_proj, dt_proj, out_proj;
        bool dt_b_c_norm;  // RMS norms on what x_proj returns
        const float *dt_norm, *B_norm, *C_norm;  // their weights, or null
        float norm_eps;
        float *window, *state;
    )
};

static void norm_in_place(int64_t n, const float* weight, float eps, float* x) {
    const vf inverse = splat(inverse_rms(x, n, eps));
    each_vector(n, [&](int64_t i, int64_t count) {
        vf normed = load_part(x + i, count) * inverse;
        if (weight) normed *= load_part(weight + i, count);
        store_part(x + i, normed, count);
    });
}

static void run_part(const Mamba1Part& m, const Passing& x) {
    const Mamba1Step& s = m.step;
    const int64_t batch = x.batch, i = s.channels, rank = m.dt_proj.columns, small = rank + 2 * s.r;
    float* projected = scratch<DECODE_PROJECTED>(batch * 2 * i);
    float* inner = scratch<DECODE_INNER>(2 * batch * i);
    float *out = inner + batch * i, *dt_b_c = scratch<DECODE_SMALL>(batch * small);
    float* dt = scratch<DECODE_DT>(batch * i);
    // Of each channel its value, its gate and its convolution.
    over_rows(m.in_proj, i, [&](int64_t begin, int64_t end) {
        const float* normed = normed_rows(m.in_proj, x);
        for (int64_t first = 0; first < 2 * i; first += i)
            multiply(m.in_proj, first + begin, first + end, normed, stored_columns(m.in_proj), batch,
                     {projected, 2 * i, false});
        for (int64_t row = 0; row < batch; row++) {
            const float* before = m.window + x.rows.read(row) * i * s.k;
            float* after = m.window + x.rows.written(row) * i * s.k;
            mamba1_step_conv(s, projected + row * 2 * i, before, after, inner + row * i, begin, end);
        }
    });
    over_rows(m.x_proj, [&](int64_t begin, int64_t end) {
        multiply(m.x_proj, begin, end, filled_up(m.x_proj, inner, batch), stored_columns(m.x_proj), batch,
                 {dt_b_c, small, false});
    });
    for (int64_t row = 0; row < batch && m.dt_b_c_norm; row++) {
        float* of_row = dt_b_c + row * small;
        norm_in_place(rank, m.dt_norm, m.norm_eps, of_row);
        norm_in_place(s.r, m.B_norm, m.norm_eps, of_row + rank);
        norm_in_place(s.r, m.C_norm, m.norm_eps, of_row + rank + s.r);
    }
    auto scan = [&](int64_t begin, int64_t end) {
        for (int64_t row = 0; row < batch; row++) claim(out + row * i + begin, end - begin);
        multiply(m.dt_proj, begin, end, dt_b_c, small, batch, {dt, i, false});
        for (int64_t row = 0; row < batch; row++) {
            const float* before = m.state + x.rows.read(row) * i * s.r;
            float* after = m.state + x.rows.written(row) * i * s.r;
            const float* b = dt_b_c + row * small + rank;
            mamba1_step_scan(s, projected + row * 2 * i, inner + row * i, dt + row * i, b, b + s.r, before, s.r, after,
                             out + row * i, begin, end);
        }
    };
    over_rows(m.dt_proj, scan);
    project(m.out_proj, batch, x.onto, [&](int64_t row, float* to) { copy(out + row * i, i, to); });
}

struct Mamba2Part {
    MK_FIELDS(Mamba2Part,
        Mamba2Step step;
        Matrix in_proj, out_proj;
        float z_scale, x_scale, B_scale, C_scale, dt_scale;  // of the parts of what in_proj returns
        float *window, *state, *notes;
        uint16_t* narrow_state;  // in place of `state`, or null; there are no runs then
    )
};

// A projected row's channels [begin, end), times the scales of the parts they belong to.
static void scale_projected(const Mamba2Part& m, float* projected, int64_t begin, int64_t end) {
    const Mamba2Step& s = m.step;
    const int64_t b = s.xbc() + s.width(), c = b + s.groups * s.r;
    const int64_t starts[6] = {s.z(), s.xbc(), b, c, s.dt(), s.projected()};
    const float scales[5] = {m.z_scale, m.x_scale, m.B_scale, m.C_scale, m.dt_scale};
    for (int q = 0; q < 5; q++) {
        if (scales[q] == 1.0f) continue;
        const int64_t first = starts[q] > begin ? starts[q] : begin;
        for (int64_t i = first; i < least(starts[q + 1], end); i++) projected[i] *= scales[q];
    }
}

static void run_heads(const Mamba2Part& m, const Passing& x, const float* projected, float* out) {
    mamba2_step_heads({m.step, x.batch, projected, m.window, m.window, m.state, m.state, out}, x.rows, m.notes,
                      m.narrow_state);
}

static void run_part(const Mamba2Part& m, const Passing& x) {
    const Mamba2Step& s = m.step;
    const int64_t wide = s.projected(), inner = s.mlp + s.width();
    float *projected = scratch<DECODE_PROJECTED>(x.batch * wide), *out = scratch<DECODE_INNER>(x.batch * inner);
    over_rows(m.in_proj, [&](int64_t begin, int64_t end) {
        multiply(m.in_proj, begin, end, normed_rows(m.in_proj, x), stored_columns(m.in_proj), x.batch,
                 {projected, wide, false});
        for (int64_t row = 0; row < x.batch; row++) scale_projected(m, projected + row * wide, begin, end);
    });
    run_heads(m, x, projected, out);
    project(m.out_proj, x.batch, x.onto, [&](int64_t row, float* to) {
        copy(out + row * inner + s.mlp, s.width(), to + s.mlp);
        mamba2_step_finish(s, projected + row * wide, to);
    });
}

struct Mamba3Part {
    MK_FIELDS(Mamba3Part,
        Mamba3Step step;
        Matrix in_proj, out_proj;
        float *state, *k_state, *v_state, *angle, *notes;
    )
};

static void run_heads(const Mamba3Part& m, const Passing& x, const float* projected, float* out) {
    const Mamba3Carried carried = {m.state, m.k_state, m.v_state, m.angle};
    mamba3_step({m.step, x.batch, projected, carried, carried, out}, x.rows, m.notes);
}

static void run_part(const Mamba3Part& m, const Passing& x) {
    const Mamba3Step& s = m.step;
    const int64_t wide = s.projected();
    float *projected = scratch<DECODE_PROJECTED>(x.batch * wide), *out = scratch<DECODE_INNER>(x.batch * s.width());
    project_normed(m.in_proj, x, {projected, wide, false});
    run_heads(m, x, projected, out);
    project(m.out_proj, x.batch, x.onto, [&](int64_t row, float* to) { copy(out + row * s.width(), s.width(), to); });
}

}  // namespace MK_ISA
