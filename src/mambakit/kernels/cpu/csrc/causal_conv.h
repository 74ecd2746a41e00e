// Short depthwise causal convolution, with bias, SiLU, a carried window and packed sequences.
//
//     a_t = bias + sum_q weight[q] x_{t-(k-1)+q}        y_t = a_t or silu(a_t)
#pragma once

#include "bfloat16.h"
#include "border.h"
#include "rows.h"
#include "threads.h"

namespace MK_ISA {

struct Conv {
    MK_FIELDS(Conv,
        int64_t batch, length, width, taps;
        const void* x;
        int64_t x_batch, x_token;   // strides
        const float* weight;        // [width, taps]
        const float* bias;          // or null
        const void* window;         // [batch, width, taps], or null: zeros
        int64_t window_batch;
        const int64_t* segments;    // [batch, length], or null
        const int64_t* lengths;     // [batch], or null: all of the row
        bool with_silu;
        bool narrow;                // x, y, the windows and their gradients are bfloat16
    )
};

struct ConvForward {
    MK_FIELDS(ConvForward,
        Conv inputs;
        void* y;
        int64_t y_batch, y_token;
        void* after;  // the leaving window
        int64_t after_batch;
    )
};

struct ConvBackward {
    MK_FIELDS(ConvBackward,
        Conv inputs;
        const void* d_y;
        int64_t d_y_batch, d_y_token;
        const void* d_after;  // of the leaving window, [batch, width, taps], or null
        int64_t after_batch;
        void* d_x;
        int64_t d_x_batch, d_x_token;
        float *d_weight, *d_bias;  // [width, taps], [width] or null
        void* d_window;            // or null
        int64_t d_window_batch;
    )
};

constexpr int64_t CONV_BLOCK = 64;     // tokens that follow each other in one task
constexpr int64_t CONV_CHANNELS = 512; // whose rows stay in the first cache

// What the tokens of one row of the batch read: its inputs, the window before them, zeros where neither counts.
template <class Number>
struct ConvRow {
    const Conv* conv;
    int64_t row;
    const Number* window_rows;  // [taps, width], null: zeros
    const Number* zeros;

    // No length is trusted: there is other memory beyond the row.
    int64_t end() const {
        if (!conv->lengths) return conv->length;
        const int64_t end = conv->lengths[row];
        return end < 0 ? 0 : least(end, conv->length);
    }
    int64_t segment(int64_t t) const { return conv->segments[row * conv->length + (t < 0 ? 0 : t)]; }
    bool together(int64_t p, int64_t t) const {
        return !conv->segments || conv->length == 0 || segment(p) == segment(t);
    }
    // The input at position p as token t sees it. The window belongs to the first token's segment.
    const Number* seen(int64_t p, int64_t t) const {
        if (!together(p, t)) return zeros;
        if (p >= 0) return (const Number*)conv->x + row * conv->x_batch + p * conv->x_token;
        return window_rows ? window_rows + (conv->taps + p) * conv->width : zeros;
    }
};

template <class Number>
static void transpose(const Number* from, int64_t rows, int64_t columns, Number* to) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) to[j * rows + i] = from[i * columns + j];
}

// The row as tokens from `first` on need it.
template <class Number>
static ConvRow<Number> conv_row(const Conv& conv, int64_t row, int64_t first, const float* zeros, Number* window_rows) {
    ConvRow<Number> made = {&conv, row, nullptr, (const Number*)zeros};
    if (conv.window && first < conv.taps) {
        transpose((const Number*)conv.window + row * conv.window_batch, conv.width, conv.taps, window_rows);
        made.window_rows = window_rows;
    }
    return made;
}

static float* zero_row(float* row, int64_t width) {
    clear(row, width);
    return row;
}

// K, where it is not 0, is the number of taps: known to the compiler, it unrolls the sums.
//
// a_t for `lanes` channels from c on.
template <int K, class Number>
MK_INLINE vf conv_sum(const Conv& conv, const float* taps_kv, const Number* const* seen, int64_t c, int64_t lanes) {
    const int64_t k = K ? K : conv.taps;
    vf a = conv.bias ? load_part(conv.bias + c, lanes) : splat(0.0f);
    for (int64_t q = 0; q < k; q++)
        a += load_part(seen[q] + c, lanes) * load_part(taps_kv + q * conv.width + c, lanes);
    return a;
}

