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

// One channel's state: h = exp(dt a) h + dt x b, read by c.
template <bool PREPARED>
MK_INLINE float mamba1_step_channel(
    int64_t r, const float* a, float dt, float dt_x, const float* b, const float* c, const float* in, float* out) {
    vf total = {};
    each_vector(r, MK_BODY(int64_t i, int64_t count) {
        vf rate = load_part(a + i, count);
        vf decay = vexp(splat(dt) * (PREPARED ? rate : -vexp(rate)));
        vf state = load_part(in + i, count) * decay + splat(dt_x) * load_part(b + i, count);
        store_part(out + i, state, count);
        total += state * load_part(c + i, count);
    });
    return sum(total);
}

template <bool PREPARED>
static void mamba1_step_states(
    const Mamba1Step& s, const float* dt, const float* dt_x, const float* b, const float* c, const float* state_in,
    float* state_out, float* out, int64_t begin, int64_t end) {
    const float* a = PREPARED ? s.A : s.A_log;
    for (int64_t i = begin; i < end; i++)
        out[i] = mamba1_step_channel<PREPARED>(
            s.r, a + i * s.r, dt[i - begin], dt_x[i - begin], b, c, state_in + i * s.r, state_out + i * s.r);
}

// Then, for the channels [begin, end): dt[channels] is the step size before softplus, b and c are [r].
static void mamba1_step_scan(
    const Mamba1Step& s, const float* projected, const float* x, const float* dt, const float* b, const float* c,
    const float* state_in, float* state_out, float* out, int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    float* sizes = scratch<STEP_HEAD>(2 * count);
    float* dt_x = sizes + count;
    each_vector(count, [&](int64_t i, int64_t part) {
        vf size = vsoftplus(load_part(dt + begin + i, part));
        store_part(sizes + i, size, part);
        store_part(dt_x + i, size * load_part(x + begin + i, part), part);
    });
    if (s.A) mamba1_step_states<true>(s, sizes, dt_x, b, c, state_in, state_out, out, begin, end);
    else mamba1_step_states<false>(s, sizes, dt_x, b, c, state_in, state_out, out, begin, end);
    const float* z = projected + s.channels;
    each_vector(count, [&](int64_t i, int64_t part) {
        int64_t at = begin + i;
        vf total = load_part(out + at, part) + load_part(s.D + at, part) * load_part(x + at, part);
        store_part(out + at, total * vsilu(load_part(z + at, part)), part);
    });
}

}  // namespace MK_ISA

// Rows are contiguous: projected[batch][2][channels], window[batch][channels][k], x[batch][channels].
MK_EXPORT(mamba1_step_conv)(
    int64_t batch, int64_t channels, int64_t k, const float* conv_weight, const float* conv_bias, const float* projected,
    const float* window_in, float* window_out, float* x) {
    MK_BEGIN
    using namespace MK_ISA;
    const Mamba1Step s = {channels, 0, k, conv_weight, conv_bias, nullptr, nullptr, nullptr};
    // A few microseconds at most: not worth a second thread.
    for (int64_t row = 0; row < batch; row++)
        mamba1_step_conv(s, projected + row * 2 * channels, window_in + row * channels * k,
                         window_out + row * channels * k, x + row * channels, 0, channels);
    MK_END
}

// dt_b_c[batch][dt_rank + 2 r] is what x_proj returns; its first part went through dt_proj into dt[batch][channels].
MK_EXPORT(mamba1_step_scan)(
    int64_t batch, int64_t channels, int64_t r, int64_t dt_rank, const float* A_log, const float* D,
    const float* projected, const float* x, const float* dt, const float* dt_b_c, const float* state_in,
    float* state_out, float* out) {
    MK_BEGIN
    using namespace MK_ISA;
    const Mamba1Step s = {channels, r, 0, nullptr, nullptr, A_log, nullptr, D};
    const int64_t blocks = ceil_div(channels, W);  // threads share whole vectors
    // An entry with its two exponentials costs several of the other families'.
    step_parallel(batch, blocks, 3 * W * r, [&](int64_t row, int64_t begin, int64_t end) {
        const float* b = dt_b_c + row * (dt_rank + 2 * r) + dt_rank;
        int64_t last = least(end * W, channels), state = row * channels * r;
        mamba1_step_scan(s, projected + row * 2 * channels, x + row * channels, dt + row * channels, b, b + r,
                         state_in + state, state_out + state, out + row * channels, begin * W, last);
    });
    MK_END
}
