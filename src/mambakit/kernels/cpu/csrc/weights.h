// Weight matrices as they are stored, and how W neighbouring weights of a row become floats.
#pragma once

#include "border.h"
#include "rows.h"
#include "vec.h"

#if MK_WIDTH >= 8
// GCC 12 warns of its own undefined vectors.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace MK_ISA {

// The NARROW ones are multiplied with rows of x that are rounded too: to bfloat16, or to int8 with a scale for each row.
enum WeightFormat {
    FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, NF4 = 3, BFLOAT16_NARROW = 4, INT8_NARROW = 5, INT4_NARROW = 6
};

struct Matrix {
    MK_FIELDS(Matrix,
        int64_t format, rows, columns;
        int64_t group;  // inputs that share a scale: of NF4 a multiple of 32, of INT4_NARROW 32, else 0
        const void* weight;
        const void* scales;  // INT8, INT8_NARROW, INT4_NARROW: float [rows]; NF4: bfloat16 [rows][groups]
        const float* bias;   // or null
    )
};

static inline bool is_narrow(const Matrix& m) { return m.format >= BFLOAT16_NARROW; }

// Columns of x that are read: NF4 fills its last group with zeros.
static inline int64_t stored_columns(const Matrix& m) {
    return m.format == NF4 ? round_up(m.columns, m.group) : m.columns;
}

static inline int64_t bytes_per_row(const Matrix& m) {
    const int64_t columns = stored_columns(m);
    if (m.format == FLOAT32) return 4 * columns;
    if (m.format == BFLOAT16 || m.format == BFLOAT16_NARROW) return 2 * columns;
    // Codes of 64 inputs at a time, then a byte for each group of 32.
    if (m.format == INT4_NARROW) return round_up(columns, 64) / 32 * 17;
    return m.format == NF4 ? columns / 2 : columns;
}

// The formats with one number per weight: BYTES each, `get` the next W of them as floats.
struct Float32Weights {
    static constexpr int64_t BYTES = 4;
    MK_INLINE vf get(const char* at) { return load((const float*)at); }
};

struct Bfloat16Weights {
    static constexpr int64_t BYTES = 2;
    // The upper half of a float32 each.
    MK_INLINE vf get(const char* at) {
#if MK_WIDTH == 16
        return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16);
#elif MK_WIDTH == 8
        return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16);
#else
        uint16_t part[W];
        memcpy(part, at, sizeof part);
        vi bits;
        for (int64_t lane = 0; lane < W; lane++) bits[lane] = (int32_t)((uint32_t)part[lane] << 16);
        return (vf)bits;
#endif
    }
};

struct Int8Weights {
    static constexpr int64_t BYTES = 1;
    MK_INLINE vf get(const char* at) {
#if MK_WIDTH == 16
        return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
#elif MK_WIDTH == 8
        return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#else
        int8_t part[W];
        memcpy(part, at, sizeof part);
        vf x;
        for (int64_t lane = 0; lane < W; lane++) x[lane] = part[lane];
        return x;
#endif
    }
};

// `get` for the last n < W weights of a row, zeros beyond.
template <class Weights>
MK_INLINE vf get_part(const char* at, int64_t n) {
    char whole[W * Weights::BYTES] = {};
    memcpy(whole, at, n * Weights::BYTES);
    return Weights::get(whole);
}

// The 16 values of NF4; quantization.py has the same.
static const float NF4_VALUES[16] = {-1.0f,       -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f,
                                     -0.091050036f, 0.0f,      0.0795803f,   0.1609302f,  0.2461123f,   0.33791524f,
                                     0.44070983f, 0.562617f,   0.72295684f,  1.0f};

// The 16 values of INT4_NARROW, for each of the 256 scales that a group may have: round(127 NF4 value * scale / 255), which
// is never halfway between two integers. OFFSET more, modulo 256, where products want that.
template <int OFFSET>
struct Int4Values {
    int8_t of[256][16];
    constexpr Int4Values() : of() {
        constexpr int levels[16] = {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127};
        for (int scale = 0; scale < 256; scale++)
            for (int code = 0; code < 16; code++) {
                const int size = levels[code] < 0 ? -levels[code] : levels[code];
                const int value = (2 * size * scale + 255) / 510;
                of[scale][code] = (int8_t)((levels[code] < 0 ? -value : value) + OFFSET);
            }
    }
};
template <int OFFSET>
alignas(64) static constexpr Int4Values<OFFSET> INT4_VALUES = {};

