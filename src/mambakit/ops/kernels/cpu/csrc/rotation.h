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
    void rates(int64_t row, int64_t t, double* rate) const {
        const float* from = rot + row * rot_batch + t * rot_token;
        for (int64_t a = 0; a < angles; a++) {
            double x = from[a], e = exp_of_negative(x < 0 ? 2 * x : -2 * x), tanh = (1 - e) / (1 + e);
            rate[a] = range * (x < 0 ? -tanh : tanh);
        }
    }
    // The running angles from before token t to after it.
    void advance(int64_t row, int64_t t, const double* rate, double* angle) const {
        if (starts(row, t)) memset(angle, 0, size() * sizeof(double));
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
            memset(angle, 0, size * sizeof(double));
            for (int64_t t = turns.first(block); t < turns.last(block); t++) {
                turns.rates(row, t, rate);
                turns.advance(row, t, rate, angle);
            }
        }
    });
    double* running = (double*)scratch<14>(2 * size);
    for (int64_t row = 0; row < turns.batch; row++) {
        for (int64_t i = 0; i < size; i++) running[i] = turns.before ? turns.before[row * size + i] : 0.0;
        for (int64_t block = 0; block < blocks; block++) {
            double* angle = entering + (row * blocks + block) * size;
            bool fresh = false;
            for (int64_t t = turns.first(block); t < turns.last(block); t++) fresh |= turns.starts(row, t);
            for (int64_t i = 0; i < size; i++) {
                double own = angle[i];
                angle[i] = running[i];
                running[i] = wrapped(fresh ? own : running[i] + own);
            }
        }
        for (int64_t i = 0; i < size; i++) after[row * size + i] = (float)running[i];
    }
}

typedef uint64_t vl __attribute__((vector_size(4 * MK_WIDTH)));
typedef uint32_t vu_half __attribute__((vector_size(2 * MK_WIDTH)));

// (x1, x0, x3, x2, ...)
MK_INLINE vf swap_neighbours(vf x) { return (vf)(((vl)x << 32) | ((vl)x >> 32)); }

// Sines and cosines of one head's angles as the state's entries need them, zero turn where nothing turns.
struct Turn {
    float *cosine, *sine;  // [state]: each entry's own factor, and its partner's
    float* angle;          // [angles], scratch

    void of(const double* angles, int64_t count, bool neighbours, int64_t state) {
        for (int64_t a = 0; a < count; a++) angle[a] = (float)wrapped(angles[a]);
        float signs[2] = {-1.0f, 1.0f};
        each_vector(count, MK_BODY(int64_t a, int64_t lanes) {
            vf s, c;
            vsincos(load_part(angle + a, lanes), s, c);
            if (!neighbours) {
                store_part(cosine + a, c, lanes);
                store_part(cosine + state / 2 + a, c, lanes);
                store_part(sine + a, -s, lanes);
                store_part(sine + state / 2 + a, s, lanes);
                return;
            }
            float cs[MK_WIDTH], sn[MK_WIDTH];
            store(cs, c);
            store(sn, s);
            for (int64_t i = 0; i < lanes; i++)
                for (int64_t side = 0; side < 2; side++) {
                    cosine[2 * (a + i) + side] = cs[i];
                    sine[2 * (a + i) + side] = signs[side] * sn[i];
                }
        });
    }
};

}  // namespace MK_ISA
