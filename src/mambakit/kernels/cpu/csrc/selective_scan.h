// Mamba-1's selective scan, everything between its projections and out_proj but the convolution:
//
//     dt = softplus(dt + dt_bias),   u = dt x
//     h_t[i, r] = exp(dt_t[i] a[i, r]) h_{t-1}[i, r] + u_t[i] b_t[g, r]
//     y_t[i]    = (sum_r h_t[i, r] c_t[g, r] + skip[i] x_t[i]) silu(z_t[i])
//
// The lanes of a vector are channels. A thread takes a part, a run of channels of one group and row, through all tokens,
// a block of tokens at a time: what a block reads is first gathered into [vector][token][lane], because the tokens of
// one vector lie a page apart in memory and would miss the TLB over and over. Inside, the states of one vector stay in
// registers.
#pragma once

#include "bfloat16.h"
#include "border.h"
#include "rows.h"
#include "threads.h"
#include "vec.h"

namespace MK_ISA::scan {

// A tensor with an entry per row and token, its last axis contiguous; the other strides count elements.
struct PerToken {
    MK_FIELDS(PerToken,
        const void* data;
        int64_t row, token, group;
    )
};

// The inputs, as the Python side fills them in. Pointers to what is absent are null.
struct Scan {
    MK_FIELDS(Scan,
        int64_t rows, tokens, groups, channels, rank;  // `channels` of one group
        int64_t part_channels;                         // at most, in one part
        int64_t softplus;
        PerToken x, dt, z, b, c;
        const float *a_ir, *state_bir, *skip_i, *dt_bias_i;
        const uint8_t* fresh_bs;  // tokens that start from a zero state
        bool narrow;              // x, dt, z, b, c, y and their gradients per token and channel are bfloat16
    )
};

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

// 2^z for any z: 0 from -127 on, infinity from 128 on. To 3 units in the last place; where long memories need it, near
// z = 0, the error is 5e-7 of z. Cheaper than vexp: the powers of two are added to the exponent's bits.
MK_INLINE vf decay_of(vf z) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    z = vmin(splat(128.0f), vmax(splat(-127.0f), z));  // in this order of arguments a NaN stays
    vf shifted = z + magic;
    vf f = z - (shifted - magic);
    vf q = splat(0.00133335392f);
    q = q * f + splat(0.00966624543f);
    q = q * f + splat(0.0555050038f);
    q = q * f + splat(0.240223512f);
    q = q * f + splat(0.693147123f);
    // The shift throws out all of `magic` and leaves the integer.
    return (vf)((vi)(q * f + splat(1.0f)) + ((vi)shifted << 23));
}

// Both with errors of 1e-6 or less, and of 1e-38 where they vanish.
MK_INLINE vf sigmoid_of(vf x) { return splat(1.0f) / (splat(1.0f) + decay_of(splat(-LOG2_E) * x)); }
MK_INLINE vf softplus_of(vf x) {
    // max(x, 0) + log(1 + e) with e = exp(-|x|); log(1 + e) = 2 atanh(e / (2 + e)) keeps the digits of a small e.
    vf zero = {}, e = decay_of(splat(-LOG2_E) * choose(x < zero, -x, x));
    vf s = e / (splat(2.0f) + e), w = s * s;
    vf p = splat(0.281783342f);
    p = p * w + splat(0.279606044f);
    p = p * w + splat(0.400249094f);
    p = p * w + splat(0.66666317f);
    p = p * w + splat(2.0f);
    return vmax(zero, x) + s * p;
}

// The channels of one group and row that a thread works on.
struct Part {
    int64_t row, group, index;  // `index` counts the parts of the group
    int64_t first, channels;    // `first` counts channels of the whole tensor
    int64_t vectors;

    int64_t lanes(int64_t v) const { return channels - v * W; }  // W or more: all of vector v
    template <class Number>
    const Number* at(const PerToken& x, int64_t token, int64_t v) const {
        return (const Number*)x.data + row * x.row + token * x.token + first + v * W;
    }
    template <class Number>
    const Number* group_at(const PerToken& b, int64_t token) const {
        return (const Number*)b.data + row * b.row + token * b.token + group * b.group;
    }
};

template <class Body>
static void for_parts(const Scan& s, const Body& body) {
    int64_t in_group = ceil_div(s.channels, s.part_channels);
    parallel(s.rows * s.groups * in_group, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++) {
            Part part;
            part.index = n % in_group;
            part.group = n / in_group % s.groups;
            part.row = n / in_group / s.groups;
            int64_t start = part.index * s.part_channels;
            part.channels = least(s.part_channels, s.channels - start);
            part.first = part.group * s.channels + start;
            part.vectors = ceil_div(part.channels, W);
            body(part);
        }
    });
}

