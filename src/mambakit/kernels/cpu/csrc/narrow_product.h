// Products of narrow weights with narrow rows, for one row as for thousands: y[b][n] = sum_k weight[n][k] x[b][k].
//
// FOUR rows of the matrix meet up to AT_ONCE rows of x at a time, as many in one pass as in another. Where few rows of x meet
// them, the four are a quarter of the matrix apart: memory is read fastest from a few places at once. Sums of integers are
// exact, and others have two accumulators, of even and odd lines, each filled in the order of k, so a result does not depend
// on the batch, on its place in the matrix or on the number of threads.
#pragma once

#include "extension.h"
#include "lane_sums.h"
#include "narrow.h"
#include "results.h"
#include "threads.h"

namespace MK_ISA {

constexpr int AT_ONCE = W == 16 ? 6 : 2;
// Rows of the matrix that stay in the cache closest by, and rows of x in the next one, while they meet.
constexpr int64_t NEAR_ROWS = 16, NEAR_INPUTS = 256;

// Weights of FOUR rows as a Dot takes them: a vector, `part` bytes from the beginning of a line, which is one of a pair or
// stands alone, and is whole or has some bytes. Up to FEW rows of x meet rows that are a quarter of the matrix apart.
//
// int8 or bfloat16, as they lie.
struct NarrowWeights {
    static constexpr int FEW = W == 16 ? 3 : 1;
    const char* row[FOUR];
    template <class Dot>
    MK_INSIDE vi get(int r, int64_t pair, int64_t odd, int64_t part) const {
        return get_alone<Dot>(r, 2 * pair + odd, part);
    }
    template <class Dot>
    MK_INSIDE vi get_alone(int r, int64_t line, int64_t part) const {
        return Dot::weights(load_bytes(row[r] + line * LINE + part));
    }
    template <class Dot>
    MK_INSIDE vi get_some(int r, int64_t line, int64_t part, int64_t n) const {
        return Dot::weights(load_some_bytes(row[r] + line * LINE + part, n));
    }
    // For what two lines are made of, and for what a row of so many bytes has beyond `line`.
    MK_INSIDE void ask(bool closest, int r, int64_t line) const {
        prefetch_soon(closest, row[r] + line * LINE, SOON_OF_EACH);
        prefetch_soon(closest, row[r] + line * LINE + LINE, SOON_OF_EACH);
    }
    MK_INSIDE void ask_rest(bool closest, int r, int64_t line, int64_t bytes) const {
        for (int64_t at = line * LINE; at < bytes; at += LINE) prefetch_soon(closest, row[r] + at, SOON_OF_EACH);
    }
};

// Codes of groups of 32 inputs, 16 bytes each, and the values that they stand for in their group. A vector is made of the low
// halves of as many bytes, or of the high ones: the order of narrow_place.
struct Int4Weights {
    static constexpr int FEW = 1;
    const uint8_t* row[FOUR];
    int64_t codes;  // bytes of a row before its scales
    template <int OFFSET>
    MK_INSIDE const int8_t* values(int r, int64_t group) const {
        return INT4_VALUES<OFFSET>.of[row[r][codes + group]];
    }
#if MK_WIDTH >= 8
    // Values of two groups, as bytes of a lane each.
    template <int OFFSET>
    MK_INSIDE __m256i two_values(int r, int64_t group) const {
        const __m128i even = _mm_load_si128((const __m128i*)values<OFFSET>(r, group));
        const __m128i odd = _mm_load_si128((const __m128i*)values<OFFSET>(r, group + 1));
        return _mm256_inserti128_si256(_mm256_castsi128_si256(even), odd, 1);
    }
#endif
    template <class Dot>
    MK_INSIDE vi get(int r, int64_t pair, int64_t odd, int64_t part) const {
#if MK_WIDTH == 16
        __m512i index = done(_mm512_loadu_si512(row[r] + 64 * pair));
        if (odd) index = _mm512_srli_epi16(index, 4);
        const __m256i first = two_values<Dot::OFFSET>(r, 4 * pair), last = two_values<Dot::OFFSET>(r, 4 * pair + 2);
        const __m512i table = _mm512_inserti64x4(_mm512_castsi256_si512(first), last, 1);
        return (vi)_mm512_shuffle_epi8(table, _mm512_and_si512(index, _mm512_set1_epi8(15)));
#else
        return get_alone<Dot>(r, 2 * pair + odd, part);
#endif
    }
    template <class Dot>
    MK_INSIDE vi get_alone(int r, int64_t line, int64_t part) const {
#if MK_WIDTH == 16
        const __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(row[r] + 32 * line)));
        const __m512i halves = _mm512_set_epi32(4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0);
        const __m512i index = _mm512_and_si512(_mm512_srlv_epi32(both, halves), _mm512_set1_epi8(15));
        return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i64x4(two_values<Dot::OFFSET>(r, 2 * line)), index);
