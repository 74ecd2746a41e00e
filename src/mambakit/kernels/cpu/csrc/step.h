// What the decoding steps of all families share: the convolution's newest output, and one pass over a head's state.
//
// A step's functions work on one row of the batch and on a range of heads or channels, so that the caller decides about
// threads. Buffers that enter and leave (window, state) may be the same memory.
#pragma once

#include "lane_sums.h"
#include "narrow.h"
#include "rows.h"
#include "threads.h"
#include "vec.h"

namespace MK_ISA {

// Floats between the state that is updated and what is asked for from memory.
constexpr int64_t STATE_AHEAD = 2048;
// Entries of the state below which a step stays in the calling thread.
constexpr int64_t STEP_ALONE = 1 << 15;

// Rows [row, row_end) of a call that are consecutive tokens of one text, after others whose notes are there already:
// those at the places again[note], ..., again[note_end - 1].
struct Run {
    int64_t text, note, note_end, row, row_end;
};

// The rows of a call. What a text carries is small and has a place for each token that may be taken back, or it is large:
// then there is one for each text, and places have notes of what tokens write into it. Null: a row's own number.
struct Rows {
    const int64_t *text = nullptr, *before = nullptr, *after = nullptr;  // places that a row reads and writes
    // Where rows have an order. Of a run, all notes and the first row stay in the text's state, or nothing does.
    const Run* run = nullptr;
    int64_t runs = 0;
    const int64_t* again = nullptr;
    bool stays = true;
    const bool* reset = nullptr;  // rows that start afresh, where no rows have an order