template <class Number>
static void see(const ConvRow<Number>& row, int64_t t, const Number** seen) {
    int64_t k = row.conv->taps;
    for (int64_t q = 0; q < k; q++) seen[q] = row.seen(t - (k - 1) + q, t);
}

// The last inputs of the row, [width, taps], as its last token sees them.
template <class Number>
static void last_inputs(const ConvRow<Number>& row, Number* window) {
    int64_t k = row.conv->taps, end = row.end();
    for (int64_t q = 0; q < k; q++) {
        const Number* from = row.seen(end - k + q, end - 1);
        for (int64_t c = 0; c < row.conv->width; c++) window[c * k + q] = from[c];
    }
}

static int64_t conv_blocks(const Conv& conv) {
    return conv.length ? ceil_div(conv.length, CONV_BLOCK) : 1;
}

template <int K, class Number>
static void conv_token(const Conv& conv, const float* taps_kv, const Number* const* seen, Number* y) {
    each_vector(conv.width, MK_BODY(int64_t c, int64_t lanes) {
        vf a = conv_sum<K>(conv, taps_kv, seen, c, lanes);
        store_part(y + c, conv.with_silu ? vsilu(a) : a, lanes);
    });
}

// Gradients, for a block of channels and the tokens of a block at a time.
template <class Number>
struct ConvGradients : ConvBackward {
    const float* taps_kv;

    // d_a_t of `count` channels from c on, and this token's share in the gradients of weight and bias.
    template <int K>
    void through_silu(const ConvRow<Number>& row, int64_t t, const Number** seen, int64_t c, int64_t count, bool counts,
                      float* d_a, float* d_taps) const {
        const Number* d_out = (const Number*)d_y + row.row * d_y_batch + t * d_y_token;
        const int64_t k = K ? K : inputs.taps, width = inputs.width;
        see(row, t, seen);
        each_vector(count, MK_BODY(int64_t i, int64_t lanes) {
            vf d = load_part(d_out + c + i, lanes);
            if (inputs.with_silu) {
                vf a = conv_sum<K>(inputs, taps_kv, seen, c + i, lanes);
                d *= silu_slope(a, vsigmoid(a));
            }
            store_part(d_a + i, d, lanes);
            if (counts) {
                for (int64_t q = 0; q < k; q++)
                    add_part(d_taps + q * width + c + i, d * load_part(seen[q] + c + i, lanes), lanes);
                add_part(d_taps + k * width + c + i, d, lanes);
            }
        });
    }

    // The gradient of the input at position p: each of the next k outputs has seen it through one tap.
    template <int K, class To>
    void of_input(const ConvRow<Number>& row, int64_t p, const float* ring, const float** d_a, int64_t c, int64_t count,
                  To* d_input) const {
        const int64_t k = K ? K : inputs.taps;
        for (int64_t q = 0; q < k; q++) {
            int64_t t = p + (k - 1) - q;
            bool saw = t >= 0 && t < inputs.length && row.together(p, t);
            d_a[q] = saw ? ring + (t % k) * CONV_CHANNELS : (const float*)row.zeros;
        }
        auto sum_to = MK_BODY(auto* to) {
            each_vector(count, MK_BODY(int64_t i, int64_t lanes) {
                vf d = {};
                for (int64_t q = 0; q < k; q++)
                    d += load_part(d_a[q] + i, lanes) * load_part(taps_kv + q * inputs.width + c + i, lanes);
                store_part(to + i, d, lanes);
            });
        };
        bool left_behind = d_after && p < row.end() && p >= row.end() - k && row.together(p, row.end() - 1);
        if (!left_behind) return sum_to(d_input);
        float sums[CONV_CHANNELS];
        sum_to(sums);
        const Number* from = (const Number*)d_after + row.row * after_batch + p - (row.end() - k);
        for (int64_t i = 0; i < count; i++) d_input[i] = sums[i] + (float)from[(c + i) * k];
    }

    template <int K>
    void block(const ConvRow<Number>& row, int64_t first, int64_t last, int64_t c, int64_t count, const void** pointers,
               float* ring, float* d_taps) const {
        const int64_t k = K ? K : inputs.taps;
        // Output t completes the gradient of input t - (k - 1). The window lies before the first token.
        for (int64_t t = first ? first : -1; t < last + k - 1; t++) {
            if (t >= 0 && t < inputs.length)
                through_silu<K>(row, t, (const Number**)pointers, c, count, t < last, ring + (t % k) * CONV_CHANNELS, d_taps);
            int64_t p = t - (k - 1);
            if (p >= first) {
                Number* to = (Number*)d_x + row.row * d_x_batch + p * d_x_token + c;
                of_input<K>(row, p, ring, (const float**)pointers, c, count, to);
            } else if (first == 0 && d_window) {
                float column[CONV_CHANNELS];
                of_input<K>(row, p, ring, (const float**)pointers, c, count, column);
                Number* to = (Number*)d_window + row.row * d_window_batch + k + p;
                for (int64_t i = 0; i < count; i++) to[(c + i) * k] = column[i];
            }
        }
    }
};

