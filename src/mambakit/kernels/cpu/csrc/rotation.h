// Running angles, their sines and cosines, and what they turn.
//
//     theta_t = theta_{t-1} + dt_t rate_t,    rate_t = range pi tanh(rot_t)        per head and angle
#pragma once

#include "border.h"
#include "rows.h"
#include "threads.h"

namespace MK_ISA {

constexpr int64_t TURN_BLOCK = 64;  // tokens of one task
constexpr double FULL_TURN = 6.283185307179586476925;

// exp(x) for x <= 0 to the last digits of float64. Branchless, so that the compiler makes vectors of a loop over it.
MK_INLINE double exp_of_negative(double x) {
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
    x = x < -700.0 ? -700.0 : x;
    double shifted = x * 1.4426950408889634074 + magic;
    double n = shifted - magic;
    double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800;  // Taylor's terms up to the 13th: r is at most log(2) / 2
    p = p * r + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    int64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (int64_t)(((uint64_t)bits + 1023) << 52);  // the low bits of `shifted` are n
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

MK_INLINE double tanh_of(double x) {
    double e = exp_of_negative(x < 0 ? 2 * x : -2 * x), tanh = (1 - e) / (1 + e);
    return x < 0 ? -tanh : tanh;
}

// The same direction in [-pi, pi].
MK_INLINE double wrapped(double angle) {
    const double magic = 6755399441055744.0;
    return angle - FULL_TURN * ((angle * (1 / FULL_TURN) + magic) - magic);
}

struct Turns {
    MK_FIELDS(Turns,
        int64_t batch, length, heads, angles;
        const float* rot;  // [batch, length, angles]
        int64_t rot_batch, rot_token;
        const float* dt;          // [batch, length, heads]
        double range;             // of a rate: range pi
        const float* before;      // [batch, heads, angles], null: zeros
        const int64_t* segments;  // [batch, length], or null
    )

    int64_t blocks() const { return length ? ceil_div(length, TURN_BLOCK) : 1; }
    int64_t first(int64_t block) const { return block * TURN_BLOCK; }
    int64_t last(int64_t block) const { return least(first(block) + TURN_BLOCK, length); }  // one beyond
    int64_t size() const { return heads * angles; }
    const float* dt_of(int64_t row, int64_t t) const { return dt + (row * length + t) * heads; }

    // Whether token t starts afresh. The first token of a row goes on from what was before.
    bool starts(int64_t row, int64_t t) const {
        return segments && t > 0 && segments[row * length + t] != segments[row * length + t - 1];
    }
    bool starts_within(int64_t row, int64_t from, int64_t to) const {
        for (int64_t t = from; t < to; t++)
            if (starts(row, t)) return true;
        return false;
    }
    void rates(int64_t row, int64_t t, double* rate) const {
        const float* from = rot + row * rot_batch + t * rot_token;
        for (int64_t a = 0; a < angles; a++) rate[a] = range * tanh_of(from[a]);
    }
    // The running angles from before token t to after it.
    void advance(int64_t row, int64_t t, const double* rate, double* angle) const {
        if (starts(row, t)) clear(angle, size());
        const float* step = dt_of(row, t);
        for (int64_t h = 0; h < heads; h++)
            for (int64_t a = 0; a < angles; a++) angle[h * angles + a] = wrapped(angle[h * angles + a] + step[h] * rate[a]);
    }
};

// The angles before each block, [batch, blocks, heads, angles], and after each row in `after`.
static void angles_before_blocks(const Turns& turns, double* entering, float* after) {
    int64_t blocks = turns.blocks(), size = turns.size();
    // Blocks by themselves first: what each of them adds.
    parallel(turns.batch * blocks, [&](int64_t begin, int64_t end) {
        double* rate = (double*)scratch<TURN_RATES>(2 * turns.angles);
        for (int64_t task = begin; task < end; task++) {
            int64_t row = task / blocks, block = task % blocks;
            double* angle = entering + task * size;
            clear(angle, size);
            for (int64_t t = turns.first(block); t < turns.last(block); t++) {
                turns.rates(row, t, rate);
                turns.advance(row, t, rate, angle);
            }
        }
    });
    double* running = (double*)scratch<TURN_ANGLES>(2 * size);
    for (int64_t row = 0; row < turns.batch; row++) {
        for (int64_t i = 0; i < size; i++) running[i] = turns.before ? wrapped(turns.before[row * size + i]) : 0.0;
        for (int64_t block = 0; block < blocks; block++) {
            double* angle = entering + (row * blocks + block) * size;
            bool fresh = turns.starts_within(row, turns.first(block), turns.last(block));
            for (int64_t i = 0; i < size; i++) {
                double own = angle[i];
                angle[i] = running[i];
                running[i] = wrapped(fresh ? own : running[i] + own);
            }
        }
        for (int64_t i = 0; i < size; i++) after[row * size + i] = (float)running[i];
    }
}

// Gradients of rates and steps from those of the angles, d_theta: a token's turn reaches every later token of its segment.
// `sums` has room for [batch, blocks, heads, angles]; d_after may be null.
static void angles_backward(const Turns& turns, double* sums, const float* d_theta, const float* d_after, float* d_rot,
                            float* d_dt, float* d_before) {
    int64_t blocks = turns.blocks(), size = turns.size();
    // What the tokens of a block that go on with the one before it pass on to it.
    parallel(turns.batch * blocks, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            int64_t row = task / blocks, first = turns.first(task % blocks);
            double* sum = sums + task * size;
            clear(sum, size);
            for (int64_t t = first; t < turns.last(task % blocks) && (t == first || !turns.starts(row, t)); t++)
                for (int64_t i = 0; i < size; i++) sum[i] += d_theta[(row * turns.length + t) * size + i];
        }
    });
    // Then what reaches each block from behind.
    double* running = (double*)scratch<TURN_ANGLES>(2 * size);
    for (int64_t row = 0; row < turns.batch; row++) {
        for (int64_t i = 0; i < size; i++) running[i] = d_after ? d_after[row * size + i] : 0.0;
        for (int64_t block = blocks - 1; block >= 0; block--) {
            int64_t first = turns.first(block);
            double* sum = sums + (row * blocks + block) * size;
            bool broken = turns.starts_within(row, first + 1, turns.last(block)), ends = turns.starts(row, first);
            for (int64_t i = 0; i < size; i++) {
                double own = sum[i];
                sum[i] = running[i];
                running[i] = ends ? 0.0 : broken ? own : own + running[i];
            }
        }
        for (int64_t i = 0; i < size; i++) d_before[row * size + i] = (float)running[i];
    }
    parallel(turns.batch * blocks, [&](int64_t begin, int64_t end) {
        double* rate = (double*)scratch<TURN_RATES>(4 * turns.angles);
        double* d_rate = rate + turns.angles;
        for (int64_t task = begin; task < end; task++) {
            int64_t row = task / blocks;
            double* reaching = sums + task * size;
            for (int64_t t = turns.last(task % blocks) - 1; t >= turns.first(task % blocks); t--) {
                int64_t token = row * turns.length + t;
                turns.rates(row, t, rate);
                clear(d_rate, turns.angles);
                for (int64_t h = 0; h < turns.heads; h++) {
                    double d_step = 0, step = turns.dt[token * turns.heads + h];
                    double* d_angle = reaching + h * turns.angles;
                    const float* d_own = d_theta + token * size + h * turns.angles;
                    for (int64_t a = 0; a < turns.angles; a++) {
                        d_angle[a] += d_own[a];
                        d_step += d_angle[a] * rate[a];
                        d_rate[a] += d_angle[a] * step;
                    }
                    d_dt[token * turns.heads + h] = (float)d_step;
                }
                // The slope of range tanh is range - rate^2 / range.
                for (int64_t a = 0; a < turns.angles; a++)
                    d_rot[token * turns.angles + a] = (float)(d_rate[a] * (turns.range - rate[a] * rate[a] / turns.range));
                if (turns.starts(row, t)) clear(reaching, size);
            }
        }
    });
}

