// Vectors of MK_WIDTH floats, written once for every instruction set: GCC and Clang lower the operators to what the
// translation unit's target has. All of it lives in a namespace per instruction set, so that the linker cannot give one
// set's code to another. No std:: templates in here, for the same reason.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "x86.h"

#define MK_INLINE static inline __attribute__((always_inline))
// A method, and a lambda, that becomes part of its caller, so that vectors stay in registers.
#define MK_INSIDE inline __attribute__((always_inline))
#define MK_BODY(...) [&](__VA_ARGS__) __attribute__((always_inline))

namespace MK_ISA {

constexpr int64_t W = MK_WIDTH;

typedef float vf __attribute__((vector_size(4 * MK_WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * MK_WIDTH)));
// The same, wherever it lies in memory.
typedef float vf_any __attribute__((vector_size(4 * MK_WIDTH), aligned(4), may_alias));

MK_INLINE vf load(const float* from) { return *(const vf_any*)from; }
MK_INLINE void store(float* to, vf x) { *(vf_any*)to = x; }
MK_INLINE vf splat(float x) { return x - vf{}; }
MK_INLINE vi splat_int(int32_t x) { return x - vi{}; }

// The first n lanes (0 < n), zeros beyond: nothing outside [from, from + n) is touched. x86 has instructions for that,
// which the address sanitizer does not look into.
#if defined(MK_X86) && MK_WIDTH == 16 && !defined(__SANITIZE_ADDRESS__)
MK_INLINE uint16_t first_lanes(int64_t n) { return (uint16_t)((1u << n) - 1); }
MK_INLINE vf load_some(const float* from, int64_t n) {
    return __builtin_ia32_loadups512_mask(from, vf{}, first_lanes(n));
}
MK_INLINE void store_some(float* to, vf x, int64_t n) { __builtin_ia32_storeups512_mask(to, x, first_lanes(n)); }
#elif defined(MK_X86) && MK_WIDTH == 8 && !defined(__SANITIZE_ADDRESS__)
MK_INLINE vi first_lanes(int64_t n) { return vi{0, 1, 2, 3, 4, 5, 6, 7} < splat_int((int32_t)n); }
MK_INLINE vf load_some(const float* from, int64_t n) {
    return __builtin_ia32_maskloadps256((const vf*)from, first_lanes(n));
}
MK_INLINE void store_some(float* to, vf x, int64_t n) { __builtin_ia32_maskstoreps256((vf*)to, first_lanes(n), x); }
#else
MK_INLINE vf load_some(const float* from, int64_t n) {
    vf x = {};
    memcpy(&x, from, n * sizeof(float));
    return x;
}
MK_INLINE void store_some(float* to, vf x, int64_t n) { memcpy(to, &x, n * sizeof(float)); }
#endif
MK_INLINE vf load_part(const float* from, int64_t n) { return n >= W ? load(from) : load_some(from, n); }
MK_INLINE void store_part(float* to, vf x, int64_t n) {
    if (n >= W) store(to, x);
    else store_some(to, x, n);
}

MK_INLINE vf choose(vi mask, vf yes, vf no) { return mask ? yes : no; }
// a > b ? a : b, and so b where one of them is NaN. x86 has one instruction for exactly that, GCC finds two.
#if defined(MK_X86) && MK_WIDTH == 16
MK_INLINE vf vmax(vf a, vf b) { return __builtin_ia32_maxps512_mask(a, b, a, -1, 4); }
MK_INLINE vf vmin(vf a, vf b) { return __builtin_ia32_minps512_mask(a, b, a, -1, 4); }
#elif defined(MK_X86) && MK_WIDTH == 8
MK_INLINE vf vmax(vf a, vf b) { return __builtin_ia32_maxps256(a, b); }
MK_INLINE vf vmin(vf a, vf b) { return __builtin_ia32_minps256(a, b); }
#else
MK_INLINE vf vmax(vf a, vf b) { return choose(a > b, a, b); }
MK_INLINE vf vmin(vf a, vf b) { return choose(a < b, a, b); }
#endif

// The sum of all lanes, halves added to halves: the order is the same whatever the compiler makes of it.
typedef float vf4 __attribute__((vector_size(16)));
typedef float vf8 __attribute__((vector_size(32)));
MK_INLINE float sum(vf4 x) {
    x += __builtin_shufflevector(x, x, 2, 3, 2, 3);
    return x[0] + x[1];
}
#if MK_WIDTH >= 8
MK_INLINE float sum(vf8 x) {
    return sum(__builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7));
}
#endif
#if MK_WIDTH == 16
MK_INLINE float sum(vf x) {
    return sum(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
}
#endif

// Ask for a line of memory that will be read soon, into the second cache: on its way to the first it would wait for
// those before it. The address may lie beyond the array: nothing is read there.
MK_INLINE void prefetch(const void* base, int64_t byte) {
    __builtin_prefetch((const void*)((uintptr_t)base + byte), 0, 2);
}

// Ask for lines that will be written soon, where another core may have read them: taking them back one by one, as the stores
// come, takes longer than what is stored.
MK_INLINE void claim(const float* from, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
#if defined(MK_X86)
        __asm__ volatile("prefetchw %0" : : "m"(from[i]));
#else
        __builtin_prefetch(from + i, 1, 3);
#endif
    }
}

