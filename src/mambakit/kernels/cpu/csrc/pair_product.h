// Products of integers with the many rows of a prompt by the matrix instructions of 64-bit Arm (i8mm): two rows of x meet two
// of the matrix at a time, eight numbers of each.
//
// Sums are those of narrow_product.h to the last digit.
#pragma once

#include "quad_product.h"

#if defined(MK_NEON)
namespace MK_ISA {

// Bytes of a row in a vector; pairs of rows of the matrix and, at most, of x that meet: as there are registers for sums.
constexpr int64_t HALF = VECTOR / 2;
constexpr int PAIRS = 4, INPUT_PAIRS = 4;

// Of the rows a0, a1 and b0, b1: the sums [a0 b0, a0 b1, a1 b0, a1 b1].
MK_INLINE vi add_pairs(vi sum, vi a, vi b) {
    __asm__(MK_KNOWS_I8MM "smmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
    return sum;
}
MK_INLINE vi first_halves(vi a, vi b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
MK_INLINE vi last_halves(vi a, vi b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }

// Rows of x as pairs, [pair][HALF of each]. An odd one is its own partner.
static const vi* paired_inputs(const Matrix& m, int64_t steps, const NarrowRow* x, int64_t batch) {
    vi* pairs = (vi*)scratch<PRODUCT_WIDENED>(ceil_div(batch, 2) * steps * W);
    vi* to = pairs;
    for (int64_t b = 0; b < batch; b += 2) {
        const char *first = narrow_at(m, x, b)->data, *second = narrow_at(m, x, least(b + 1, batch - 1))->data;
        for (int64_t step = 0; step < steps; step += 2) {
            const vi one = load_bytes(first + HALF * step), other = load_bytes(second + HALF * step);
            *to++ = first_halves(one, other);
            *to++ = last_halves(one, other);
        }
    }
    return pairs;
}

// Rows [row, row + count), those that are not there like the last, as [HALF of each][PAIRS].
static void make_pairs(const Matrix& m, int64_t row, int64_t count, vi* pairs) {
    const int64_t bytes = stored_bytes(m), pitch = bytes_per_row(m);
    for (int64_t q = 0; q < PAIRS; q++, pairs++) {
        auto get = MK_BODY(int64_t r, int64_t at) {
            const char* own = (const char*)m.weight + (row + least(r, count - 1)) * pitch;
            const uint8_t* codes = (const uint8_t*)own;
            if (m.format == INT4_NARROW) return Int4Weights{{codes, codes, codes, codes}, bytes / 2}.get(0, at);
            return at + VECTOR <= bytes ? load_bytes(own + at) : load_some_bytes(own + at, bytes - at);
        };
        for (int64_t at = 0; at < bytes; at += VECTOR) {
            const vi one = get(2 * q, at), other = get(2 * q + 1, at);
            pairs[at / HALF * PAIRS] = first_halves(one, other);
            pairs[(at / HALF + 1) * PAIRS] = last_halves(one, other);
        }
    }
}

// B pairs of x, from row `b` of it on, with rows [row, row + count).
template <int B>
static void pair_block(
    const Matrix& m, const vi* weights, const vi* inputs, int64_t steps, int64_t row, int64_t count, const NarrowRow* x,
    int64_t b, int64_t batch, const Results& to) {
    vi sums[B][PAIRS] = {};
    for (int64_t step = 0; step < steps; step++, weights += PAIRS)
#pragma GCC unroll 4
        for (int i = 0; i < B; i++)
#pragma GCC unroll 4
            for (int q = 0; q < PAIRS; q++) sums[i][q] = add_pairs(sums[i][q], inputs[i * steps + step], weights[q]);
#pragma GCC unroll 4
    for (int i = 0; i < B; i++)
#pragma GCC unroll 2
        for (int q = 0; q < PAIRS; q += 2) {
            const int64_t first = 2 * q, here = least(count - first, W);
            if (here <= 0) continue;
            auto put = MK_BODY(vi of_row, int64_t at) {
                put_panel<Int8Dot>(of_row, m, row + first, here, *narrow_at(m, x, at), to, at);
            };
            put(first_halves(sums[i][q], sums[i][q + 1]), b + 2 * i);
            if (b + 2 * i + 1 < batch) put(last_halves(sums[i][q], sums[i][q + 1]), b + 2 * i + 1);
        }
}

// Rows [begin, end) of the product with `batch` rows.
static void multiply_pairs(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to) {
    const int64_t steps = round_up(stored_bytes(m), VECTOR) / HALF, pairs = ceil_div(batch, 2);
    const vi* inputs = paired_inputs(m, steps, x, batch);
    vi* weights = (vi*)scratch<PRODUCT_DECODED>(steps * PAIRS * W);
    for (int64_t row = begin; row < end; row += 2 * PAIRS) {
        const int64_t count = least(2 * PAIRS, end - row);
        make_pairs(m, row, count, weights);
        for (int64_t p = 0; p < pairs; p += INPUT_PAIRS)
            by_count<INPUT_PAIRS>(least(INPUT_PAIRS, pairs - p), MK_BODY(auto used) {
                pair_block<decltype(used)::value>(m, weights, inputs + p * steps, steps, row, count, x, 2 * p, batch, to);
            });
    }
}

}  // namespace MK_ISA
#endif
