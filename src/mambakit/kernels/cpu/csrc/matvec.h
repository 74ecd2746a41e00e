// Products of a weight matrix with a few rows, at the speed of reading the weights: y[b][n] = sum_k weight[n][k] x[b][k].
//
// R rows of the matrix meet B rows of x at a time. Each result has two accumulators, filled by turns in the order of k (one
// in NF4), so it does not depend on the batch, on its place in the matrix or on the number of threads. One or two rows of x
// meet four rows that are a quarter of the matrix apart: memory is read fastest from a few places at once.
#pragma once

#include "amx_product.h"
#include "border.h"
#include "lane_sums.h"
#include "panel_product.h"
#include "results.h"
#include "rows.h"
#include "threads.h"
#include "weights.h"

namespace MK_ISA {

// Rows of x that go through the matrix together: as many as there are registers for.
constexpr int ROWS_TOGETHER = W == 16 ? 6 : 2;
struct Inputs {
    const float* row[ROWS_TOGETHER];
};

// Asks for memory in its own order, in which it is fastest: `lines` cache lines for each R that are multiplied.
struct Ahead {
    const void* from;
    int64_t byte, lines;
    MK_INSIDE void ask() {
        for (int64_t i = 0; i < lines; i++) prefetch(from, byte + 64 * i);
        byte += 64 * lines;
    }
};

template <int R, int B>
struct Sums {
    vf of[R][B];
};

template <int R, int B, class GetWeights>
MK_INLINE void add_products(Sums<R, B>& sums, vf (&x)[B], const GetWeights& weights) {
    for (int r = 0; r < R; r++) {
        const vf w = weights(r);
        for (int b = 0; b < B; b++) sums.of[r][b] += w * x[b];
    }
}

// Rows row, row + step and so on.
template <class Weights, int R, int B>
MK_INLINE void dot_rows(const Matrix& m, int64_t row, int64_t step, const Inputs& x, Ahead& ahead, Sums<R, B>& sums) {
    constexpr int64_t LINE = 64 / Weights::BYTES;
    const int64_t k = m.columns, pitch = step * k * Weights::BYTES;
    const char* at = (const char*)m.weight + row * k * Weights::BYTES;
    const bool closest = mk_asks_closest;
    Sums<R, B> odd = {};
    vf part[B];
    int64_t i = 0;
    // Two lines, so that the compiler knows which accumulator is whose.
    for (; i + 2 * LINE <= k; i += 2 * LINE) {
#pragma GCC unroll 2
        for (int64_t line = 0; line < 2; line++) {
            ahead.ask();
            if (!ahead.lines)
                for (int r = 0; r < R; r++)
                    prefetch_soon(closest, at + r * pitch + (i + line * LINE) * Weights::BYTES, SOON_OF_EACH);
        }
#pragma GCC unroll 32
        for (int64_t j = 0; j < 2 * LINE; j += W) {
            // Of many rows loaded once: compilers would read x again for every row of the matrix.
            for (int b = 0; b < B; b++) part[b] = B < 5 ? load(x.row[b] + i + j) : done(load(x.row[b] + i + j));
            auto weights = MK_BODY(int r) { return Weights::get(at + r * pitch + (i + j) * Weights::BYTES); };
            if (j / W % 2) add_products(odd, part, weights);
            else add_products(sums, part, weights);
        }
    }
    for (int64_t j = 0; i < k; i += W, j++) {
        for (int b = 0; b < B; b++) part[b] = load_part(x.row[b] + i, k - i);
        auto weights = MK_BODY(int r) {
            const char* own = at + r * pitch + i * Weights::BYTES;
            return i + W <= k ? Weights::get(own) : get_part<Weights>(own, k - i);
        };
        if (j % 2) add_products(odd, part, weights);
        else add_products(sums, part, weights);
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) sums.of[r][b] += odd.of[r][b];
}

struct Nf4Weights {};

// One group of R rows; HALF is the number of its bytes where the compiler is to know it, or 0.
template <int R, int B, int HALF>
MK_INLINE void dot_group_nf4(
    const uint8_t* at, int64_t pitch, int64_t bytes, const float* scales, int64_t groups, const Inputs& x, int64_t first,
    Sums<R, B>& sums) {
    const int64_t half = HALF ? HALF : bytes;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const Nf4Table table = Nf4Table::of(scales[r * groups]);
#pragma GCC unroll 4
        for (int64_t j = 0; j < half; j += W) {
            const auto codes = Nf4Table::codes(at + r * pitch + j);
            const vf low = table.low(codes), high = table.high(codes);
            const int64_t i = first + j;
            for (int b = 0; b < B; b++) sums.of[r][b] += low * load(x.row[b] + i);
            for (int b = 0; b < B; b++) sums.of[r][b] += high * load(x.row[b] + i + half);
        }
    }
}

