// Rows of numbers that are rounded before they are multiplied, and the sums of their products with rounded weights.
#pragma once

#include <float.h>

#include "rows.h"
#include "vec.h"
#include "weights.h"

namespace MK_ISA {

constexpr int64_t VECTOR = 4 * W;  // bytes
constexpr int64_t LINE = 64;

MK_INLINE vi load_bytes(const void* from) {
    vi x;
    memcpy(&x, from, sizeof x);
    return x;
}
MK_INLINE vi load_some_bytes(const void* from, int64_t n) {
    vi x = {};
    memcpy(&x, from, n);
    return x;
}

// Dots add to every lane of `sum` the products of 4 neighbouring int8, or of 2 bfloat16. Where the instruction takes
// unsigned weights, they get OFFSET more, and each sum OFFSET times that of x.
struct Int8Dot {
    typedef vi Sum;
    static constexpr int32_t OFFSET = 0;
    MK_INLINE vi weights(vi w) { return w; }
    // Magnitudes times values with the weights' signs: in 16 bits, two products of up to 128 times 127 do not overflow.
    MK_INLINE vi add(vi sum, vi w, vi x) {
#if MK_WIDTH == 16
        const __m512i values = (__m512i)x, turned =
            _mm512_mask_sub_epi8(values, _mm512_movepi8_mask((__m512i)w), _mm512_setzero_si512(), values);
        const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), turned);
        return sum + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif MK_WIDTH == 8
        const __m256i turned = _mm256_sign_epi8((__m256i)x, (__m256i)w);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), turned);
        return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
        int8_t a[VECTOR], b[VECTOR];
        memcpy(a, &w, sizeof a);
        memcpy(b, &x, sizeof b);
        for (int64_t lane = 0; lane < W; lane++)
            for (int64_t q = 4 * lane; q < 4 * lane + 4; q++) sum[lane] += a[q] * b[q];
        return sum;
#endif
    }
};

struct Bfloat16Dot {
    typedef vf Sum;
    static constexpr int32_t OFFSET = 0;
    MK_INLINE vi weights(vi w) { return w; }
    MK_INLINE vf upper(vi pair) { return (vf)(pair & splat_int((int32_t)0xffff0000)); }
    MK_INLINE vf lower(vi pair) { return (vf)(pair << 16); }
    MK_INLINE vf add(vf sum, vi w, vi x) {
        sum += lower(w) * lower(x);
        return sum + upper(w) * upper(x);
    }
};

#if defined(MK_X86) && MK_WIDTH >= 8
struct Int8DotVnni {
    typedef vi Sum;
    static constexpr int32_t OFFSET = 128;
    MK_INLINE vi weights(vi w) { return w ^ splat_int((int32_t)0x80808080); }
    MK_INLINE vi add(vi sum, vi w, vi x) {
#if MK_WIDTH == 16
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
#else
        __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
#endif
        return sum;
    }
};
#endif

#if defined(MK_X86) && MK_WIDTH == 16
struct Bfloat16DotNative : Bfloat16Dot {
    MK_INLINE vf add(vf sum, vi w, vi x) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
        return sum;
    }
};
#endif

#if defined(MK_NEON)
// For assemblers that are told of an older processor. Without the first's level of the architecture, GNU's does not take it.
#if defined(__ARM_FEATURE_DOTPROD)
#define MK_KNOWS_DOTS ""
#else
#define MK_KNOWS_DOTS ".arch armv8.2-a+dotprod\n\t"
#endif
#define MK_KNOWS_BF16 ".arch_extension bf16\n\t"
#define MK_KNOWS_I8MM ".arch_extension i8mm\n\t"

