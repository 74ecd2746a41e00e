// The lanes of four vectors, added up together.
#pragma once

#include "vec.h"

namespace MK_ISA {

constexpr int FOUR = 4;

// Sums of the lanes of four vectors.
typedef int32_t vi4 __attribute__((vector_size(16)));
MK_INLINE vf4 fold(vf4 x) { return x; }
MK_INLINE vi4 fold(vi4 x) { return x; }
#if MK_WIDTH >= 8
typedef int32_t vi8 __attribute__((vector_size(32)));
MK_INLINE vf4 fold(vf8 x) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
}
MK_INLINE vi4 fold(vi8 x) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
}
#endif
#if MK_WIDTH == 16
MK_INLINE vf4 fold(vf x) {
    return fold(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
}
MK_INLINE vi4 fold(vi x) {
    return fold(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
}
#endif
#if MK_WIDTH == 16
#define MK_PAIRED(a, b, p, q)                                                                                      \
    __builtin_shufflevector(a, b, p, p + 16, q, q + 16, p + 4, p + 20, q + 4, q + 20, p + 8, p + 24, q + 8, q + 24, \
                            p + 12, p + 28, q + 12, q + 28)
#define MK_JOINED(a, b, p)                                                                                         \
    __builtin_shufflevector(a, b, p, p + 1, p + 16, p + 17, p + 4, p + 5, p + 20, p + 21, p + 8, p + 9, p + 24, p + 25, \
                            p + 12, p + 13, p + 28, p + 29)
#elif MK_WIDTH == 8
#define MK_PAIRED(a, b, p, q) __builtin_shufflevector(a, b, p, p + 8, q, q + 8, p + 4, p + 12, q + 4, q + 12)
#define MK_JOINED(a, b, p) __builtin_shufflevector(a, b, p, p + 1, p + 8, p + 9, p + 4, p + 5, p + 12, p + 13)
#else
#define MK_PAIRED(a, b, p, q) __builtin_shufflevector(a, b, p, p + 4, q, q + 4)
#define MK_JOINED(a, b, p) __builtin_shufflevector(a, b, p, p + 1, p + 4, p + 5)
#endif
template <class Sum>
MK_INLINE Sum partial_sums(const Sum (&x)[FOUR]) {
    const Sum first = MK_PAIRED(x[0], x[1], 0, 1) + MK_PAIRED(x[0], x[1], 2, 3);
    const Sum last = MK_PAIRED(x[2], x[3], 0, 1) + MK_PAIRED(x[2], x[3], 2, 3);
    return MK_JOINED(first, last, 0) + MK_JOINED(first, last, 2);
}

// sum() of each of four vectors, to the last digit.
MK_INLINE vf4 sums_of_four(const vf (&x)[FOUR]) {
#if MK_WIDTH == 16
#define MK_HALVES(a, b, p)                                                                                         \
    __builtin_shufflevector(a, b, p, p + 1, p + 2, p + 3, p + 4, p + 5, p + 6, p + 7, p + 16, p + 17, p + 18, p + 19, \
                            p + 20, p + 21, p + 22, p + 23)
#define MK_QUARTERS(a, b, p)                                                                                        \
    __builtin_shufflevector(a, b, p, p + 1, p + 2, p + 3, p + 8, p + 9, p + 10, p + 11, p + 16, p + 17, p + 18, p + 19, \
                            p + 24, p + 25, p + 26, p + 27)
    const vf first = MK_HALVES(x[0], x[1], 0) + MK_HALVES(x[0], x[1], 8);
    const vf last = MK_HALVES(x[2], x[3], 0) + MK_HALVES(x[2], x[3], 8);
    const vf four = MK_QUARTERS(first, last, 0) + MK_QUARTERS(first, last, 4);
    const vf two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return __builtin_shufflevector(two, two, 0, 4, 8, 12) + __builtin_shufflevector(two, two, 1, 5, 9, 13);
#else
    return vf4{sum(x[0]), sum(x[1]), sum(x[2]), sum(x[3])};
#endif
}

}  // namespace MK_ISA