// NF4's values times a group's scale. W bytes hold the codes of W inputs in their low halves and of W others, half a
// group on, in their high ones.
struct Nf4Table {
#if MK_WIDTH == 16
    __m512 values;
    MK_INLINE Nf4Table of(float scale) {
        return {_mm512_mul_ps(_mm512_loadu_ps(NF4_VALUES), _mm512_set1_ps(scale))};
    }
    MK_INLINE __m512i codes(const uint8_t* at) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
    // The permutation looks at the lowest 4 bits of each index only.
    MK_INSIDE vf low(__m512i c) const { return (vf)_mm512_permutexvar_ps(c, values); }
    MK_INSIDE vf high(__m512i c) const { return low(_mm512_srli_epi32(c, 4)); }
#elif MK_WIDTH == 8
    __m256 negative, positive;
    MK_INLINE Nf4Table of(float scale) {
        const __m256 by = _mm256_set1_ps(scale);
        return {_mm256_mul_ps(_mm256_loadu_ps(NF4_VALUES), by), _mm256_mul_ps(_mm256_loadu_ps(NF4_VALUES + 8), by)};
    }
    MK_INLINE __m256i codes(const uint8_t* at) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)); }
    // Three bits choose within a half, the fourth between the halves.
    MK_INSIDE vf low(__m256i c) const {
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(c, 28));
        return (vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps(negative, c), _mm256_permutevar8x32_ps(positive, c), upper);
    }
    MK_INSIDE vf high(__m256i c) const { return low(_mm256_srli_epi32(c, 4)); }
#else
    float values[16];
    MK_INLINE Nf4Table of(float scale) {
        Nf4Table table;
        for (int i = 0; i < 16; i++) table.values[i] = NF4_VALUES[i] * scale;
        return table;
    }
    MK_INLINE const uint8_t* codes(const uint8_t* at) { return at; }
    MK_INSIDE vf low(const uint8_t* c) const {
        vf x;
        for (int64_t lane = 0; lane < W; lane++) x[lane] = values[c[lane] & 15];
        return x;
    }
    MK_INSIDE vf high(const uint8_t* c) const {
        vf x;
        for (int64_t lane = 0; lane < W; lane++) x[lane] = values[c[lane] >> 4];
        return x;
    }
#endif
};

// bfloat16 as float32.
MK_INLINE void widen(const uint16_t* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

// One row of the matrix as numbers.
static void read_row(const Matrix& m, int64_t row, float* to) {
    const char* at = (const char*)m.weight + row * bytes_per_row(m);
    if (m.format == FLOAT32) return copy((const float*)at, m.columns, to);
    if (m.format == BFLOAT16 || m.format == BFLOAT16_NARROW) return widen((const uint16_t*)at, to, m.columns);
    const bool halves = m.format == NF4 || m.format == INT4_NARROW;
    const int64_t half = m.group / 2, groups = halves ? ceil_div(m.columns, m.group) : 1;
    const uint8_t* codes = (const uint8_t*)at;
    for (int64_t i = 0; i < m.columns; i++) {
        if (!halves) {
            to[i] = ((const float*)m.scales)[row] * (int8_t)at[i];
            continue;
        }
        const int64_t group = i / m.group, within = i % m.group;
        const int code = codes[group * half + within % half] >> (within < half ? 0 : 4) & 15;
        float scale;
        if (m.format == NF4) {
            widen((const uint16_t*)m.scales + row * groups + group, &scale, 1);
            to[i] = scale * NF4_VALUES[code];
        } else {
            const uint8_t of_group = codes[round_up(m.columns, 64) / 2 + group];
            to[i] = ((const float*)m.scales)[row] * INT4_VALUES<0>.of[of_group][code];
        }
    }
}

}  // namespace MK_ISA