    int64_t text_of(int64_t row) const { return text ? text[row] : row; }
    int64_t read(int64_t row) const { return before ? before[row] : row; }
    int64_t written(int64_t row) const { return after ? after[row] : row; }
    bool resets(int64_t row) const { return reset && reset[row]; }
};

// All rows of a call in their places, those of `reset` afresh.
static Rows afresh(const bool* reset) {
    Rows rows;
    rows.reset = reset;
    return rows;
}

// What rows that start afresh read, where there are any: n zeros, the calling thread's.
static const float* fresh_zeros(const bool* reset, int64_t n) {
    if (!reset) return nullptr;
    float* zeros = scratch<STEP_FRESH>(n);
    clear(zeros, n);
    return zeros;
}

// The newest output of each channel, before its bias.
static void weigh_taps(
    int64_t n, int64_t k, const float* weight, const float* window, const float* x, float* __restrict y) {
    for (int64_t v = 0; v < n; v++) {
        float total = weight[v * k + k - 1] * x[v];
        for (int64_t q = 0; q + 1 < k; q++) total += weight[v * k + q] * window[v * k + q + 1];
        y[v] = total;
    }
}

// Drops each channel's oldest input and appends x. One move shifts all channels: what crosses from one to the next is
// then overwritten by x.
static void shift_window(int64_t n, int64_t k, const float* window_in, float* window_out, const float* x) {
    memmove(window_out, window_in + 1, (n * k - 1) * sizeof(float));
    for (int64_t v = 0; v < n; v++) window_out[v * k + k - 1] = x[v];
}

// Four taps, W channels at once: of a vector of windows, which are W / 4, each drops its oldest input and appends its own
// of the W in x, which are those from `first` on. And what four such vectors times their weights add up to, in order.
#if MK_WIDTH == 16
#define MK_SHIFTED(window, x, first)                                                                                  \
    __builtin_shufflevector(window, x, 1, 2, 3, 16 + first, 5, 6, 7, 17 + first, 9, 10, 11, 18 + first, 13, 14, 15, \
                            19 + first)
#define MK_IN_ORDER(x) __builtin_shufflevector(x, x, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
#elif MK_WIDTH == 8
#define MK_SHIFTED(window, x, first) __builtin_shufflevector(window, x, 1, 2, 3, 8 + first, 5, 6, 7, 9 + first)
#define MK_IN_ORDER(x) __builtin_shufflevector(x, x, 0, 4, 1, 5, 2, 6, 3, 7)
#else
#define MK_SHIFTED(window, x, first) __builtin_shufflevector(window, x, 1, 2, 3, 4 + first)
#define MK_IN_ORDER(x) (x)
#endif
MK_INLINE vf convolve_four_taps(const float* weight, const float* window_in, float* window_out, const float* x) {
    constexpr int CHANNELS = W / 4;
    const vf values = load(x);
    const vf shifted[4] = {MK_SHIFTED(load(window_in), values, 0), MK_SHIFTED(load(window_in + W), values, CHANNELS),
                           MK_SHIFTED(load(window_in + 2 * W), values, 2 * CHANNELS),
                           MK_SHIFTED(load(window_in + 3 * W), values, 3 * CHANNELS)};
    vf products[4];
    for (int q = 0; q < 4; q++) {
        store(window_out + q * W, shifted[q]);
        products[q] = shifted[q] * load(weight + q * W);
    }
    return MK_IN_ORDER(partial_sums(products));
}

// The same of n < W channels: in copies, so that they round alike.
MK_INLINE vf convolve_four_taps(
    const float* weight, const float* window_in, float* window_out, const float* x, int64_t n) {
    if (n == W) return convolve_four_taps(weight, window_in, window_out, x);
    float whole[9 * W] = {};
    copy(weight, 4 * n, whole);
    copy(window_in, 4 * n, whole + 4 * W);
    copy(x, n, whole + 8 * W);
    const vf y = convolve_four_taps(whole, whole + 4 * W, whole + 4 * W, whole + 8 * W);
    copy(whole + 4 * W, 4 * n, window_out);
    return y;
}

// y[n] = silu(causal convolution at the newest token) of the n channels from `first` on, and their part of the window
// [channels][k] after it. `s` has k, conv_weight and conv_bias, which may be null.
template <class Step>
static void convolve_token(
    const Step& s, int64_t first, int64_t n, const float* window_in, float* window_out, const float* x, float* y) {
    if (n <= 0) return;
    const float *weight = s.conv_weight + first * s.k, *window = window_in + first * s.k;
    x += first;
    float* after = window_out + first * s.k;
    if (s.k != 4) {
        weigh_taps(n, s.k, weight, window, x, y);
        shift_window(n, s.k, window, after, x);
    }
    each_vector(n, MK_BODY(int64_t i, int64_t count) {
        vf total = s.k == 4 ? convolve_four_taps(weight + 4 * i, window + 4 * i, after + 4 * i, x + i, count)
                            : load_part(y + i, count);
        if (s.conv_bias) total += load_part(s.conv_bias + first + i, count);
        store_part(y + i, vsilu(total), count);
    });
}

// One head's state [p][r]: out = decay * in + sum_w coef[w][p] write[w][r], and what is read: y[c][p] = out[p] . read[c].
struct StatePass {
    int64_t p, r;
    float decay;
    int64_t writers, readers;
    const float *write, *coef, *read;
    const float* in;
    float *out, *y;
    uint16_t* narrow = nullptr;  // in bfloat16 instead of `in` and `out`, in place
};

// ROWS rows of the state for WRITERS (0: as many as `s` says) and the READERS from `reader` on. Only the first readers
// write.
template <int ROWS, int WRITERS, int READERS, bool WRITES>
MK_INLINE void pass_rows(const StatePass& s, int64_t row, int64_t reader) {
    const int64_t writers = WRITERS ? WRITERS : s.writers;
    const float* in = (WRITES ? s.in : s.out) + row * s.r;
    float* out = s.out + row * s.r;
    vf total[READERS][ROWS] = {};
    each_vector(s.r, MK_BODY(int64_t i, int64_t count) {
        vf state[ROWS];
        if (WRITES)
            for (int q = 0; q < ROWS; q++) prefetch(in, (STATE_AHEAD + q * s.r + i) * (int64_t)sizeof(float));
        for (int q = 0; q < ROWS; q++) state[q] = load_part(in + q * s.r + i, count);
        if (WRITES) {
            for (int q = 0; q < ROWS; q++) state[q] = done(state[q] * splat(s.decay));
            for (int64_t w = 0; w < writers; w++) {
                vf write = load_part(s.write + w * s.r + i, count);
                for (int q = 0; q < ROWS; q++) state[q] += splat(s.coef[w * s.p + row + q]) * write;
            }
            for (int q = 0; q < ROWS; q++) store_part(out + q * s.r + i, state[q], count);
        }
        for (int c = 0; c < READERS; c++) {
            vf read = load_part(s.read + (reader + c) * s.r + i, count);
            for (int q = 0; q < ROWS; q++) total[c][q] += state[q] * read;
        }
    });
    for (int c = 0; c < READERS; c++)
        for (int q = 0; q < ROWS; q++) s.y[(reader + c) * s.p + row + q] = sum(total[c][q]);
}

template <int WRITERS, int READERS, bool WRITES>
static void pass_state(const StatePass& s, int64_t reader) {
    // As many rows at once as there are registers for: they share the loads of what is written and read.
    constexpr int ROWS = READERS == 1 || W == 16 ? 4 : 2;
    int64_t row = 0;
    for (; row + ROWS <= s.p; row += ROWS) pass_rows<ROWS, WRITERS, READERS, WRITES>(s, row, reader);
    for (; row < s.p; row++) pass_rows<1, WRITERS, READERS, WRITES>(s, row, reader);
}

template <bool WRITES>
static void pass_readers(const StatePass& s, int64_t reader, int64_t readers) {
    if (readers == 1) return pass_state<0, 1, WRITES>(s, reader);
    if (readers == 2) return pass_state<0, 2, WRITES>(s, reader);
    if (readers == 3) return pass_state<0, 3, WRITES>(s, reader);
    return pass_state<0, 4, WRITES>(s, reader);
}

// x in bfloat16, up or down by chance, as likely as it is near: where a state decays by less than half a unit in its last
// place, the nearest would be the old one for ever. Chance is a number made of the bits of x and of `seed`, so that the same
// token gives the same.
typedef uint32_t Bits __attribute__((vector_size(4 * MK_WIDTH)));  // whose products may go beyond 32 bits
MK_INLINE vi rounded_by_chance(vf x, Bits seed) {
    const Bits mixed = ((Bits)x ^ seed) * (0x2c1b3c6du - Bits{});
    const Bits up = (Bits)x + (mixed >> 16);
    return x == x ? (vi)(up >> 16) : splat_int(0x7fc0);
}

// ROWS rows of a state in bfloat16, with one writer and one reader; the arithmetic is in float32, and what is read is the
// state before it is rounded.
template <int ROWS>
MK_INLINE void pass_rows_narrow(const StatePass& s, int64_t row) {
    char* state = (char*)(s.narrow + row * s.r);
    vf total[ROWS] = {};
    Bits seed[ROWS];
    for (int q = 0; q < ROWS; q++) {
        uint32_t bits;
        memcpy(&bits, s.coef + row + q, sizeof bits);
        seed[q] = bits * 0x85ebca6bu + (uint32_t)(row + q) - Bits{};
    }
    each_vector(s.r, MK_BODY(int64_t i, int64_t count) {
        const vf write = load_part(s.write + i, count), read = load_part(s.read + i, count);
        const Bits seeds = (Bits)write * 0x9e3779b1u + (uint32_t)i;
        for (int q = 0; q < ROWS; q++) {
            char* at = state + 2 * (q * s.r + i);
            if (i % 32 == 0) prefetch(at, 4 * STATE_AHEAD);
            const vf old = count == W ? Bfloat16Weights::get(at) : get_part<Bfloat16Weights>(at, count);
            vf now = done(old * splat(s.decay));
            now += splat(s.coef[row + q]) * write;
            const vi kept = rounded_by_chance(now, seeds ^ seed[q]);
            if (count == W) store_halves(at, kept);
            else
                for (int64_t lane = 0; lane < count; lane++) {
                    const uint16_t half = (uint16_t)kept[lane];
                    memcpy(at + 2 * lane, &half, sizeof half);
                }
            total[q] += now * read;
        }
    });
    for (int q = 0; q < ROWS; q++) s.y[row + q] = sum(total[q]);
}

static void pass_narrow(const StatePass& s) {
    int64_t row = 0;
    for (; row + 4 <= s.p; row += 4) pass_rows_narrow<4>(s, row);
    for (; row < s.p; row++) pass_rows_narrow<1>(s, row);
}

static void pass_state(const StatePass& s) {
    if (s.narrow) return pass_narrow(s);
    if (s.readers == 1 && s.writers == 1) return pass_state<1, 1, true>(s, 0);
    if (s.readers == 1 && s.writers == 2) return pass_state<2, 1, true>(s, 0);
    pass_readers<true>(s, 0, s.readers);
    for (int64_t reader = 4; reader < s.readers; reader += 4) pass_readers<false>(s, reader, s.readers - reader);
}

// Numbers in the note of what a token writes into one head's state: decay, coef[writers][p], write[writers][r].
static int64_t note_size(int64_t p, int64_t r, int64_t writers) { return 1 + writers * (p + r); }

static void take_note(const StatePass& s, float* note) {
    *note = s.decay;
    copy(s.coef, s.writers * s.p, note + 1);
    copy(s.write, s.writers * s.r, note + 1 + s.writers * s.p);
}

// ROWS rows of the state after the notes noted(0), noted(1), ...: the same operations as when they were taken, so that it is the same to the last
// digit, but the state stays in registers between them.
template <int ROWS, int WRITERS, class Noted>
MK_INLINE void write_rows(const StatePass& s, const Noted& noted, int64_t count, int64_t row) {
    const int64_t writers = WRITERS ? WRITERS : s.writers;
    each_vector(s.r, MK_BODY(int64_t i, int64_t lanes) {
        vf state[ROWS];
        for (int q = 0; q < ROWS; q++) prefetch(s.in, (STATE_AHEAD + (row + q) * s.r + i) * (int64_t)sizeof(float));
        for (int q = 0; q < ROWS; q++) state[q] = load_part(s.in + (row + q) * s.r + i, lanes);
        for (int64_t n = 0; n < count; n++) {
            const float* note = noted(n);
            const float *coef = note + 1 + row, *write = note + 1 + writers * s.p + i;
            for (int q = 0; q < ROWS; q++) state[q] = done(state[q] * splat(*note));
            for (int64_t w = 0; w < writers; w++) {
                const vf written = load_part(write + w * s.r, lanes);
                for (int q = 0; q < ROWS; q++) state[q] += splat(coef[w * s.p + q]) * written;
            }
        }
        for (int q = 0; q < ROWS; q++) store_part(s.out + (row + q) * s.r + i, state[q], lanes);
    });
}

template <int WRITERS, class Noted>
static void write_again(const StatePass& s, const Noted& noted, int64_t count) {
    int64_t row = 0;
    for (; row + 4 <= s.p; row += 4) write_rows<4, WRITERS>(s, noted, count, row);
    for (; row < s.p; row++) write_rows<1, WRITERS>(s, noted, count, row);
}

// The states [texts][heads][p][r] of all runs: notes, then body(row, head, in, out, note) for the rows of each. Every head
// stays in one thread, and between notes and rows in its memory.
template <class Body>
static void step_runs(const Rows& rows, int64_t heads, StatePass of, float* state, float* notes, const Body& body) {
    const int64_t size = of.p * of.r, note = note_size(of.p, of.r, of.writers);
    auto note_of = [&](int64_t place, int64_t head) { return notes + (place * heads + head) * note; };
    auto share = [&](int64_t begin, int64_t end) {
        float* ahead = scratch<STEP_STATE>(size);
        for (int64_t head = begin; head < end; head++)
            for (const Run* run = rows.run; run < rows.run + rows.runs; run++) {
                float* own = state + (run->text * heads + head) * size;
                StatePass pass = of;
                pass.in = own;
                pass.out = rows.stays ? own : ahead;
                if (const int64_t count = run->note_end - run->note) {
                    auto noted = [&](int64_t n) { return note_of(rows.again[run->note + n], head); };
                    if (of.writers == 1) write_again<1>(pass, noted, count);
                    else write_again<0>(pass, noted, count);
                    pass.in = pass.out;
                }
                for (int64_t row = run->row; row < run->row_end; row++) {
                    const bool stays = rows.stays && row == run->row;
                    pass.out = stays ? own : ahead;
                    body(row, head, pass.in, pass.out, stays ? nullptr : note_of(rows.written(row), head));
                    pass.in = pass.out;
                }
            }
    };
    if (rows.runs * heads * size < STEP_ALONE) share(0, heads);
    else parallel(heads, share);
}

// body(row, begin, end) over the units (heads, channels) of all rows. Too little work is not worth waking threads for.
template <class Body>
static void step_parallel(int64_t rows, int64_t units, int64_t unit_size, const Body& body) {
    auto share = [&](int64_t begin, int64_t end) {
        while (begin < end) {
            int64_t row = begin / units, stop = least((row + 1) * units, end);
            body(row, begin - row * units, stop - row * units);
            begin = stop;
        }
    };
    if (rows * units * unit_size < STEP_ALONE) share(0, rows * units);
    else parallel(rows * units, share);
}

MK_INLINE vf clamp(vf x, float low, float high) {
    // Comparisons in this order keep NaN.
    x = choose(x < splat(low), splat(low), x);
    return choose(x > splat(high), splat(high), x);
}

MK_INLINE float softplus_clamped(float x, float low, float high) { return clamp(vsoftplus(splat(x)), low, high)[0]; }

}  // namespace MK_ISA