template <class Number>
static void causal_conv_of(const ConvForward& call) {
    const Conv& conv = call.inputs;
    const int64_t taps = conv.taps, width = conv.width, blocks = conv_blocks(conv);
    float* taps_kv = scratch<CONV_TAPS>((taps + 1) * width);
    transpose(conv.weight, width, taps, taps_kv);
    const float* zeros = zero_row(taps_kv + taps * width, width);
    parallel(conv.batch * blocks, [&](int64_t begin, int64_t end) {
        const Number** seen = (const Number**)scratch<CONV_ROWS>(taps * (width + 2));
        Number* window_rows = (Number*)(seen + taps);
        for (int64_t task = begin; task < end; task++) {
            int64_t first = task % blocks * CONV_BLOCK, last = least(first + CONV_BLOCK, conv.length);
            // Whoever has the last block also leaves the window behind, which may reach back into the entering one.
            bool leaves = task % blocks == blocks - 1;
            ConvRow<Number> row = conv_row(conv, task / blocks, leaves ? 0 : first, zeros, window_rows);
            for (int64_t t = first; t < last; t++) {
                see(row, t, seen);
                Number* out = (Number*)call.y + row.row * call.y_batch + t * call.y_token;
                if (taps == 4) conv_token<4>(conv, taps_kv, seen, out);
                else conv_token<0>(conv, taps_kv, seen, out);
            }
            if (leaves) last_inputs(row, (Number*)call.after + row.row * call.after_batch);
        }
    });
}

template <class Number>
static void causal_conv_backward_of(const ConvBackward& call) {
    const Conv& conv = call.inputs;
    const int64_t taps = conv.taps, width = conv.width, blocks = conv_blocks(conv), parts = (taps + 1) * width;
    const int64_t every = conv.batch * blocks, tasks = count_tasks(every, 1);
    float* taps_kv = scratch<CONV_TAPS>((taps + 1) * width);
    transpose(conv.weight, width, taps, taps_kv);
    const float* zeros = zero_row(taps_kv + taps * width, width);
    float* d_taps = scratch<TASK_SUMS>((tasks + 1) * parts);
    clear(d_taps, tasks * parts);
    const ConvGradients<Number> back = {call, taps_kv};
    parallel(tasks, [&](int64_t begin, int64_t end) {
        const void** pointers = (const void**)scratch<CONV_ROWS>(taps * (width + CONV_CHANNELS + 2));
        float* ring = (float*)(pointers + taps);
        Number* window_rows = (Number*)(ring + taps * CONV_CHANNELS);
        for (int64_t task = begin; task < end; task++)
            for (int64_t block = begin_of(task, tasks, every); block < begin_of(task + 1, tasks, every); block++) {
                int64_t first = block % blocks * CONV_BLOCK, last = least(first + CONV_BLOCK, conv.length);
                ConvRow<Number> row = conv_row(conv, block / blocks, first, zeros, window_rows);
                for (int64_t c = 0; c < width; c += CONV_CHANNELS) {
                    int64_t count = least(CONV_CHANNELS, width - c);
                    float* sums = d_taps + task * parts;
                    if (taps == 4) back.template block<4>(row, first, last, c, count, pointers, ring, sums);
                    else back.template block<0>(row, first, last, c, count, pointers, ring, sums);
                }
            }
    });
    float* total = d_taps + tasks * parts;
    add_tasks(d_taps, tasks, parts, total);
    transpose(total, taps, width, call.d_weight);
    if (call.d_bias) copy(total + taps * width, width, call.d_bias);
}

static void causal_conv(const ConvForward& call) {
    with_numbers(call.inputs.narrow, [&](auto number) { causal_conv_of<decltype(number)>(call); });
}
static void causal_conv_backward(const ConvBackward& call) {
    with_numbers(call.inputs.narrow, [&](auto number) { causal_conv_backward_of<decltype(number)>(call); });
}

}  // namespace MK_ISA