// exp(x) to 2 units in the last place; 0 below -87.3 (float32's normal range ends there), infinity above 88.7,
// NaN for NaN.
MK_INLINE vf vexp(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf shifted = x * splat(1.44269504f) + magic;
    vf n = shifted - magic;
    vf r = n * splat(-0.693359375f) + x;
    r = n * splat(2.12194440e-4f) + r;
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    // Two factors, so that results beyond 2^127 still form before the last product.
    vi whole = (vi)shifted - (vi)magic;
    vi half = whole >> 1;
    vf scale = (vf)((half + splat_int(127)) << 23);
    vf rest = (vf)((whole - half + splat_int(127)) << 23);
    vf y = p * scale * rest;
    y = choose(x < splat(-87.33f), splat(0.0f), y);
    y = choose(x > splat(88.72f), splat(INFINITY), y);
    return choose(x == x, y, x);
}

// log(x) for finite x >= 2^-126, to 2 units in the last place.
MK_INLINE vf vlog(vf x) {
    vi bits = (vi)x;
    vi exponent = ((bits - splat_int(0x3f3504f3)) >> 23);  // mantissa in [sqrt(1/2), sqrt(2))
    vf m = (vf)(bits - (exponent << 23)) - splat(1.0f);
    vf e = __builtin_convertvector(exponent, vf);
    vf z = m * m;
    vf p = splat(7.0376836292e-2f);
    p = p * m + splat(-1.1514610310e-1f);
    p = p * m + splat(1.1676998740e-1f);
    p = p * m + splat(-1.2420140846e-1f);
    p = p * m + splat(1.4249322787e-1f);
    p = p * m + splat(-1.6668057665e-1f);
    p = p * m + splat(2.0000714765e-1f);
    p = p * m + splat(-2.4999993993e-1f);
    p = p * m + splat(3.3333331174e-1f);
    vf y = m * z * p;
    y = e * splat(-2.12194440e-4f) + y;
    y = z * splat(-0.5f) + y;
    return m + y + e * splat(0.693359375f);
}

MK_INLINE vf vsigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + vexp(-x)); }
MK_INLINE vf vsilu(vf x) { return x * vsigmoid(x); }
// The derivative of silu at x, given sigmoid(x).
MK_INLINE vf silu_slope(vf x, vf gate) { return gate + x * gate * (splat(1.0f) - gate); }

// log(1 + exp(x)) without overflow and, for very negative x, without losing exp(x) beside 1.
MK_INLINE vf vsoftplus(vf x) {
    vf away = choose(x > splat(0.0f), -x, x);
    vf u = vexp(away);
    vf one_more = splat(1.0f) + u;
    // log1p(u) = log(1 + u) * u / ((1 + u) - 1) makes up for what rounding 1 + u lost.
    vf kept = one_more - splat(1.0f);
    vf small = choose(kept == splat(0.0f), u, vlog(one_more) * u / choose(kept == splat(0.0f), splat(1.0f), kept));
    return choose(x == x, vmax(x, splat(0.0f)) + small, x);
}

// sin(x) and cos(x) to 1e-7 for |x| up to some thousand turns, NaN for NaN.
MK_INLINE void vsincos(vf x, vf* sine, vf* cosine) {
    const vf magic = splat(12582912.0f);  // as in vexp
    vf shifted = x * splat(0.636619772f) + magic;
    vf n = shifted - magic;
    // x minus quarter turns; pi / 2 in three parts, so that the products with n are exact.
    vf r = n * splat(-1.5703125f) + x;
    r = n * splat(-4.837512969970703125e-4f) + r;
    r = n * splat(-7.549789948768648e-8f) + r;
    vf z = r * r;
    vf s = splat(-1.9515295891e-4f);
    s = s * z + splat(8.3321608736e-3f);
    s = s * z + splat(-1.6666654611e-1f);
    s = s * z * r + r;
    vf c = splat(2.443315711809948e-5f);
    c = c * z + splat(-1.388731625493765e-3f);
    c = c * z + splat(4.166664568298827e-2f);
    c = c * z * z + (splat(1.0f) - splat(0.5f) * z);
    vi quarter = (vi)shifted - (vi)magic;
    vi odd = (quarter & 1) != 0;
    vi sine_sign = (quarter & 2) << 30, cosine_sign = ((quarter + 1) & 2) << 30;
    *sine = (vf)((vi)choose(odd, c, s) ^ sine_sign);
    *cosine = (vf)((vi)choose(odd, s, c) ^ cosine_sign);
}

// x, rounded: no compiler makes one operation of what computed it and what follows.
template <class Values>
MK_INLINE Values done(Values x) {
#if defined(MK_X86) && MK_WIDTH == 16
    __asm__("" : "+v"(x));
#elif defined(__x86_64__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#else
    __asm__("" : "+m"(x));
#endif
    return x;
}

}  // namespace MK_ISA
