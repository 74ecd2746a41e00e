// Products of narrow weights with the many rows of a prompt, or of a batch, by long vectors: W rows of the matrix at a time
// are turned by 16 bytes, so that a vector has some of four rows and meets the same 16 bytes of a row of x four times. That
// leaves a quarter of the sums to add up at the end, and turning takes half of the steps that single numbers would.
//
// Sums of integers are those of narrow_product.h to the last digit, those of bfloat16 are in another order.
#pragma once

#include "narrow_product.h"

namespace MK_ISA {

// Results of one row of x with rows [row, row + count), up to W of them.
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

// Memory that is asked for while rows meet, line by line.
struct Lines {
    const char *next, *end;
    bool closest = mk_asks_closest;
    MK_INSIDE void ask() {
        if (next >= end) return;
        if (closest) __builtin_prefetch(next, 0, 3);
        else prefetch(next, 0);
        next += LINE;
    }
};

#if MK_WIDTH == 16
constexpr int64_t PART = 16;  // bytes of a row in a vector

// Lines of four rows, turned: to[i][r] = from[r][i], by parts.
MK_INLINE void turn_parts(const vi (&from)[FOUR], vi* to, int64_t apart) {
    const __m512i a = (__m512i)from[0], b = (__m512i)from[1], c = (__m512i)from[2], d = (__m512i)from[3];
    const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), cd = _mm512_shuffle_i32x4(c, d, 0x44);
    const __m512i ab_last = _mm512_shuffle_i32x4(a, b, 0xee), cd_last = _mm512_shuffle_i32x4(c, d, 0xee);
    to[0] = (vi)_mm512_shuffle_i32x4(ab, cd, 0x88);
    to[apart] = (vi)_mm512_shuffle_i32x4(ab, cd, 0xdd);
    to[2 * apart] = (vi)_mm512_shuffle_i32x4(ab_last, cd_last, 0x88);
    to[3 * apart] = (vi)_mm512_shuffle_i32x4(ab_last, cd_last, 0xdd);
}

// Rows [row, row + count), those that are not there like the last, as [part][FOUR]: vector q has parts of rows q, 4 + q, 8 + q
// and 12 + q, so that partial_sums() of all four are the rows' in their order.
template <class Dot>
static void make_quads(const Matrix& m, int64_t row, int64_t count, vi* quads) {
    const int64_t bytes = stored_bytes(m), pitch = bytes_per_row(m);
    for (int64_t q = 0; q < FOUR; q++, quads++) {
        const char* own[FOUR];
        for (int64_t r = 0; r < FOUR; r++) own[r] = (const char*)m.weight + (row + least(FOUR * r + q, count - 1)) * pitch;
        auto turn = MK_BODY(int64_t at, auto get) {
            vi rows[FOUR];
#pragma GCC unroll 4
            for (int r = 0; r < FOUR; r++) rows[r] = Dot::weights(get(own[r]));
            turn_parts(rows, quads + at / PART * FOUR, FOUR);
        };
        int64_t at = 0;
        if (m.format == INT4_NARROW) {
            for (; at < bytes; at += VECTOR)
                turn(at, MK_BODY(const char* from) {
                    const uint8_t* codes = (const uint8_t*)from;
                    return Int4Weights{{codes, codes, codes, codes}, bytes / 2}.get(0, at);
                });
        } else {
            for (; at + VECTOR <= bytes; at += VECTOR) turn(at, MK_BODY(const char* from) { return load_bytes(from + at); });
            if (at < bytes) turn(at, MK_BODY(const char* from) { return load_some_bytes(from + at, bytes - at); });
        }
    }
}

// B rows of x from `b` on with rows [row, row + count). `each` step asks for so many lines.
template <class Dot, int B>
static __attribute__((noinline)) void quad_block(
    const Matrix& m, const vi* quads, int64_t steps, int64_t row, int64_t count, const NarrowRow* x, int64_t b, Lines& ahead,
    int64_t each, const Results& to) {
    const char* rows[B];
    for (int i = 0; i < B; i++) rows[i] = narrow_at(m, x, b + i)->data;
    typename Dot::Sum sums[B][FOUR] = {};
    Lines asked = ahead;
    for (int64_t step = 0; step < steps; step++, quads += FOUR) {
        for (int64_t line = 0; line < each; line++) asked.ask();
#pragma GCC unroll 6
        for (int i = 0; i < B; i++) {
            const vi part = (vi)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(rows[i] + PART * step)));
#pragma GCC unroll 4
            for (int q = 0; q < FOUR; q++) sums[i][q] = Dot::add(sums[i][q], quads[q], part);
        }
    }
    ahead = asked;
#pragma GCC unroll 6
    for (int i = 0; i < B; i++)
        put_panel<Dot>(partial_sums(sums[i]), m, row, count, *narrow_at(m, x, b + i), to, b + i);
}

// Rows [begin, end) of the product with `batch` rows.
template <class Dot>
static void multiply_quads(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to) {
    const int64_t steps = round_up(stored_bytes(m), VECTOR) / PART, passes = ceil_div(batch, AT_ONCE);
    const int64_t each = ceil_div(ceil_div(W * bytes_per_row(m), LINE), passes * steps);
    vi* quads = (vi*)scratch<PRODUCT_DECODED>(steps * FOUR * W);
    auto weights_of = [&](int64_t row) { return (const char*)m.weight + least(row, end) * bytes_per_row(m); };
    for (int64_t row = begin; row < end; row += W) {
        const int64_t count = least(W, end - row);
        make_quads<Dot>(m, row, count, quads);
        Lines ahead = {weights_of(row + W), weights_of(row + 2 * W)};
        for (int64_t pass = 0, b = 0; pass < passes; pass++) {
            const int64_t used = batch / passes + (pass < batch % passes);
            by_count<AT_ONCE>(used, MK_BODY(auto rows) {
                quad_block<Dot, decltype(rows)::value>(m, quads, steps, row, count, x, b, ahead, each, to);
            });
            b += used;
        }
    }
}
#endif

}  // namespace MK_ISA