template <int R, int B>
MK_INLINE void dot_rows_nf4(const Matrix& m, int64_t row, const Inputs& x, Ahead& ahead, Sums<R, B>& sums) {
    const int64_t half = m.group / 2, groups = ceil_div(m.columns, m.group), pitch = groups * half;
    const uint8_t* at = (const uint8_t*)m.weight + row * pitch;
    float* scales = scratch<PRODUCT_SCALES>(R * groups);
    widen((const uint16_t*)m.scales + row * groups, scales, R * groups);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t byte = g * half;
        if (half >= 64 || byte % 64 == 0) ahead.ask();
        if (half == 16) dot_group_nf4<R, B, 16>(at + byte, pitch, half, scales + g, groups, x, g * m.group, sums);
        else dot_group_nf4<R, B, 0>(at + byte, pitch, half, scales + g, groups, x, g * m.group, sums);
    }
}

template <class Weights, int R, int B>
MK_INLINE void multiply_block(const Matrix& m, int64_t row, const Inputs& x, Ahead& ahead, const Results& to) {
    Sums<R, B> sums = {};
    if constexpr (__is_same(Weights, Nf4Weights)) dot_rows_nf4<R, B>(m, row, x, ahead, sums);
    else dot_rows<Weights, R, B>(m, row, 1, x, ahead, sums);
    // Four at a time: one by one they took a tenth of the time of 64 rows.
    vf4 totals[ceil_div(R * B, FOUR)];
#pragma GCC unroll 8
    for (int n = 0; n < R * B; n += FOUR) {
        vf own[FOUR] = {};
#pragma GCC unroll 4
        for (int q = 0; q < FOUR; q++)
            if (n + q < R * B) own[q] = sums.of[(n + q) / B][(n + q) % B];
        totals[n / FOUR] = sums_of_four(own);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const float scale = m.format == INT8 ? ((const float*)m.scales)[row + r] : 1.0f;
        const float bias = m.bias ? m.bias[row + r] : 0.0f;
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) {
            float* y = to.y + b * to.stride + row + r;
            // Rounded one by one: compilers join steps of one batch and not of another.
            const float value = done((done(totals[(r * B + b) / FOUR][(r * B + b) % FOUR] * scale) + bias) * to.scale);
            *y = to.add ? *y + value : value;
        }
    }
}

// FOUR rows of a matrix without scales, `step` apart.
template <class Weights, int B>
MK_INLINE void multiply_apart(const Matrix& m, int64_t row, int64_t step, const Inputs& x, Ahead& ahead, const Results& to) {
    Sums<FOUR, B> sums = {};
    dot_rows<Weights, FOUR, B>(m, row, step, x, ahead, sums);
    vf4 bias = {};
    for (int r = 0; r < FOUR; r++) bias[r] = m.bias ? m.bias[row + r * step] : 0.0f;
    for (int b = 0; b < B; b++) {
        float* y = to.y + b * to.stride + row;
        const vf own[FOUR] = {sums.of[0][b], sums.of[1][b], sums.of[2][b], sums.of[3][b]};
        // As multiply_block rounds.
        const vf4 values = done((done(sums_of_four(own)) + bias) * to.scale);
        for (int r = 0; r < FOUR; r++) y[r * step] = to.add ? y[r * step] + values[r] : values[r];
    }
}