// body(Count<n>, first) for runs of n states that cover [0, rank): as many of `most` as fit, then halves of it.
template <int most, class Body>
MK_INLINE void for_states(int64_t rank, int64_t first, const Body& body) {
    for (; first + most <= rank; first += most) body(Count<most>(), first);
    if constexpr (most > 1) for_states<most / 2>(rank, first, body);
}

// Where vector v of token t lies in a block's gathered arrays.
constexpr int64_t BLOCK = 32;
MK_INLINE int64_t place(int64_t v, int64_t t) { return (v * BLOCK + t) * W; }

// Rows of `rank` numbers, `stride` apart and one per channel, as vectors of channels [vector][state][lane], times
// `factor`; zeros beyond the last channel, and everywhere for null.
static void gather_states(const Part& part, const float* rows, int64_t stride, int64_t rank, float factor, float* to) {
    clear(to, part.vectors * rank * W);
    if (!rows) return;
    for (int64_t i = 0; i < part.channels; i++)
        for (int64_t r = 0; r < rank; r++) to[(i / W * rank + r) * W + i % W] = factor * rows[i * stride + r];
}
static void scatter_states(const Part& part, const float* from, int64_t rank, float* rows, int64_t stride) {
    for (int64_t i = 0; i < part.channels; i++)
        for (int64_t r = 0; r < rank; r++) rows[i * stride + r] = from[(i / W * rank + r) * W + i % W];
}

// dt before and after the softplus.
struct StepSize {
    vf raw, dt;
};
template <class Number>
MK_INLINE StepSize step_size(const Scan& s, const Part& part, int64_t token, int64_t v) {
    vf raw = load_part(part.at<Number>(s.dt, token, v), part.lanes(v));
    if (s.dt_bias_i) raw += load_part(s.dt_bias_i + part.first + v * W, part.lanes(v));
    return {raw, s.softplus ? softplus_of(raw) : raw};
}

// Fetches what the next block will gather, one vector of each tensor per call, while the present one is computed. Every
// token is on another page, where the hardware prefetches nothing: without this, a third of the time is waiting.
struct Lookahead {
    const Part& part;
    PerToken tensors[4];
    int64_t token, end;
    bool narrow;
    int64_t v = 0;

    void step() {
        if (token >= end) return;
        for (const PerToken& x : tensors)
            if (x.data) __builtin_prefetch(narrow ? (const void*)part.at<bfloat16>(x, token, v) : part.at<float>(x, token, v));
        if (++v == part.vectors) v = 0, token++;
    }
};

// A block of tokens of a part, gathered.
struct Block {
    int64_t begin, count;
    float *dt, *u;
    // B and C of the block's first token; those of the others follow at these distances.
    const float *b, *c;
    int64_t b_step, c_step;
    float* room;  // [2][token][state]: for those that have to be widened
};

// B and C as floats, where they lie or in the block's room.
template <class Number>
static void find_sides(const Scan& s, const Part& part, Block& block) {
    const Number *b = part.group_at<Number>(s.b, block.begin), *c = part.group_at<Number>(s.c, block.begin);
    if constexpr (sizeof(Number) == sizeof(float)) {
        block.b = b, block.c = c, block.b_step = s.b.token, block.c_step = s.c.token;
    } else {
        float *b_room = block.room, *c_room = block.room + BLOCK * s.rank;
        for (int64_t t = 0; t < block.count; t++)
            each_vector(s.rank, MK_BODY(int64_t r, int64_t lanes) {
                store_part(b_room + t * s.rank + r, load_part(b + t * s.b.token + r, lanes), lanes);
                store_part(c_room + t * s.rank + r, load_part(c + t * s.c.token + r, lanes), lanes);
            });
        block.b = b_room, block.c = c_room, block.b_step = block.c_step = s.rank;
    }
}

template <class Number>
static void gather_tokens(const Scan& s, const Part& part, Block& block) {
    find_sides<Number>(s, part, block);
    for (int64_t t = 0; t < block.count; t++)
        for (int64_t v = 0; v < part.vectors; v++) {
            vf dt = step_size<Number>(s, part, block.begin + t, v).dt;
            store(block.dt + place(v, t), dt);
            store(block.u + place(v, t), dt * load_part(part.at<Number>(s.x, block.begin + t, v), part.lanes(v)));
        }
}

