// Products of narrow weights with the many rows of a prompt: W rows of the matrix at a time are turned, so that each lane of
// a sum is a result and nothing is left to add up at the end.
//
// Sums of integers are those of narrow_product.h to the last digit, those of bfloat16 are in another order.
#pragma once

#include "narrow_product.h"

namespace MK_ISA {

// Rows of x from which turning pays.
constexpr int64_t MANY_ROWS = W == 16 ? 96 : 48;
// Rows of x that meet two panels at a time: as many as there are registers for sums.
constexpr int PANEL_INPUTS = W == 16 ? 12 : 4;

// to[c][r] = from[r][c], W by W.
#if MK_WIDTH == 16
MK_INLINE void turn(const vi (&from)[W], vi* to) {
    vi pairs[W], fours[W];
    for (int i = 0; i < W; i += 2) {
        pairs[i] = __builtin_shufflevector(from[i], from[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        pairs[i + 1] =
            __builtin_shufflevector(from[i], from[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    // fours[4 q + j]: in each quarter of the vector, column j of its own four columns, of rows 4 q to 4 q + 3.
    for (int q = 0; q < 4; q++)
        for (int j = 0; j < 2; j++) {
            const vi a = pairs[4 * q + j], b = pairs[4 * q + 2 + j];
            fours[4 * q + 2 * j] =
                __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            fours[4 * q + 2 * j + 1] =
                __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    for (int j = 0; j < 4; j++) {
        const vi a = fours[j], b = fours[4 + j], c = fours[8 + j], d = fours[12 + j];
        const vi ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        const vi cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        const vi ab_odd = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        const vi cd_odd = __builtin_shufflevector(c, d, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        to[j] = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        to[4 + j] = __builtin_shufflevector(ab_odd, cd_odd, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        to[8 + j] = __builtin_shufflevector(ab, cd, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        to[12 + j] = __builtin_shufflevector(ab_odd, cd_odd, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}
#else
MK_INLINE void turn(const vi (&from)[W], vi* to) {
    for (int r = 0; r < W; r++)
        for (int c = 0; c < W; c++) to[c][r] = from[r][c];
}
#endif

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
            rows[r] = Dot::weights(rows[r]);
        }
        turn(rows, panel);
        panel += W;
    }
}

// Results of one row of x with the rows of a panel.
template <class Dot>
MK_INLINE void put_panel(
    typename Dot::Sum sums, const Matrix& m, int64_t row, int64_t count, const NarrowRow& x, const Results& to,
    int64_t b) {
    vf scales = {}, bias = {}, old = {};
    typename Dot::Sum totals = {};
    float* y = to.y + b * to.stride + row;
    if constexpr (!__is_same(typename Dot::Sum, vf)) {
        scales = load_part((const float*)m.scales + row, count);
        totals += Dot::OFFSET * x.total;
    }
    if (m.bias) bias = load_part(m.bias + row, count);
    if (to.add) old = load_part(y, count);
    store_part(y, placed(scaled(sums, totals, splat(x.scale), scales), m, bias, to, old), count);
}

// B rows of x from `b` on with two panels, of rows [row, row + count).
template <class Dot, int B>
static void panel_block(
    const Matrix& m, const vi* panel, int64_t steps, int64_t row, int64_t count, const NarrowRow* x, int64_t b,
    const Results& to) {
    const int64_t pitch = narrow_pitch(m);
    const char* rows[ceil_div(B, 4)];
    for (int q = 0; q < ceil_div(B, 4); q++) rows[q] = narrow_at(m, x, b + 4 * q)->data;
    typename Dot::Sum sums[B][2] = {};
    for (int64_t step = 0; step < steps; step++) {
        const vi first = panel[step], second = panel[steps + step];
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
        const NarrowRow& own = *narrow_at(m, x, b + i);
        put_panel<Dot>(sums[i][0], m, row, least(count, W), own, to, b + i);
        if (count > W) put_panel<Dot>(sums[i][1], m, row + W, count - W, own, to, b + i);
    }
}

// Rows [begin, end) of the product with `batch` rows.
template <class Dot>
static void multiply_panels(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to) {
    const int64_t steps = round_up(stored_bytes(m), VECTOR) / 4;
    vi* panel = (vi*)scratch<PRODUCT_DECODED>(2 * steps * W);
    for (int64_t row = begin; row < end; row += 2 * W) {
        const int64_t count = least(2 * W, end - row);
        make_panel<Dot>(m, row, least(count, W), panel);
        if (count > W) make_panel<Dot>(m, row + W, count - W, panel + steps);
        else clear(panel + steps, steps);
        int64_t b = 0;
        for (; b + PANEL_INPUTS <= batch; b += PANEL_INPUTS)
            panel_block<Dot, PANEL_INPUTS>(m, panel, steps, row, count, x, b, to);
        for (; b < batch; b++) panel_block<Dot, 1>(m, panel, steps, row, count, x, b, to);
    }
}

// By turned weights where that pays: for integers whoever asks, for bfloat16 if sums may be in another order.
static void multiply_many(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to, bool any_order) {
    if (begin >= end) return;
    if (W == 4 || batch < MANY_ROWS || (m.format == BFLOAT16_NARROW && !any_order))
        return multiply_narrow(m, begin, end, x, batch, to);
    by_best_dot(m, MK_BODY(auto dot) { multiply_panels<decltype(dot)>(m, begin, end, x, batch, to); });
}

}  // namespace MK_ISA
