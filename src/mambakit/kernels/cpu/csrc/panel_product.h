// Products of narrow weights with the many rows of a prompt, where vectors are short or there are no instructions for the
// weights' numbers: W rows of the matrix at a time are turned, so that each lane of a sum is a result and nothing is left to
// add up at the end. Which product is taken for how many rows is at the end of this file.
//
// Sums of integers are those of narrow_product.h to the last digit, those of bfloat16 are in another order.
#pragma once

#include "pair_product.h"
#include "quad_product.h"
#include "small_gemm.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace MK_ISA {

// Rows of x from which turning pays with long vectors: always, for weights of eight bits, and for those of four, which are
// decoded meanwhile. Those for pairs are a guess: no processor that has them was there to measure on.
constexpr int64_t MANY_ROWS = 96, MANY_INTEGER_ROWS = 24, MANY_CODED_ROWS = 8, MANY_PAIRED_ROWS = 16;
// Rows of x that meet two panels at a time: as many as there are registers for sums. The rest goes by thirds, then singly.
#if defined(MK_NEON)
constexpr int PANEL_INPUTS = 12;
#else
constexpr int PANEL_INPUTS = W == 16 ? 12 : 6;
#endif
constexpr int PANEL_REST = PANEL_INPUTS / 3;
// Rows of x that are widened at a time, where they are.
constexpr int64_t WIDENED_ROWS = 1024;

// For a processor without products of int8 or bfloat16: products of 16 bits, two in each lane, and of floats, which every
// one has. Weights are widened as they are turned and rows of x once for all panels, so that nothing but the product is
// left inside. `widened`: half a vector of narrow numbers as a whole one.
struct Int16Dot {
    typedef vi Sum;
    static constexpr int32_t OFFSET = 0;
    MK_INLINE vi widened(const void* from) {
        typedef int8_t Narrow __attribute__((vector_size(4 * MK_WIDTH / 2)));
        typedef int16_t Wide __attribute__((vector_size(4 * MK_WIDTH)));
        Narrow x;
        memcpy(&x, from, sizeof x);
        return (vi)__builtin_convertvector(x, Wide);
    }
    MK_INLINE vi add(vi sum, vi w, vi x) {
#if MK_WIDTH == 16
        return sum + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif MK_WIDTH == 8
        return sum + (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__)
        return sum + (vi)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
        return sum + (w << 16 >> 16) * (x << 16 >> 16) + (w >> 16) * (x >> 16);
#endif
    }
};

struct FloatDot {
    typedef vf Sum;
    static constexpr int32_t OFFSET = 0;
    MK_INLINE vi widened(const void* from) { return (vi)Bfloat16Weights::get((const char*)from); }
    MK_INLINE vf add(vf sum, vi w, vi x) { return sum + (vf)w * (vf)x; }
};

template <class Dot>
constexpr bool IS_WIDE = __is_same(Dot, Int16Dot) || __is_same(Dot, FloatDot);

// to[c][r] = from[r][c], W by W.
MK_INLINE void turn(const vi (&from)[W], vi* to) {
    vf block[MK_WIDTH];
    for (int r = 0; r < W; r++) block[r] = (vf)from[r];
    transpose_block(block);
    for (int c = 0; c < W; c++) to[c] = (vi)block[c];
}

// Rows [row, row + count) as [4 bytes][W rows], those that are not there like the last.
template <class Dot>
static void make_panel(const Matrix& m, int64_t row, int64_t count, vi* panel) {
    const int64_t bytes = stored_bytes(m), pitch = bytes_per_row(m);
    for (int64_t at = 0; at < bytes; at += VECTOR) {
        vi rows[W];
        for (int64_t r = 0; r < W; r++) {
            const char* own = (const char*)m.weight + (row + least(r, count - 1)) * pitch;
            if (m.format == INT4_NARROW) {
                const uint8_t* codes = (const uint8_t*)own;
                rows[r] = Int4Weights{{codes, codes, codes, codes}, bytes / 2}.get(0, at);
            } else {
                rows[r] = at + VECTOR <= bytes ? load_bytes(own + at) : load_some_bytes(own + at, bytes - at);
            }
            if constexpr (!IS_WIDE<Dot>) rows[r] = Dot::weights(rows[r]);
        }
        if constexpr (IS_WIDE<Dot>) {
            for (int64_t half = 0; half < 2; half++, panel += W) {
                vi wide[W];
                for (int64_t r = 0; r < W; r++) wide[r] = Dot::widened((const char*)&rows[r] + half * VECTOR / 2);
                turn(wide, panel);
            }
        } else {
            turn(rows, panel);
            panel += W;
        }
    }
}