#elif MK_WIDTH == 8
        __m256i index = _mm256_loadu_si256((const __m256i*)(row[r] + 32 * line));
        if (part) index = _mm256_srli_epi16(index, 4);
        const __m256i table = two_values<Dot::OFFSET>(r, 2 * line);
        return (vi)_mm256_shuffle_epi8(table, _mm256_and_si256(index, _mm256_set1_epi8(15)));
#else
        const int64_t quarter = part / 16, shift = quarter < 2 ? 0 : 4;
        const uint8_t* at = row[r] + 32 * line + 16 * (quarter % 2);
        const int8_t* of = values<Dot::OFFSET>(r, 2 * line + quarter % 2);
        int8_t found[VECTOR];
        for (int64_t i = 0; i < VECTOR; i++) found[i] = of[at[i] >> shift & 15];
        return load_bytes(found);
#endif
    }
    template <class Dot>
    MK_INSIDE vi get_some(int r, int64_t line, int64_t part, int64_t) const {
        return get_alone<Dot>(r, line, part);
    }
    // As they are, from a byte on.
    MK_INSIDE vi get(int r, int64_t byte) const {
        const int64_t line = byte / LINE, part = byte % LINE;
        if (64 * (line / 2) + 32 >= codes) return get_alone<Int8Dot>(r, line, part);
        return line % 2 ? get<Int8Dot>(r, line / 2, 1, part) : get<Int8Dot>(r, line / 2, 0, part);
    }
    MK_INSIDE void ask(bool closest, int r, int64_t line) const { prefetch_soon(closest, row[r] + 32 * line, SOON_OF_CODES); }
    MK_INSIDE void ask_rest(bool closest, int r, int64_t line, int64_t bytes) const {
        for (int64_t at = 32 * line; at < codes + bytes / 32; at += LINE) prefetch_soon(closest, row[r] + at, SOON_OF_CODES);
    }
};

// Results of four rows of the matrix with one row of x or, side by side, with several: of integers times scales, or as
// they are. The same steps for all, so that they round alike.
template <class Sums, class Values>
MK_INLINE Values scaled(Sums sums, Sums totals, Values x_scales, Values scales) {
    if constexpr (__is_same(Sums, Values)) return sums;
    else return done(__builtin_convertvector(sums - totals, Values) * x_scales * scales);
}
template <class Values>
MK_INLINE Values placed(Values values, const Matrix& m, Values bias, const Results& to, Values old) {
    if (m.bias) values = done(values + bias);
    values = done(values * to.scale);
    return to.add ? values + old : values;
}

// Of one row of x, rows row, row + step and so on, `count` of them.
template <class Sums>
MK_INLINE void put(Sums sums, const Matrix& m, int64_t row, int64_t step, int64_t count, const NarrowRow& x, int32_t offset,
                   const Results& to, int64_t b) {
    float* y = to.y + b * to.stride + row;
    const bool four = step == 1 && count == FOUR;
    auto get = MK_BODY(const float* from) {
        vf4 found;
        if (four) memcpy(&found, from, sizeof found);
        else found = vf4{from[0], from[(count > 1) * step], from[(count > 2) * 2 * step], from[(count > 3) * 3 * step]};
        return found;
    };
    vf4 scales = {}, bias = {}, old = {};
    if (m.scales) scales = get((const float*)m.scales + row);
    if (m.bias) bias = get(m.bias + row);
    if (to.add) old = get(y);
    Sums totals = {};
    if constexpr (!__is_same(Sums, vf4)) totals += offset * x.total;
    const vf4 values = placed(scaled(sums, totals, vf4{} + x.scale, scales), m, bias, to, old);
    if (four) memcpy(y, &values, sizeof values);
    else
        for (int64_t r = 0; r < FOUR; r++)
            if (r < count) y[r * step] = values[r];
}