typedef uint64_t vl __attribute__((vector_size(4 * MK_WIDTH)));
typedef uint32_t vu_half __attribute__((vector_size(2 * MK_WIDTH)));

// (x1, x0, x3, x2, ...)
MK_INLINE vf swap_neighbours(vf x) { return (vf)(((vl)x << 32) | ((vl)x >> 32)); }

// Each of the W / 2 floats from x on twice in a row, the bits of `flip` changed in the first of the two.
MK_INLINE vf doubled(const float* x, uint32_t flip) {
    vu_half lower;
    memcpy(&lower, x, sizeof lower);
    vl wide = __builtin_convertvector(lower, vl);
    return (vf)((wide | (wide << 32)) ^ (flip - vl{}));
}

// The entries of a state that turn: the first 2 `angles` with their neighbours, or `angles` of each half.
struct Pairs {
    MK_FIELDS(Pairs,
        int64_t state, angles;
        bool neighbours;
    )
};

// Factors of one head's turn, by entry of the state: cosine for itself, sine for its partner, negative for the first of
// a pair. What does not turn has none.
struct Turn {
    float *cosine, *sine;  // [state], with room for two more vectors
    float* angle;          // [angles]

    template <class Angle>
    void of(const Angle* angles, const Pairs& pairs) {
        for (int64_t a = 0; a < pairs.angles; a++) angle[a] = (float)angles[a];
        each_vector(pairs.angles, MK_BODY(int64_t a, int64_t lanes) {
            vf s, c;
            vsincos(load_part(angle + a, lanes), &s, &c);
            if (pairs.neighbours) {
                float cosines[MK_WIDTH], sines[MK_WIDTH];
                store(cosines, c);
                store(sines, s);
                for (int64_t part = 0; part < 2; part++) {
                    store(cosine + 2 * a + part * W, doubled(cosines + part * W / 2, 0));
                    store(sine + 2 * a + part * W, doubled(sines + part * W / 2, 0x80000000u));
                }
            } else {
                store_part(cosine + a, c, lanes);
                store_part(cosine + pairs.state / 2 + a, c, lanes);
                store_part(sine + a, -s, lanes);
                store_part(sine + pairs.state / 2 + a, s, lanes);
            }
        });
    }
};

