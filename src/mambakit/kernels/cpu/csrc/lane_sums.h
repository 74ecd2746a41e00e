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

}  // namespace MK_ISA