#if MK_WIDTH == 16
// The first four rows of x, each with four of the matrix, at once.
template <class Sum, int B>
MK_INLINE Sum four_sums(const Sum (&x)[B][FOUR]) {
    const Sum a = partial_sums(x[0]), b = partial_sums(x[1]), c = partial_sums(x[2]), d = partial_sums(x[3]);
    const Sum ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const Sum cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
MK_INLINE vf four_times(const float* from) { return (vf)_mm512_broadcast_f32x4(_mm_loadu_ps(from)); }
template <class Number>
MK_INLINE auto each_four_times(Number a, Number b, Number c, Number d) {
    typedef Number Vector __attribute__((vector_size(64)));
    return Vector{a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d};
}
template <class Sum, int B>
MK_INLINE void put_four(const Sum (&sums)[B][FOUR], const Matrix& m, int64_t row, const NarrowRow* const* x,
                        int32_t offset, const Results& to) {
    vf scales = {}, x_scales = {}, bias = {}, old = {};
    Sum totals = {};
    if constexpr (!__is_same(Sum, vf)) {
        scales = four_times((const float*)m.scales + row);
        x_scales = each_four_times(x[0]->scale, x[1]->scale, x[2]->scale, x[3]->scale);
        totals = offset * each_four_times(x[0]->total, x[1]->total, x[2]->total, x[3]->total);
    }
    if (m.bias) bias = four_times(m.bias + row);
    float* y = to.y + row;
    if (to.add)
        for (int b = 0; b < 4; b++) memcpy((float*)&old + 4 * b, y + b * to.stride, 16);
    const vf values = placed(scaled(four_sums(sums), totals, x_scales, scales), m, bias, to, old);
    const __m512 all = (__m512)values;
    _mm_storeu_ps(y, _mm512_castps512_ps128(all));
    _mm_storeu_ps(y + to.stride, _mm512_extractf32x4_ps(all, 1));
    _mm_storeu_ps(y + 2 * to.stride, _mm512_extractf32x4_ps(all, 2));
    _mm_storeu_ps(y + 3 * to.stride, _mm512_extractf32x4_ps(all, 3));
}
#endif

// Rows row, row + step and so on, `count` of them, with a few rows of x.
template <class Dot, int B, class Weights>
MK_INLINE void narrow_few(
    const Matrix& m, const Weights& w, int64_t row, int64_t step, int64_t count, const NarrowRow* const* x,
    const Results& to) {
    typedef typename Dot::Sum Sums[B][FOUR];
    const int64_t bytes = stored_bytes(m), pairs = bytes / (2 * LINE);
    const bool closest = mk_asks_closest;
    Sums even = {}, odd = {};
    auto meet = MK_BODY(Sums & sums, int64_t at, auto get) {
        vi weights[FOUR];
        for (int r = 0; r < FOUR; r++) weights[r] = get(r);
        for (int b = 0; b < B; b++) {
            const vi values = load_bytes(x[b]->data + at);
            for (int r = 0; r < FOUR; r++) sums[b][r] = Dot::add(sums[b][r], weights[r], values);
        }
    };
    auto meet_one_of = MK_BODY(Sums & sums, int64_t pair, int64_t odd) {
#pragma GCC unroll 4
        for (int64_t part = 0; part < LINE; part += VECTOR)
            meet(sums, (2 * pair + odd) * LINE + part, MK_BODY(int r) { return w.template get<Dot>(r, pair, odd, part); });
    };
    auto meet_rest = MK_BODY(Sums & sums, int64_t line) {
        const int64_t rest = least(bytes - line * LINE, LINE);
        int64_t part = 0;
        for (; part + VECTOR <= rest; part += VECTOR)
            meet(sums, line * LINE + part, MK_BODY(int r) { return w.template get_alone<Dot>(r, line, part); });
        if (part < rest)
            meet(sums, line * LINE + part, MK_BODY(int r) { return w.template get_some<Dot>(r, line, part, rest - part); });
    };
    // One loop for each way to ask, as short as it can be: the more of them a processor has begun, the more memory is on its way.
    auto meet_pairs = MK_BODY(auto asks_closest) {
        for (int64_t pair = 0; pair < pairs; pair++) {
#pragma GCC unroll 4
            for (int r = 0; r < FOUR; r++) w.ask(decltype(asks_closest)::value, r, 2 * pair);
            meet_one_of(even, pair, 0);
            meet_one_of(odd, pair, 1);
        }
    };
    if (closest) meet_pairs(Count<1>());
    else meet_pairs(Count<0>());
#pragma GCC unroll 4
    for (int r = 0; r < FOUR; r++) w.ask_rest(closest, r, 2 * pairs, bytes);
    if (bytes > 2 * pairs * LINE) meet_rest(even, 2 * pairs);
    if (bytes > (2 * pairs + 1) * LINE) meet_rest(odd, 2 * pairs + 1);
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
        for (int r = 0; r < FOUR; r++) even[b][r] += odd[b][r];
        put(fold(partial_sums(even[b])), m, row, step, count, *x[b], Dot::OFFSET, to, b);
    }
}