struct Int8DotNeon : Int8Dot {
    MK_INLINE vi add(vi sum, vi w, vi x) {
        __asm__(MK_KNOWS_DOTS "sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(w), "w"(x));
        return sum;
    }
};

struct Bfloat16DotNeon : Bfloat16Dot {
    MK_INLINE vf add(vf sum, vi w, vi x) {
        __asm__(MK_KNOWS_BF16 "bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(w), "w"(x));
        return sum;
    }
};
#endif

// A row of x as these products read it: `scale` times integers, whose sum is `total`, or bfloat16. Zeros up to whole
// lines follow.
struct NarrowRow {
    float scale;
    int32_t total;
    char filled[LINE - 8];
    char data[];
};

// What there is of a row of the matrix, one number after the other, INT4_NARROW decoded.
static inline int64_t stored_bytes(const Matrix& m) {
    if (m.format == BFLOAT16_NARROW) return 2 * m.columns;
    return m.format == INT4_NARROW ? round_up(m.columns, 64) : m.columns;
}
static inline int64_t narrow_bytes(const Matrix& m) { return round_up(stored_bytes(m), LINE); }
static inline int64_t narrow_pitch(const Matrix& m) { return (int64_t)sizeof(NarrowRow) + narrow_bytes(m); }
// Of rows that lie one after the other.
static inline const NarrowRow* narrow_at(const Matrix& m, const NarrowRow* rows, int64_t row) {
    return (const NarrowRow*)((const char*)rows + row * narrow_pitch(m));
}

// To the nearest, halves to even. Not with the product in one rounding: x * by is rounded first.
MK_INLINE vi rounded(vf x, vf by) {
#if MK_WIDTH == 16
    return (vi)_mm512_cvtps_epi32((__m512)(x * by));
#elif MK_WIDTH == 8
    return (vi)_mm256_cvtps_epi32((__m256)(x * by));
#else
    vi whole;
    for (int64_t lane = 0; lane < W; lane++) whole[lane] = (int32_t)__builtin_lrintf(x[lane] * by[lane]);
    return whole;
#endif
}

// The lowest bytes of all lanes.
MK_INLINE void store_bytes(char* to, vi x) {
#if MK_WIDTH == 16
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int64_t lane = 0; lane < W; lane++) to[lane] = (char)x[lane];
#endif
}
MK_INLINE void store_halves(char* to, vi x) {
#if MK_WIDTH == 16
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)x));
#else
    for (int64_t lane = 0; lane < W; lane++) {
        const uint16_t half = (uint16_t)x[lane];
        memcpy(to + 2 * lane, &half, sizeof half);
    }
#endif
}

// Where input i lies among the bytes of a row: as weights in four bits come, the first halves of some groups, then the last.
MK_INLINE int64_t narrow_place(const Matrix& m, int64_t i) {
    if (m.format != INT4_NARROW) return i;
    const bool four = W == 16 && i / 128 * 128 + 64 < stored_bytes(m);
    const int64_t groups = four ? 4 : 2, size = 32 * groups, within = i % size;
    return i - within + within % 32 / 16 * (16 * groups) + within / 32 * 16 + within % 16;
}

// x = scale * integers from -127 to 127. What is no number, or none that has a scale, makes the scale one.
static void round_to_int8(const Matrix& m, const float* x, NarrowRow* to) {
    vf largest = {}, wrong = {};
    each_vector(m.columns, MK_BODY(int64_t i, int64_t count) {
        const vf part = load_part(x + i, count);
        largest = vmax(vmax(part, -part), largest);
        wrong += part * splat(0.0f);
    });
    float most = 0.0f;
    for (int64_t lane = 0; lane < W; lane++) most = largest[lane] > most ? largest[lane] : most;
    const bool finite = sum(wrong) == 0.0f, some = finite && most > 1e-36f;
    to->scale = finite ? some ? most / 127.0f : 0.0f : NAN;
    const vf by = splat(some ? 127.0f / most : 0.0f);
    vi total = {};
    // What no input comes to lies among the last two lines.
    const int64_t cleared = some ? least(narrow_bytes(m), 2 * LINE) : narrow_bytes(m);
    clear(to->data + narrow_bytes(m) - cleared, cleared);
    if (!some) {
        to->total = 0;
        return;
    }
    each_vector(m.columns, MK_BODY(int64_t i, int64_t count) {
        const vi whole = rounded(load_part(x + i, count), by);
        total += whole;
        char* place = to->data + narrow_place(m, i);
        if (count == W) store_bytes(place, whole);
        else
            for (int64_t lane = 0; lane < count; lane++) place[lane] = (char)whole[lane];
    });
    int32_t all = 0;
    for (int64_t lane = 0; lane < W; lane++) all += total[lane];
    to->total = all;
}

static void round_to_bfloat16(const Matrix& m, const float* x, NarrowRow* to) {
    clear(to->data + narrow_bytes(m) - LINE, LINE);
    each_vector(m.columns, MK_BODY(int64_t i, int64_t count) {
        const vf part = load_part(x + i, count);
        const vi bits = (vi)part, halves = (bits + splat_int(0x7fff) + ((bits >> 16) & 1)) >> 16;
        const vi kept = part == part ? halves : splat_int(0x7fc0);
        if (count == W) store_halves(to->data + 2 * i, kept);
        else
            for (int64_t lane = 0; lane < count; lane++) {
                const uint16_t half = (uint16_t)kept[lane];
                memcpy(to->data + 2 * (i + lane), &half, sizeof half);
            }
    });
}

static void round_row(const Matrix& m, const float* x, NarrowRow* to) {
    if (m.format == BFLOAT16_NARROW) round_to_bfloat16(m, x, to);
    else round_to_int8(m, x, to);
}

}  // namespace MK_ISA
