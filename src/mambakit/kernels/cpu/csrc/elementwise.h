// The vector functions by themselves, for the tests.
#pragma once

#include "border.h"
#include "vec.h"

namespace MK_ISA {

struct VectorFunction {
    MK_FIELDS(VectorFunction,
        int64_t which;
        const float* x;
        float* y;
        int64_t n;
    )
};

template <class F>
static void map(const float* x, float* y, int64_t n, F f) {
    for (int64_t i = 0; i < n; i += W) store_part(y + i, f(load_part(x + i, n - i)), n - i);
}

static void vector_function(const VectorFunction& call) {
    const int64_t n = call.n;
    vf other;
    if (call.which == 0) map(call.x, call.y, n, [&](vf v) { return vexp(v); });
    if (call.which == 1) map(call.x, call.y, n, [&](vf v) { return vlog(v); });
    if (call.which == 2) map(call.x, call.y, n, [&](vf v) { return vsigmoid(v); });
    if (call.which == 3) map(call.x, call.y, n, [&](vf v) { return vsoftplus(v); });
    if (call.which == 4) map(call.x, call.y, n, [&](vf v) { vf sine; vsincos(v, &sine, &other); return sine; });
    if (call.which == 5) map(call.x, call.y, n, [&](vf v) { vf cosine; vsincos(v, &other, &cosine); return cosine; });
}

}  // namespace MK_ISA