// Rows [row, row + count) with B rows of x. `lines` of memory are asked for meanwhile.
template <class Dot, int B, class Weights>
MK_INLINE void narrow_block(
    const Matrix& m, const Weights& w, int64_t row, int64_t count, const NarrowRow* const* x,
    const char* ahead, int64_t lines, const Results& to) {
    typename Dot::Sum sums[B][FOUR] = {};
    const int64_t bytes = stored_bytes(m), steps = ceil_div(bytes, LINE);
    auto meet = MK_BODY(int64_t at, auto get) {
        vi weights[FOUR];
        for (int r = 0; r < FOUR; r++) weights[r] = get(r);
        for (int b = 0; b < B; b++) {
            const vi part = load_bytes(x[b]->data + at);
            for (int r = 0; r < FOUR; r++) sums[b][r] = Dot::add(sums[b][r], weights[r], part);
        }
    };
    int64_t asked = 0;
    auto ask = MK_BODY() {
        for (asked += lines; asked >= steps; asked -= steps, ahead += LINE) prefetch(ahead, 0);
    };
    auto meet_one_of = MK_BODY(int64_t pair, int64_t odd) {
        ask();
#pragma GCC unroll 4
        for (int64_t part = 0; part < LINE; part += VECTOR)
            meet((2 * pair + odd) * LINE + part, MK_BODY(int r) { return w.template get<Dot>(r, pair, odd, part); });
    };
    // What is no whole line, or none of a pair.
    auto meet_rest = MK_BODY(int64_t line) {
        const int64_t rest = least(bytes - line * LINE, LINE);
        int64_t part = 0;
        for (; part + VECTOR <= rest; part += VECTOR)
            meet(line * LINE + part, MK_BODY(int r) { return w.template get_alone<Dot>(r, line, part); });
        if (part < rest)
            meet(line * LINE + part, MK_BODY(int r) { return w.template get_some<Dot>(r, line, part, rest - part); });
    };
    const int64_t pairs = bytes / (2 * LINE);
    if constexpr (__is_same(typename Dot::Sum, vf)) {
        for (int64_t pair = 0; pair < pairs; pair++) meet_one_of(pair, 0);
        meet_rest(2 * pairs);
        typename Dot::Sum even[B][FOUR];
        memcpy(even, sums, sizeof sums);
        for (int b = 0; b < B; b++)
            for (int r = 0; r < FOUR; r++) sums[b][r] = typename Dot::Sum{};
        for (int64_t pair = 0; pair < pairs; pair++) meet_one_of(pair, 1);
        meet_rest(2 * pairs + 1);
        for (int b = 0; b < B; b++)
            for (int r = 0; r < FOUR; r++) sums[b][r] += even[b][r];
    } else {
        for (int64_t pair = 0; pair < pairs; pair++) {
            meet_one_of(pair, 0);
            meet_one_of(pair, 1);
        }
        meet_rest(2 * pairs);
        meet_rest(2 * pairs + 1);
    }
    int first = 0;
#if MK_WIDTH == 16
    if constexpr (B >= 4)
        if (count == FOUR) {
            put_four(sums, m, row, x, Dot::OFFSET, to);
            first = 4;
        }
#endif
    // Unrolled: an index that the compiler does not know would move all sums to memory.
#pragma GCC unroll 6
    for (int b = 0; b < B; b++) {
        if (b < first) continue;
        put(fold(partial_sums(sums[b])), m, row, 1, count, *x[b], Dot::OFFSET, to, b);
    }
}