// The recurrence of `n` states from `first` on, for the block's tokens of vector v. `a` is [state][lane] and holds
// a log2(e); `h` enters and leaves in the same layout. Without `y` only the states are wanted.
template <int n, bool reads>
static void scan_states(
    const Scan& s, const Part& part, const Block& block, int64_t v, int64_t first, const float* a, float* h, float* y,
    Lookahead& ahead) {
    const float *dt = block.dt + place(v, 0), *u = block.u + place(v, 0);
    const float *b = block.b + first, *c = block.c + first;
    const uint8_t* fresh = s.fresh_bs ? s.fresh_bs + part.row * s.tokens + block.begin : nullptr;
    vf state[n];
    for (int r = 0; r < n; r++) state[r] = load(h + r * W);
    for (int64_t t = 0; t < block.count; t++, b += block.b_step, c += block.c_step) {
        ahead.step();
        vf dt_t = load(dt + t * W), u_t = load(u + t * W), y_t = {};
        if (fresh && fresh[t])
            for (int r = 0; r < n; r++) state[r] = vf{};
#pragma GCC unroll 16
        for (int r = 0; r < n; r++) {
            state[r] = decay_of(dt_t * load(a + r * W)) * state[r] + u_t * splat(b[r]);
            if (reads) y_t += state[r] * splat(c[r]);
        }
        if (reads) store(y + t * W, load(y + t * W) + y_t);
    }
    for (int r = 0; r < n; r++) store(h + r * W, state[r]);
}

// y = (sum_r h c + skip x) silu(z), where the sum is what the block's `y` holds.
template <class Number>
static void write_outputs(const Scan& s, const Part& part, const Block& block, const float* y, void* out_bsi) {
    int64_t width = s.groups * s.channels;
    Number* out = (Number*)out_bsi + (part.row * s.tokens + block.begin) * width + part.first;
    for (int64_t t = 0; t < block.count; t++)
        for (int64_t v = 0; v < part.vectors; v++) {
            int64_t lanes = part.lanes(v);
            vf y_t = load(y + place(v, t));
            if (s.skip_i)
                y_t += load_part(s.skip_i + part.first + v * W, lanes) *
                       load_part(part.at<Number>(s.x, block.begin + t, v), lanes);
            if (s.z.data) {
                vf z = load_part(part.at<Number>(s.z, block.begin + t, v), lanes);
                y_t *= z * sigmoid_of(z);
            }
            store_part(out + t * width + v * W, y_t, lanes);
        }
}

struct ScanForward {
    MK_FIELDS(ScanForward,
        Scan inputs;
        void* y_bsi;
        float* last_bir;
    )
};

template <class Number>
static void scan_part(const Part& part, const ScanForward& call) {
    const Scan& s = call.inputs;
    int64_t states = part.vectors * s.rank * W, tokens = part.vectors * BLOCK * W;
    float* a = scratch<SCAN_PART>(2 * states + 3 * tokens + s.narrow * 2 * BLOCK * s.rank);
    float *h = a + states, *y = h + states;
    Block block = {0, 0, y + tokens, y + 2 * tokens};
    block.room = y + 3 * tokens;
    int64_t matrix = part.first * s.rank, of_row = part.row * s.groups * s.channels * s.rank + matrix;
    gather_states(part, s.a_ir + matrix, s.rank, s.rank, LOG2_E, a);
    gather_states(part, s.state_bir ? s.state_bir + of_row : nullptr, s.rank, s.rank, 1.0f, h);
    for (; block.begin < s.tokens; block.begin += BLOCK) {
        block.count = least(BLOCK, s.tokens - block.begin);
        gather_tokens<Number>(s, part, block);
        clear(y, tokens);
        int64_t next = block.begin + BLOCK;
        Lookahead ahead = {part, {s.x, s.dt, s.z}, next, least(next + BLOCK, s.tokens), s.narrow};
        for (int64_t v = 0; v < part.vectors; v++)
            for_states<W>(s.rank, 0, [&](auto n, int64_t first) {
                int64_t at = (v * s.rank + first) * W;
                scan_states<n.value, true>(s, part, block, v, first, a + at, h + at, y + place(v, 0), ahead);
            });
        write_outputs<Number>(s, part, block, y, call.y_bsi);
    }
    scatter_states(part, h, s.rank, call.last_bir + of_row, s.rank);
}

}  // namespace MK_ISA::scan

namespace MK_ISA {

using scan::ScanForward;

static void selective_scan(const ScanForward& call) {
    with_numbers(call.inputs.narrow, [&](auto number) {
        scan::for_parts(call.inputs, [&](const scan::Part& part) { scan::scan_part<decltype(number)>(part, call); });
    });
}

}  // namespace MK_ISA
