// Matrix products small enough to stay in cache: tiles of the result in registers, operands read where they lie.
//
// The right factor and the result have rows of whole vectors (padded with zeros). The left factor is read one number
// at a time, by row or transposed, so it needs no packing.
#pragma once

#include "rows.h"
#include "vec.h"

namespace MK_ISA {

// The largest tile, ROWS x COLS vectors: accumulators, one row of the right factor and one number of the left one fit
// the registers (32 for AVX-512, 16 else; without FMA a product needs one more).
constexpr int ROWS = W == 4 ? 4 : 6;
constexpr int COLS = W == 16 ? 4 : 2;

// f(Count<M>, i) for tiles of M rows from row i that cover `rows`; as few sizes as keep the remainders fast.
template <class F>
MK_INLINE void row_tiles(int64_t rows, const F& f) {
    int64_t i = 0;
    for (; i + ROWS <= rows; i += ROWS) f(Count<ROWS>(), i);
    if constexpr (ROWS > 4)
        if (i + 4 <= rows) f(Count<4>(), i), i += 4;
    if (i + 2 <= rows) f(Count<2>(), i), i += 2;
    if (i < rows) f(Count<1>(), i);
}

// The same along the columns, counted in vectors.
template <class F>
MK_INLINE void column_tiles(int64_t vectors, const F& f) {
    int64_t j = 0;
    for (; j + COLS <= vectors; j += COLS) f(Count<COLS>(), j);
    if constexpr (COLS > 2)
        if (j + 2 <= vectors) f(Count<2>(), j), j += 2;
    if (j < vectors) f(Count<1>(), j);
}

// What products are made of. A word of a factor holds HELD numbers that follow each other along the axis which is summed
// over; a tile adds the products of words.
struct Floats {
    static constexpr int64_t HELD = 1;
    MK_INLINE vf spread(const float* word) { return splat(*word); }
    MK_INLINE vf add(vf sum, vf a, vf b) { return sum + a * b; }
};
#if defined(MK_X86) && MK_WIDTH == 16
// bfloat16 times bfloat16 with float32 sums, by the processor's own instruction (MK_BF16 of extension.h).
struct Bfloat16s {
    static constexpr int64_t HELD = 2;
    MK_INLINE vf spread(const float* word) {
        int32_t bits;
        memcpy(&bits, word, sizeof bits);
        return (vf)splat_int(bits);
    }
    MK_INLINE vf add(vf sum, vf a, vf b) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
};
#endif

// Loops over a tile have to vanish, or the tile would lie in memory instead of registers.
#define MK_UNROLLED _Pragma("GCC unroll 8") for

template <int M, int N>
struct Tile {
    vf at[M][N];

    MK_INSIDE void clear() {
        MK_UNROLLED(int i = 0; i < M; i++) MK_UNROLLED(int j = 0; j < N; j++) at[i][j] = vf{};
    }

    // += a b over `count` words. The left factor's word (i, k) is a[i * lda + k], transposed a[k * lda + i].
    template <bool transposed, class Factors = Floats>
    MK_INSIDE void add_product(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t count) {
        for (int64_t k = 0; k < count; k++) {
            vf right[N];
            MK_UNROLLED(int j = 0; j < N; j++) right[j] = load(b + k * ldb + j * W);
            MK_UNROLLED(int i = 0; i < M; i++) {
                vf left = Factors::spread(a + (transposed ? k * lda + i : i * lda + k));
                MK_UNROLLED(int j = 0; j < N; j++) at[i][j] = Factors::add(at[i][j], left, right[j]);
            }
        }
    }

    MK_INSIDE void scale_rows(const float* by) {
        MK_UNROLLED(int i = 0; i < M; i++) MK_UNROLLED(int j = 0; j < N; j++) at[i][j] *= splat(by[i]);
    }