// Rows [begin, end); `ahead.lines` is how many passes share the asking. Rows APART ask for themselves.
template <class Weights, int R, int B, bool APART>
static __attribute__((noinline)) void multiply_rows(
    const Matrix& m, int64_t begin, int64_t end, const Inputs& x, Ahead ahead, const Results& to) {
    ahead.lines = APART ? 0 : ceil_div(R, ahead.lines);
    int64_t row = begin;
    if constexpr (APART) {
        const int64_t quarter = (end - begin) / FOUR;
        for (; row < begin + quarter; row++) multiply_apart<Weights, B>(m, row, quarter, x, ahead, to);
        row = begin + FOUR * quarter;
    }
    for (; row + R <= end; row += R) multiply_block<Weights, R, B>(m, row, x, ahead, to);
    for (; row < end; row++) multiply_block<Weights, 1, B>(m, row, x, ahead, to);
}

// More rows of x take several passes over pieces that stay in the cache, as many in one pass as in another, each asking for
// its part of the next piece: all rows at once would leave no room for x in the cache closest by.
template <class Weights>
static void multiply_all(
    const Matrix& m, int64_t begin, int64_t end, const float* x, int64_t x_stride, int64_t batch, const Results& to) {
    // Formats that take long to decode share what they load of x.
    constexpr int ALONE = __is_same(Weights, Float32Weights) || __is_same(Weights, Bfloat16Weights) ? 1 : 4;
    // Six long rows fill the cache closest by, which with many of them costs more than reading the weights more often.
    const int64_t most = ROWS_TOGETHER == 6 && batch >= 48 && 6 * m.columns > 8192 ? 4 : ROWS_TOGETHER;
    const int64_t passes = ceil_div(batch, most), piece = passes == 1 ? end - begin : 16, pitch = bytes_per_row(m);
    for (int64_t row = begin; row < end; row += piece) {
        const int64_t stop = least(row + piece, end);
        int64_t first = 0;
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t count = batch / passes + (pass < batch % passes);
            Inputs inputs;
            for (int64_t b = 0; b < count; b++) inputs.row[b] = x + (first + b) * x_stride;
            const int64_t next = passes == 1 ? AHEAD : piece * pitch + pass * piece * pitch / passes;
            const Ahead ahead = {m.weight, row * pitch + next, passes};
            const Results part = {to.y + first * to.stride, to.stride, to.add, to.scale};
            first += count;
            by_count<ROWS_TOGETHER>(count, MK_BODY(auto known) {
                constexpr int B = decltype(known)::value, R = B == 1 ? ALONE : B == 2 && W == 16 ? 4 : 2;
                constexpr bool APART = B <= 2 && ALONE == 1;
                if (passes == 1) multiply_rows<Weights, APART ? 1 : R, B, APART>(m, row, stop, inputs, ahead, part);
                else multiply_rows<Weights, R, B, false>(m, row, stop, inputs, ahead, part);
            });
        }
    }
}

// Rows [begin, end) of the product. The rows of x have stored_columns(m) floats, zero beyond m.columns.
static void multiply(
    const Matrix& m, int64_t begin, int64_t end, const float* x, int64_t x_stride, int64_t batch, const Results& to) {
    if (begin >= end) return;
    if (is_narrow(m)) {
        char* rows = room_for_rows<PRODUCT_NARROW>(m, batch);
        round_rows(m, x, x_stride, 0, batch, rows);
        return multiply_many(m, begin, end, (const NarrowRow*)rows, batch, to, false);
    }
    if (m.format == FLOAT32) multiply_all<Float32Weights>(m, begin, end, x, x_stride, batch, to);
    if (m.format == BFLOAT16) multiply_all<Bfloat16Weights>(m, begin, end, x, x_stride, batch, to);
    if (m.format == INT8) multiply_all<Int8Weights>(m, begin, end, x, x_stride, batch, to);
    if (m.format == NF4) multiply_all<Nf4Weights>(m, begin, end, x, x_stride, batch, to);
}