// Rows [begin, end) with B rows of x, weights of row n at at + (n - begin) * pitch; `passes` share the asking for what
// follows `ahead`.
template <class Dot, class Weights, int B, class At>
static __attribute__((noinline)) void narrow_piece(
    const Matrix& m, int64_t begin, int64_t end, const At& weights_at, const NarrowRow* const* x, const char* ahead,
    int64_t passes, const Results& to) {
    // Rows that are not there repeat the last, and their results are dropped.
    auto weights = [&](int64_t row, int64_t step, int64_t count) {
        Weights w = weights_at.weights;
        for (int r = 0; r < FOUR; r++) w.row[r] += (row - begin + least(r, count - 1) * step) * weights_at.pitch;
        return w;
    };
    if constexpr (B <= Weights::FEW)
        if (B == 1 || passes == 1) {
            const int64_t quarter = (end - begin) / FOUR, rest = (end - begin) % FOUR;
            Weights own = weights(begin, quarter, FOUR);
            for (int64_t row = begin; row < begin + quarter; row++) {
                narrow_few<Dot, B>(m, own, row, quarter, FOUR, x, to);
#pragma GCC unroll 4
                for (int r = 0; r < FOUR; r++) own.row[r] += weights_at.pitch;
            }
            if (rest) narrow_few<Dot, B>(m, weights(end - rest, 1, rest), end - rest, 1, rest, x, to);
            return;
        }
    if constexpr (B > 1) {
        const int64_t four = FOUR * bytes_per_row(m), lines = ceil_div(four, LINE * passes), step = four / passes;
        for (int64_t row = begin; row < end; row += FOUR, ahead += step) {
            const int64_t count = least(FOUR, end - row);
            narrow_block<Dot, B>(m, weights(row, 1, count), row, count, x, ahead, lines, to);
        }
    }
}

// body(Count<n>()), n from 1 to MOST.
template <int MOST, class Body>
MK_INLINE void by_count(int64_t n, const Body& body) {
    if constexpr (MOST > 1)
        if (n < MOST) return by_count<MOST - 1>(n, body);
    body(Count<MOST>());
}

// Weights of a piece of the matrix, all rows of it at the first one's place, and the bytes between them.
template <class Weights>
struct PieceAt {
    Weights weights;
    int64_t pitch;
};

static PieceAt<NarrowWeights> piece_at(const char* at, int64_t pitch) { return {{{at, at, at, at}}, pitch}; }

// Rows [begin, end) of INT4_NARROW as int8, for more rows of x than are decoded for at once.
static PieceAt<NarrowWeights> decoded_piece(const Matrix& m, int64_t begin, int64_t end) {
    const int64_t wide = round_up(m.columns, LINE), pitch = bytes_per_row(m);
    char* decoded = (char*)scratch<PRODUCT_DECODED>(NEAR_ROWS * wide / (int64_t)sizeof(float));
    for (int64_t row = begin; row < end; row++) {
        const uint8_t* at = (const uint8_t*)m.weight + row * pitch;
        const Int4Weights w = {{at, at, at, at}, wide / 2};
        char* to = decoded + (row - begin) * wide;
        for (int64_t pair = 0; pair < wide / (2 * LINE); pair++)
#pragma GCC unroll 8
            for (int64_t byte = 0; byte < 2 * LINE; byte += VECTOR, to += VECTOR) {
                const vi part = w.template get<Int8Dot>(0, pair, byte / LINE, byte % LINE);
                memcpy(to, &part, sizeof part);
            }
        for (int64_t byte = wide / (2 * LINE) * 2 * LINE; byte < wide; byte += VECTOR, to += VECTOR) {
            const vi part = w.get(0, byte);
            memcpy(to, &part, sizeof part);
        }
    }
    return piece_at(decoded, wide);
}

