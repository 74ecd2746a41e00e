// The vector functions by themselves, for the tests.
#pragma once

#include "border.h"
#include "vec.h"

namespace MK_ISA {

template <class F>
static void map(const float* x, float* y, int64_t n, F f) {
    for (int64_t i = 0; i < n; i += W) store_part(y + i, f(load_part(x + i, n - i)), n - i);
}

}  // namespace MK_ISA

MK_EXPORT(vector_function)(int64_t which, const float* x, float* y, int64_t n) {
    MK_BEGIN
    using namespace MK_ISA;
    if (which == 0) map(x, y, n, [&](vf v) { return vexp(v); });
    if (which == 1) map(x, y, n, [&](vf v) { return vlog(v); });
    if (which == 2) map(x, y, n, [&](vf v) { return vsigmoid(v); });
    if (which == 3) map(x, y, n, [&](vf v) { return vsoftplus(v); });
    vf other;
    if (which == 4) map(x, y, n, [&](vf v) { vf sine; vsincos(v, &sine, &other); return sine; });
    if (which == 5) map(x, y, n, [&](vf v) { vf cosine; vsincos(v, &other, &cosine); return cosine; });
    MK_END
}
