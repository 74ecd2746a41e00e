// What every part of a decoded model is made of: a block behind its norm, x += scale * block(norm(x)).
//
// Where a row is wanted whole by all threads (norms, gates), each makes its own copy instead of waiting for another.
#pragma once

#include "border.h"
#include "matvec.h"
#include "rows.h"
#include "step.h"
#include "threads.h"

namespace MK_ISA {

struct Norm {
    MK_FIELDS(Norm,
        const float *weight, *bias;  // [width]; bias may be null
        int64_t width;
        int64_t centred;  // LayerNorm, otherwise RMSNorm
        double eps;
        float scale;  // of all it returns
    )
};

// What a part reads, all rows of it, and where it adds to: those may be the same. Rows are tokens, of which several may
// be of one text, in their order.
struct Passing {
    const Norm& norm;
    int64_t batch;
    const float* input;
    Results onto;
    Rows rows;
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
        store_part(y + i, normed * splat(norm.scale), count);
    });
}

// The product of `m` with the rows that `make` makes, each thread for itself.
template <class Make>
static void project(const Matrix& m, int64_t batch, const Results& to, const Make& make) {
    over_rows(m, [&](int64_t begin, int64_t end) {
        multiply(m, begin, end, make_rows(m, batch, make), stored_columns(m), batch, to);
    });
}

// All rows of the input, normed, as an input of `m`; this thread's own.
static const float* normed_rows(const Matrix& m, const Passing& x) {
    return make_rows(m, x.batch, [&](int64_t row, float* to) { normalise(x.norm, x.input + row * x.norm.width, to); });
}

static void project_normed(const Matrix& m, const Passing& x, const Results& to) {
    over_rows(m, [&](int64_t begin, int64_t end) {
        multiply(m, begin, end, normed_rows(m, x), stored_columns(m), x.batch, to);
    });
}

}  // namespace MK_ISA
