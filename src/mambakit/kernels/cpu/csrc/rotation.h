// Running angles, their sines and cosines, and what they turn.
//
//     theta_t = theta_{t-1} + dt_t rate_t,    rate_t = range pi tanh(rot_t)        per head and angle
#pragma once

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

// The same direction in [-pi, pi].
MK_INLINE double wrapped(double angle) {
    const double magic = 6755399441055744.0;
    return angle - FULL_TURN * ((angle * (1 / FULL_TURN) + magic) - magic);
}

// For |x| of a few turns, to 2 units in the last place of 1.
MK_INLINE void vsincos(vf x, vf& sine, vf& cosine) {
    const vf magic = splat(12582912.0f);
    vf shifted = x * splat(0.636619772f) + magic;
    vf n = shifted - magic;
    vi quarter = (vi)shifted;  // its low bits are n
    vf r = n * splat(-1.5703125f) + x;  // pi / 2 in three parts, the first two short enough for exact products
    r = n * splat(-4.83751296997e-4f) + r;
    r = n * splat(-7.54978995489e-8f) + r;
    vf z = r * r;
    vf s = splat(-1.9515295891e-4f) * z + splat(8.3321608736e-3f);
    s = (s * z + splat(-1.6666654611e-1f)) * z * r + r;
    vf c = splat(2.443315711809948e-5f) * z + splat(-1.388731625493765e-3f);
    c = (c * z + splat(4.166664568298827e-2f)) * z * z + splat(-0.5f) * z + splat(1.0f);
    vi odd = (quarter & splat_int(1)) != splat_int(0);
    vi sine_sign = (quarter & splat_int(2)) << 30;
    vi cosine_sign = ((quarter + splat_int(1)) & splat_int(2)) << 30;
    sine = (vf)((vi)choose(odd, c, s) ^ sine_sign);
    cosine = (vf)((vi)choose(odd, s, c) ^ cosine_sign);
}

struct Turns {
    int64_t batch, length, heads, angles;
    const float* rot;  // [batch, length, angles]
    int64_t rot_batch, rot_token;
    const float* dt;  // [batch, length, heads]
    double range;     // of a rate: range pi
    const float* before;  // [batch, heads, angles], null: zeros
    const int64_t* segments;  // [batch, length], or null

    int64_t blocks() const { return length ? (length + TURN_BLOCK - 1) / TURN_BLOCK : 1; }
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
        for (int64_t a = 0; a < angles; a++) {
            double x = from[a], e = exp_of_negative(x < 0 ? 2 * x : -2 * x), tanh = (1 - e) / (1 + e);
            rate[a] = range * (x < 0 ? -tanh : tanh);
        }
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
        double* rate = (double*)scratch<14>(2 * turns.angles);
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
    double* running = (double*)scratch<14>(2 * size);
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
    double* running = (double*)scratch<14>(2 * size);
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
        double* rate = (double*)scratch<14>(4 * turns.angles);
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

// Factors of one head's turn, by entry of the state: cosine for itself, sine for its partner, negative for the first of
// a pair. What does not turn has none.
struct Turn {
    float *cosine, *sine;  // [state], with room for two more vectors
    float* angle;          // [angles]

    void of(const double* angles, int64_t count, bool neighbours, int64_t state) {
        for (int64_t a = 0; a < count; a++) angle[a] = (float)angles[a];
        each_vector(count, MK_BODY(int64_t a, int64_t lanes) {
            vf s, c;
            vsincos(load_part(angle + a, lanes), s, c);
            if (neighbours) {
                float cosines[MK_WIDTH], sines[MK_WIDTH];
                store(cosines, c);
                store(sines, s);
                for (int64_t part = 0; part < 2; part++) {
                    store(cosine + 2 * a + part * W, doubled(cosines + part * W / 2, 0));
                    store(sine + 2 * a + part * W, doubled(sines + part * W / 2, 0x80000000u));
                }
            } else {
                store_part(cosine + a, c, lanes);
                store_part(cosine + state / 2 + a, c, lanes);
                store_part(sine + a, -s, lanes);
                store_part(sine + state / 2 + a, s, lanes);
            }
        });
    }
};

}  // namespace MK_ISA
