// Mamba-1's decoding step in two parts: the projections of step size, B and C stand between them.
#pragma once

#include "border.h"
#include "step.h"

namespace MK_ISA {

struct Mamba1Step {
    MK_FIELDS(Mamba1Step,
        int64_t channels, r;
        int64_t k;                             // taps of the convolution
        const float *conv_weight, *conv_bias;  // [channels][k]; bias [channels] or null
        const float* A_log;                    // [channels][r]
        const float* A;                        // -exp(A_log) where it is prepared, or null
        const float* D;                        // [channels]
    )
};

// First: x[channels] = silu(convolution) for the channels [begin, end). projected is [2][channels]: value and gate.
static void mamba1_step_conv(
    const Mamba1Step& s, const float* projected, const float* window_in, float* window_out, float* x, int64_t begin,
    int64_t end) {
    convolve_token(s, begin, end - begin, window_in, window_out, projected, x + begin);
}

// Channels between those that are computed and those that are asked for from memory.
constexpr int64_t CHANNELS_AHEAD = 48;

// ROWS channels' states from `i` on: h = exp(dt a) h + dt x b, read by c. Those `ahead` channels on are asked for.
template <bool PREPARED, int ROWS>
MK_INLINE void mamba1_step_channels(
    const Mamba1Step& s, const float* dt, const float* dt_x, const float* b, const float* c, const float* in,
    int64_t stride_in, float* out, float* y, int64_t i, int64_t ahead) {
    const float* a = (PREPARED ? s.A : s.A_log) + i * s.r;
    vf total[ROWS] = {};
    each_vector(s.r, MK_BODY(int64_t j, int64_t count) {
        const vf write = load_part(b + j, count), read = load_part(c + j, count);
        for (int q = 0; q < ROWS; q++) {
            const int64_t at = q * s.r + j;
            prefetch(a, (ahead * s.r + at) * (int64_t)sizeof(float));
            prefetch(in, (ahead * s.r + at) * (int64_t)sizeof(float));
            const vf rate = load_part(a + at, count);
            const vf decay = vexp(splat(dt[q]) * (PREPARED ? rate : -vexp(rate)));
            const vf state = load_part(in + q * stride_in + j, count) * decay + splat(dt_x[q]) * write;
            store_part(out + at, state, count);
            total[q] += state * read;
        }
    });
    if constexpr (ROWS == FOUR) {
        const vf4 sums = sums_of_four(total);
        memcpy(y, &sums, sizeof sums);
    } else {
        for (int q = 0; q < ROWS; q++) y[q] = sum(total[q]);
    }
}

template <bool PREPARED>
static void mamba1_step_states(
    const Mamba1Step& s, const float* dt, const float* dt_x, const float* b, const float* c, const float* state_in,
    int64_t stride_in, float* state_out, float* out, int64_t begin, int64_t end) {
    auto step = MK_BODY(auto rows, int64_t i) {
        constexpr int ROWS = decltype(rows)::value;
        // Not beyond the last: another thread writes there.
        const int64_t ahead = least(CHANNELS_AHEAD, end - i - ROWS);
        mamba1_step_channels<PREPARED, ROWS>(s, dt + i - begin, dt_x + i - begin, b, c, state_in + i * stride_in, stride_in,
                                             state_out + i * s.r, out + i, i, ahead);
    };
    int64_t i = begin;
    for (; i + FOUR <= end; i += FOUR) step(Count<FOUR>(), i);
    for (; i < end; i++) step(Count<1>(), i);
}

// Then, for the channels [begin, end): dt[channels] is the step size before softplus, b and c are [r]. A channel's state
// enters `stride_in` after the one before: r, or 0 for one that all share.
static void mamba1_step_scan(
    const Mamba1Step& s, const float* projected, const float* x, const float* dt, const float* b, const float* c,
    const float* state_in, int64_t stride_in, float* state_out, float* out, int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    float* sizes = scratch<STEP_HEAD>(2 * count);
    float* dt_x = sizes + count;
    each_vector(count, [&](int64_t i, int64_t part) {
        vf size = vsoftplus(load_part(dt + begin + i, part));
        store_part(sizes + i, size, part);
        store_part(dt_x + i, size * load_part(x + begin + i, part), part);
    });
    if (s.A) mamba1_step_states<true>(s, sizes, dt_x, b, c, state_in, stride_in, state_out, out, begin, end);
    else mamba1_step_states<false>(s, sizes, dt_x, b, c, state_in, stride_in, state_out, out, begin, end);
    const float* z = projected + s.channels;
    each_vector(count, [&](int64_t i, int64_t part) {
        int64_t at = begin + i;
        vf total = load_part(out + at, part) + load_part(s.D + at, part) * load_part(x + at, part);
        store_part(out + at, total * vsilu(load_part(z + at, part)), part);
    });
}

// Rows are contiguous.
struct Mamba1StepConv {
    MK_FIELDS(Mamba1StepConv,
        Mamba1Step step;
        int64_t batch;
        const float *projected, *window_in;  // [batch][2][channels], [batch][channels][k]
        float *window_out, *x;               // x[batch][channels]
        const bool* reset;                   // [batch]: rows that start afresh, or null
    )
};

static void mamba1_step_conv(const Mamba1StepConv& call) {
    const Mamba1Step& s = call.step;
    const int64_t i = s.channels, window = i * s.k;
    // A few microseconds at most: not worth a second thread.
    const Rows rows = afresh(call.reset);
    const float* zeros = fresh_zeros(call.reset, window);
    for (int64_t row = 0; row < call.batch; row++)
        mamba1_step_conv(s, call.projected + row * 2 * i, rows.resets(row) ? zeros : call.window_in + row * window,
                         call.window_out + row * window, call.x + row * i, 0, i);
}

struct Mamba1StepScan {
    MK_FIELDS(Mamba1StepScan,
        Mamba1Step step;
        int64_t batch, dt_rank;
        const float *projected, *x;
        // dt_b_c[batch][dt_rank + 2 r] is what x_proj returns; its first part went through dt_proj into
        // dt[batch][channels].
        const float *dt, *dt_b_c;
        const float* state_in;  // [batch][channels][r]
        float *state_out, *out;
        const bool* reset;  // [batch]: rows that start afresh, or null
    )
};

static void mamba1_step_scan(const Mamba1StepScan& call) {
    const Mamba1Step& s = call.step;
    const int64_t i = s.channels, blocks = ceil_div(i, W);  // threads share whole vectors
    const Rows rows = afresh(call.reset);
    const float* zeros = fresh_zeros(call.reset, s.r);
    // An entry with its two exponentials costs several of the other families'.
    step_parallel(call.batch, blocks, 3 * W * s.r, [&](int64_t row, int64_t begin, int64_t end) {
        const float* b = call.dt_b_c + row * (call.dt_rank + 2 * s.r) + call.dt_rank;
        const int64_t state = row * i * s.r;
        mamba1_step_scan(s, call.projected + row * 2 * i, call.x + row * i, call.dt + row * i, b, b + s.r,
                         rows.resets(row) ? zeros : call.state_in + state, rows.resets(row) ? 0 : s.r,
                         call.state_out + state, call.out + row * i, begin * W, least(end * W, i));
    });
}

}  // namespace MK_ISA