// Rows [begin, end) of the product with `batch` rows.
template <class Dot>
static void multiply_narrow_by(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to) {
    const char* weight = (const char*)m.weight;
    const int64_t pitch = bytes_per_row(m);
    for (int64_t first = 0; first < batch; first += NEAR_INPUTS) {
        const int64_t near = least(batch - first, NEAR_INPUTS), passes = ceil_div(near, AT_ONCE);
        const int64_t piece = passes == 1 ? end - begin : NEAR_ROWS;
        for (int64_t row = begin; row < end; row += piece) {
            const int64_t stop = least(row + piece, end);
            const bool decodes = m.format == INT4_NARROW && passes > 1;
            const PieceAt<NarrowWeights> own = decodes ? decoded_piece(m, row, stop) : piece_at(weight + row * pitch, pitch);
            int64_t start = first;
            for (int64_t pass = 0; pass < passes; pass++) {
                const int64_t used = near / passes + (pass < near % passes), share = pass * NEAR_ROWS * pitch / passes;
                const NarrowRow* rows[AT_ONCE];
                for (int64_t b = 0; b < used; b++) rows[b] = narrow_at(m, x, start + b);
                const char* ahead = weight + row * pitch + (passes == 1 ? AHEAD : NEAR_ROWS * pitch + share);
                const Results part = {to.y + start * to.stride, to.stride, to.add, to.scale};
                start += used;
                by_count<AT_ONCE>(used, MK_BODY(auto count) {
                    constexpr int B = decltype(count)::value;
                    if (m.format != INT4_NARROW || decodes)
                        return narrow_piece<Dot, NarrowWeights, B>(m, row, stop, own, rows, ahead, passes, part);
                    const uint8_t* at = (const uint8_t*)weight + row * pitch;
                    const PieceAt<Int4Weights> coded = {{{at, at, at, at}, round_up(m.columns, LINE) / 2}, pitch};
                    if constexpr (__is_same(typename Dot::Sum, vi))
                        narrow_piece<Dot, Int4Weights, B>(m, row, stop, coded, rows, ahead, passes, part);
                });
            }
        }
    }
}

// body(dot) with the best instructions that may be used.
template <class Body>
MK_INLINE void by_best_dot(const Matrix& m, const Body& body) {
    if (m.format == BFLOAT16_NARROW) {
#if defined(MK_X86) && MK_WIDTH == 16
        if (mk_extension_in_use >= MK_BF16) return body(Bfloat16DotNative());
#elif defined(MK_NEON)
        if (mk_extension_in_use >= MK_BF16) return body(Bfloat16DotNeon());
#endif
        return body(Bfloat16Dot());
    }
#if defined(MK_X86) && MK_WIDTH >= 8
    if (mk_extension_in_use >= MK_VNNI) return body(Int8DotVnni());
#elif defined(MK_NEON)
    if (mk_extension_in_use >= MK_VNNI) return body(Int8DotNeon());
#endif
    body(Int8Dot());
}

static void multiply_narrow(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to) {
    by_best_dot(m, MK_BODY(auto dot) { multiply_narrow_by<decltype(dot)>(m, begin, end, x, batch, to); });
}

// Rows [begin, end) of x, rounded.
static void round_rows(const Matrix& m, const float* x, int64_t x_stride, int64_t begin, int64_t end, char* to) {
    for (int64_t row = begin; row < end; row++)
        round_row(m, x + row * x_stride, (NarrowRow*)(to + row * narrow_pitch(m)));
}

// In memory of this thread.
template <Slot slot>
static char* room_for_rows(const Matrix& m, int64_t batch) {
    return (char*)scratch<slot>(batch * narrow_pitch(m) / (int64_t)sizeof(float));
}

}  // namespace MK_ISA