// Rows of x as panels meet them: what they are to be scaled by, and their numbers.
struct PanelRows {
    const NarrowRow* rows;
    const char* numbers;
    int64_t pitch;
};

template <class Dot>
static PanelRows panel_rows(const Matrix& m, const NarrowRow* x, int64_t count) {
    if constexpr (IS_WIDE<Dot>) {
        // A line more: rows whose distance is a power of two would get in each other's way in the cache.
        const int64_t bytes = narrow_bytes(m), pitch = 2 * bytes + LINE;
        char* wide = (char*)scratch<PRODUCT_WIDENED>(count * pitch / (int64_t)sizeof(float));
        for (int64_t b = 0; b < count; b++)
            for (int64_t at = 0; at < bytes; at += VECTOR / 2) {
                const vi part = Dot::widened(narrow_at(m, x, b)->data + at);
                memcpy(wide + b * pitch + 2 * at, &part, sizeof part);
            }
        return {x, wide, pitch};
    } else {
        return {x, x->data, narrow_pitch(m)};
    }
}

// B rows of x from `b` on with two panels, of rows [row, row + count).
template <class Dot, int B>
static void panel_block(
    const Matrix& m, const vi* panel, int64_t steps, int64_t row, int64_t count, const PanelRows& x, int64_t b,
    Lines& ahead, const Results& to) {
    const int64_t pitch = x.pitch;
    const char* rows[ceil_div(B, 4)];
    for (int q = 0; q < ceil_div(B, 4); q++) rows[q] = x.numbers + (b + 4 * q) * pitch;
    typename Dot::Sum sums[B][2] = {};
    for (int64_t step = 0; step < steps; step++) {
        const vi first = panel[step], second = panel[steps + step];
        ahead.ask();
#pragma GCC unroll 16
        for (int i = 0; i < B; i++) {
            int32_t part;
            memcpy(&part, rows[i / 4] + i % 4 * pitch + 4 * step, sizeof part);
            const vi all = splat_int(part);
            sums[i][0] = Dot::add(sums[i][0], first, all);
            sums[i][1] = Dot::add(sums[i][1], second, all);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < B; i++) {
        const NarrowRow& own = *narrow_at(m, x.rows, b + i);
        put_panel<Dot>(sums[i][0], m, row, least(count, W), own, to, b + i);
        if (count > W) put_panel<Dot>(sums[i][1], m, row + W, count - W, own, to, b + i);
    }
}

// Rows [begin, end) of the product with `batch` rows.
template <class Dot>
static void multiply_panels(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to) {
    const int64_t steps = round_up(stored_bytes(m), VECTOR) / (IS_WIDE<Dot> ? 2 : 4);
    const PanelRows rows = panel_rows<Dot>(m, x, batch);
    vi* panel = (vi*)scratch<PRODUCT_DECODED>(2 * steps * W);
    auto weights_of = [&](int64_t row) { return (const char*)m.weight + least(row, end) * bytes_per_row(m); };
    for (int64_t row = begin; row < end; row += 2 * W) {
        const int64_t count = least(2 * W, end - row);
        make_panel<Dot>(m, row, least(count, W), panel);
        if (count > W) make_panel<Dot>(m, row + W, count - W, panel + steps);
        else clear(panel + steps, steps);
        Lines ahead = {weights_of(row + 2 * W), weights_of(row + 4 * W)};
        int64_t b = 0;
        for (; b + PANEL_INPUTS <= batch; b += PANEL_INPUTS)
            panel_block<Dot, PANEL_INPUTS>(m, panel, steps, row, count, rows, b, ahead, to);
        for (; b + PANEL_REST <= batch; b += PANEL_REST)
            panel_block<Dot, PANEL_REST>(m, panel, steps, row, count, rows, b, ahead, to);
        for (; b < batch; b++) panel_block<Dot, 1>(m, panel, steps, row, count, rows, b, ahead, to);
    }
}

// Rows `row` and `row + 1`, or `row` alone, with B rows of x from `b` on. All are floats, `wide` of them, whole vectors. Not
// inline: what its callers keep in registers would leave too few for the sums.
template <int B>
__attribute__((noinline)) static void float_block(
    const Matrix& m, const float* weights, int64_t row, int64_t count, const float* x, int64_t wide, int64_t b,
    const Results& to) {
    const float *first = weights, *second = weights + (count - 1) * wide, *own = x + b * wide;
    vf sums[2][B] = {};
    for (int64_t k = 0; k < wide; k += W) {
        const vf one = load(first + k), other = load(second + k);
#pragma GCC unroll 16
        for (int i = 0; i < B; i++) {
            const vf part = load(own + i * wide + k);
            sums[0][i] += one * part;
            sums[1][i] += other * part;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < B; i++)
#pragma GCC unroll 2
        for (int r = 0; r < 2; r++) {
            if (r >= count) break;
            float* y = to.y + (b + i) * to.stride + row + r;
            const float value = (sum(sums[r][i]) + (m.bias ? m.bias[row + r] : 0.0f)) * to.scale;
            *y = to.add ? *y + value : value;
        }
}

// Rows [begin, end) of a product of bfloat16, as floats, rows with rows: vectors of four are filled faster with four numbers
// of a row of x than with one of them four times.
static void multiply_floats(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to) {
    const int64_t wide = round_up(m.columns, LINE / 4);
    float* rows = scratch<PRODUCT_WIDENED>(batch * wide);
    for (int64_t b = 0; b < batch; b++) widen((const uint16_t*)narrow_at(m, x, b)->data, rows + b * wide, wide);
    float* weights = scratch<PRODUCT_DECODED>(NEAR_ROWS * wide);
    clear(weights, NEAR_ROWS * wide);
    for (int64_t row = begin; row < end; row += NEAR_ROWS) {
        const int64_t near = least(NEAR_ROWS, end - row);
        for (int64_t r = 0; r < near; r++)
            widen((const uint16_t*)m.weight + (row + r) * m.columns, weights + r * wide, m.columns);
        auto meet = MK_BODY(auto inputs, int64_t b) {
            for (int64_t r = 0; r < near; r += 2)
                float_block<decltype(inputs)::value>(
                    m, weights + r * wide, row + r, least(2, near - r), rows, wide, b, to);
        };
        int64_t b = 0;
        for (; b + PANEL_INPUTS <= batch; b += PANEL_INPUTS) meet(Count<PANEL_INPUTS>(), b);
        for (; b < batch; b++) meet(Count<1>(), b);
    }
}

#if defined(MK_X86) && MK_WIDTH == 16
// Rows [begin, end) of the product with many rows, by AMX: amx_product.h.
static void multiply_tiles(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to);
#endif

// Rows of x from which turning pays.
static int64_t many_rows(const Matrix& m) {
    if (m.format != BFLOAT16_NARROW && mk_extension_in_use >= MK_I8MM) return MANY_PAIRED_ROWS;
    if (W < 16) return 48;
    if (m.format == BFLOAT16_NARROW || mk_extension_in_use < MK_VNNI) return MANY_ROWS;
    return m.format == INT4_NARROW ? MANY_CODED_ROWS : MANY_INTEGER_ROWS;
}

// By turned weights where that pays: for integers whoever asks, for bfloat16 if sums may be in another order.
static void multiply_many(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to, bool any_order) {
    if (begin >= end) return;
    const bool bfloat16 = m.format == BFLOAT16_NARROW;
    if (batch < many_rows(m) || (bfloat16 && !any_order)) return multiply_narrow(m, begin, end, x, batch, to);
#if defined(MK_X86) && MK_WIDTH == 16
    if (mk_tiles_in_use && batch >= MANY_ROWS) return multiply_tiles(m, begin, end, x, batch, to);
#endif
#if defined(MK_NEON)
    if (!bfloat16 && mk_extension_in_use >= MK_I8MM) return multiply_pairs(m, begin, end, x, batch, to);
#endif
    if (mk_extension_in_use >= (bfloat16 ? MK_BF16 : MK_VNNI))
        return by_best_dot(m, MK_BODY(auto dot) {
#if MK_WIDTH == 16
            multiply_quads<decltype(dot)>(m, begin, end, x, batch, to);
#else
            multiply_panels<decltype(dot)>(m, begin, end, x, batch, to);
#endif
        });
    for (int64_t first = 0; first < batch; first += WIDENED_ROWS) {
        const NarrowRow* rows = narrow_at(m, x, first);
        const int64_t count = least(batch - first, WIDENED_ROWS);
        const Results part = {to.y + first * to.stride, to.stride, to.add, to.scale};
        if (!bfloat16) multiply_panels<Int16Dot>(m, begin, end, rows, count, part);
        else if constexpr (W == 4) multiply_floats(m, begin, end, rows, count, part);
        else multiply_panels<FloatDot>(m, begin, end, rows, count, part);
    }
}

}  // namespace MK_ISA