// body(i, j, lanes) over the entries that turn, in vectors: those from i on have their partners from j on. Neighbours
// share a vector (i == j); an even number of lanes keeps pairs together.
template <class Body>
MK_INLINE void each_turning(const Pairs& pairs, const Body& body) {
    const int64_t angles = pairs.angles, half = pairs.state / 2;
    if (pairs.neighbours) each_vector(2 * angles, MK_BODY(int64_t i, int64_t lanes) { body(i, i, lanes); });
    else each_vector(angles, MK_BODY(int64_t i, int64_t lanes) {
        body(i, half + i, lanes);
        body(half + i, i, lanes);
    });
}

// body(i, lanes) over the entries that do not.
template <class Body>
MK_INLINE void each_still(const Pairs& pairs, const Body& body) {
    const int64_t angles = pairs.angles, half = pairs.state / 2;
    if (pairs.neighbours) {
        each_vector(pairs.state - 2 * angles, MK_BODY(int64_t i, int64_t lanes) { body(2 * angles + i, lanes); });
        return;
    }
    each_vector(half - angles, MK_BODY(int64_t i, int64_t lanes) { body(angles + i, lanes); });
    each_vector(pairs.state - half - angles, MK_BODY(int64_t i, int64_t lanes) { body(half + angles + i, lanes); });
}

// The vector at j as its partners see it: neighbours swap places.
MK_INLINE vf across(const Pairs& pairs, vf x) { return pairs.neighbours ? swap_neighbours(x) : x; }

// out = turn (normed + bias)
template <class Number>
static void turn_line(const Pairs& pairs, const Turn& turn, const float* normed, const float* bias, Number* out) {
    each_turning(pairs, MK_BODY(int64_t i, int64_t j, int64_t lanes) {
        vf own = load_part(normed + i, lanes) + load_part(bias + i, lanes);
        vf other = across(pairs, load_part(normed + j, lanes) + load_part(bias + j, lanes));
        vf turned = own * load_part(turn.cosine + i, lanes) + other * load_part(turn.sine + i, lanes);
        store_part(out + i, turned, lanes);
    });
    each_still(pairs, MK_BODY(int64_t i, int64_t lanes) {
        store_part(out + i, load_part(normed + i, lanes) + load_part(bias + i, lanes), lanes);
    });
}

}  // namespace MK_ISA
