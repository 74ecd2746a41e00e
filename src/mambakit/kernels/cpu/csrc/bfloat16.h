// bfloat16 in memory, float32 in registers: loads widen, stores round to the nearest, halves to even.
#pragma once

#include "vec.h"

namespace MK_ISA {

typedef uint16_t vh __attribute__((vector_size(2 * MK_WIDTH)));

// The bits of bfloat16 in the upper half of each lane. What is no number stays none.
MK_INLINE vi rounded_bits(vf x) {
    vi bits = (vi)x;
    vi nearest = bits + splat_int(0x7fff) + ((bits >> 16) & splat_int(1));
    return x == x ? nearest : bits | splat_int(0x400000);
}
MK_INLINE vf widened(vh x) { return (vf)(__builtin_convertvector(x, vi) << 16); }
MK_INLINE vh narrowed(vf x) {
    typedef uint32_t vu __attribute__((vector_size(4 * MK_WIDTH)));
    return __builtin_convertvector((vu)rounded_bits(x) >> 16, vh);
}

struct bfloat16 {
    uint16_t bits;

    MK_INSIDE operator float() const {
        uint32_t wide = (uint32_t)bits << 16;
        float x;
        memcpy(&x, &wide, sizeof x);
        return x;
    }
    MK_INSIDE bfloat16& operator=(float x) {
        uint32_t wide;
        memcpy(&wide, &x, sizeof wide);
        bits = (uint16_t)((x == x ? wide + 0x7fff + (wide >> 16 & 1) : wide | 0x400000) >> 16);
        return *this;
    }
};

MK_INLINE vf load(const bfloat16* from) {
    vh x;
    memcpy(&x, from, sizeof x);
    return widened(x);
}
MK_INLINE void store(bfloat16* to, vf x) {
    vh bits = narrowed(x);
    memcpy(to, &bits, sizeof bits);
}
// The first n lanes, as for floats.
MK_INLINE vf load_part(const bfloat16* from, int64_t n) {
    if (n >= W) return load(from);
    vh x = {};
    memcpy(&x, from, n * sizeof(bfloat16));
    return widened(x);
}
MK_INLINE void store_part(bfloat16* to, vf x, int64_t n) {
    vh bits = narrowed(x);
    memcpy(to, &bits, (n >= W ? W : n) * sizeof(bfloat16));
}

// body(T{}) with the numbers' type: bfloat16 if `narrow`, else float.
template <class Body>
MK_INLINE void with_numbers(bool narrow, const Body& body) {
    if (narrow) body(bfloat16{});
    else body(float{});
}

}  // namespace MK_ISA