// make(row, y) for all rows into this thread's memory, as an input of `m`: zeros follow up to its stored columns.
template <class Make>
static const float* make_rows(const Matrix& m, int64_t batch, const Make& make) {
    const int64_t wide = stored_columns(m);
    float* rows = scratch<PRODUCT_ROWS>(batch * wide);
    for (int64_t row = 0; row < batch; row++) {
        make(row, rows + row * wide);
        clear(rows + row * wide + m.columns, wide - m.columns);
    }
    return rows;
}

// x with zeros up to the stored columns.
static const float* filled_up(const Matrix& m, const float* x, int64_t batch) {
    if (stored_columns(m) == m.columns) return x;
    return make_rows(m, batch, [&](int64_t row, float* to) { copy(x + row * m.columns, m.columns, to); });
}

// Below this many bytes a second thread costs more than it saves; fewer where it waits for work already.
static inline int64_t worth_a_thread() { return Crew::led() ? 1 << 15 : 1 << 17; }

// body(begin, end) over n things that all rows of `m` belong to, in one thread if it is small.
template <class Body>
static void over_rows(const Matrix& m, int64_t n, const Body& body) {
    if (m.rows * bytes_per_row(m) < worth_a_thread()) body(int64_t(0), n);
    else parallel(n, body);
}
template <class Body>
static void over_rows(const Matrix& m, const Body& body) {
    over_rows(m, m.rows, body);
}

struct Matvec {
    MK_FIELDS(Matvec,
        Matrix matrix;
        int64_t batch;
        const float* x;  // [batch, columns]
        float* y;        // [batch, rows]
    )
};

// Rows of x are rounded once for all threads.
static void matvec_narrow(const Matvec& call) {
    const Matrix& m = call.matrix;
    char* rows = room_for_rows<PRODUCT_SHARED>(m, call.batch);
    auto round = [&](int64_t begin, int64_t end) { round_rows(m, call.x, m.columns, begin, end, rows); };
    if (call.batch * m.columns * (int64_t)sizeof(float) < worth_a_thread()) round(0, call.batch);
    else parallel(call.batch, round);
    over_rows(m, [&](int64_t begin, int64_t end) {
        multiply_many(m, begin, end, (const NarrowRow*)rows, call.batch, {call.y, m.rows, false}, true);
    });
}

static void matvec(const Matvec& call) {
    const Matrix& m = call.matrix;
    if (is_narrow(m)) return matvec_narrow(call);
    over_rows(m, [&](int64_t begin, int64_t end) {
        multiply(m, begin, end, filled_up(m, call.x, call.batch), stored_columns(m), call.batch, {call.y, m.rows, false});
    });
}

struct ReadMemory {
    MK_FIELDS(ReadMemory,
        const float* data;
        int64_t floats;
        float* result;
    )
};

// The speed of memory, for benchmarks: every line once, from as many places and asked for as far ahead as in the products.
static void read_memory(const ReadMemory& call) {
    parallel(call.floats / (FOUR * 16), [&](int64_t begin, int64_t end) {
        const bool closest = mk_asks_closest;
        const int64_t apart = (end - begin) * 16;
        vf sums[FOUR] = {};
        for (int64_t line = 0; line < end - begin; line++)
            for (int64_t place = 0; place < FOUR; place++) {
                const float* at = call.data + FOUR * 16 * begin + place * apart + line * 16;
                prefetch_soon(closest, at, SOON_OF_EACH);
                for (int64_t i = 0; i < 16; i += W) sums[place] += load(at + i);
            }
        const float value = sum(sums[0] + sums[1] + sums[2] + sums[3]);
        __atomic_store_n((int32_t*)call.result, (int32_t)value, __ATOMIC_RELAXED);
    });
}

}  // namespace MK_ISA