    // += scale * from
    MK_INSIDE void add_scaled(float scale, const float* from, int64_t ld) {
        MK_UNROLLED(int i = 0; i < M; i++)
            MK_UNROLLED(int j = 0; j < N; j++) at[i][j] += splat(scale) * load(from + i * ld + j * W);
    }

    MK_INSIDE void store_to(float* to, int64_t ld) const {
        MK_UNROLLED(int i = 0; i < M; i++) MK_UNROLLED(int j = 0; j < N; j++) store(to + i * ld + j * W, at[i][j]);
    }
};

// One lane of each of W vectors against one vector of the W lanes.
#if MK_WIDTH == 16
MK_INLINE void transpose_block(vf (&x)[MK_WIDTH]) {
    vf pairs[W], fours[W];
    for (int i = 0; i < W; i += 2) {
        pairs[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        pairs[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    // fours[4 q + j]: in each quarter of the vector, column j of its own four columns, of rows 4 q to 4 q + 3.
    for (int q = 0; q < 4; q++)
        for (int j = 0; j < 2; j++) {
            const vf a = pairs[4 * q + j], b = pairs[4 * q + 2 + j];
            fours[4 * q + 2 * j] =
                __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            fours[4 * q + 2 * j + 1] =
                __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    for (int j = 0; j < 4; j++) {
        const vf a = fours[j], b = fours[4 + j], c = fours[8 + j], d = fours[12 + j];
        const vf ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        const vf cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        const vf ab_odd = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        const vf cd_odd = __builtin_shufflevector(c, d, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        x[j] = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        x[4 + j] = __builtin_shufflevector(ab_odd, cd_odd, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        x[8 + j] = __builtin_shufflevector(ab, cd, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        x[12 + j] = __builtin_shufflevector(ab_odd, cd_odd, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}
#else
MK_INLINE void transpose_block(vf (&x)[MK_WIDTH]) {
    // Blocks of 1, 2, 4, ... change places across the diagonal of a block twice as large.
#pragma GCC unroll 4
    for (int step = 1; step < W; step *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i & step) continue;
            vf low, high;
#if defined(__clang__)
            for (int k = 0; k < W; k++) {
                low[k] = k & step ? x[i + step][k - step] : x[i][k];
                high[k] = k & step ? x[i + step][k] : x[i][k + step];
            }
#else
            vi from_low, from_high;
            for (int k = 0; k < W; k++) {
                from_low[k] = k & step ? W + k - step : k;
                from_high[k] = k & step ? W + k : k + step;
            }
            low = __builtin_shuffle(x[i], x[i + step], from_low);
            high = __builtin_shuffle(x[i], x[i + step], from_high);
#endif
            x[i] = low;
            x[i + step] = high;
        }
    }
}
#endif

// to[j][i] = from[i][j] for i < rows, j < columns; each row of `to` is filled up with zeros to `width` >= rows.
static void transpose(const float* from, int64_t ld_from, int64_t rows, int64_t columns, float* to, int64_t ld_to,
                      int64_t width) {
    for (int64_t i = 0; i < width; i += W)
        for (int64_t j = 0; j < columns; j += W) {
            vf block[MK_WIDTH] = {};
            int64_t high = least(W, rows - i), wide = least(W, columns - j);
            if (high == W && wide == W) {
#pragma GCC unroll 16
                for (int k = 0; k < W; k++) block[k] = load(from + (i + k) * ld_from + j);
            } else {
                for (int64_t k = 0; k < high; k++) block[k] = load_part(from + (i + k) * ld_from + j, wide);
            }
            transpose_block(block);
            int64_t part = least(W, width - i);
            if (part == W && wide == W) {
#pragma GCC unroll 16
                for (int k = 0; k < W; k++) store(to + (j + k) * ld_to + i, block[k]);
            } else {
                for (int64_t k = 0; k < wide; k++) store_part(to + (j + k) * ld_to + i, block[k], part);
            }
        }
}

}  // namespace MK_ISA
