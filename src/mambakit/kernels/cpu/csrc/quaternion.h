// Running unit quaternions (w, x, y, z), one for each block of four entries of a state, and what they turn.
//
//     Q_t = q_t Q_{t-1}, normalised,    q_t: the turn by dt_t range pi tanh(|rot_t|) about the axis rot_t
#pragma once

#include "bfloat16.h"
#include "rotation.h"
#include "rows.h"
#include "vec.h"

namespace MK_ISA {

// A quaternion's length in double, which no square of a float leaves; never zero. What is no number stays what it is.
MK_INLINE double length_of(double squares) {
    const double length = sqrt(squares);
    return length < 1e-9 ? 1e-9 : length;
}

// after[blocks][4] from before[blocks][4], which may be the same memory, and rot[blocks][3].
static void advance_quaternions(
    int64_t blocks, double dt, double range, const float* rot, const float* before, float* after) {
    for (int64_t first = 0; first < blocks; first += W) {
        const int64_t lanes = least(W, blocks - first);
        double size[MK_WIDTH];
        float half_turn[MK_WIDTH] = {};
        for (int64_t q = 0; q < lanes; q++) {
            const float* axis = rot + 3 * (first + q);
            const double x = axis[0], y = axis[1], z = axis[2];
            size[q] = length_of(x * x + y * y + z * z);
            half_turn[q] = (float)wrapped(dt * range * (M_PI / 2) * tanh_of(size[q]));
        }
        vf sine, cosine;
        vsincos(load(half_turn), &sine, &cosine);
        for (int64_t q = 0; q < lanes; q++) {
            const float *axis = rot + 3 * (first + q), *b = before + 4 * (first + q);
            const double by = sine[q] / size[q], w = cosine[q], x = by * axis[0], y = by * axis[1], z = by * axis[2];
            const double product[4] = {
                w * b[0] - x * b[1] - y * b[2] - z * b[3],
                w * b[1] + x * b[0] + y * b[3] - z * b[2],
                w * b[2] - x * b[3] + y * b[0] + z * b[1],
                w * b[3] + x * b[2] - y * b[1] + z * b[0],
            };
            double squares = 0;
            for (double part : product) squares += part * part;
            const double scale = 1 / length_of(squares);
            for (int i = 0; i < 4; i++) after[4 * (first + q) + i] = (float)(scale * product[i]);
        }
    }
}

MK_INLINE vf4 load_block(const float* from) {
    vf4 x;
    memcpy(&x, from, sizeof x);
    return x;
}
MK_INLINE vf4 load_block(const bfloat16* from) { return vf4{from[0], from[1], from[2], from[3]}; }
MK_INLINE void store_block(float* to, vf4 x) { memcpy(to, &x, sizeof x); }
MK_INLINE void store_block(bfloat16* to, vf4 x) {
    for (int i = 0; i < 4; i++) to[i] = x[i];
}

// What multiplies x, y and z of a quaternion in its conjugate's product with v.
MK_INLINE vf4 beside_x(vf4 v) { return vf4{1, -1, 1, -1} * __builtin_shufflevector(v, v, 1, 0, 3, 2); }
MK_INLINE vf4 beside_y(vf4 v) { return vf4{1, -1, -1, 1} * __builtin_shufflevector(v, v, 2, 3, 0, 1); }
MK_INLINE vf4 beside_z(vf4 v) { return vf4{1, 1, -1, -1} * __builtin_shufflevector(v, v, 3, 2, 1, 0); }
// conj(q) v, and q v.
MK_INLINE vf4 turned_by(const float* q, vf4 v) {
    return q[0] * v + q[1] * beside_x(v) + q[2] * beside_y(v) + q[3] * beside_z(v);
}
MK_INLINE vf4 turned_back_by(const float* q, vf4 v) {
    return q[0] * v - q[1] * beside_x(v) - q[2] * beside_y(v) - q[3] * beside_z(v);
}

// out[state] = conj(q) (normed + bias) in each of the first `blocks`, normed + bias in the others.
template <class Number>
static void turn_blocks(
    int64_t state, int64_t blocks, const float* q, const float* normed, const float* bias, Number* out) {
    for (int64_t at = 0; at < 4 * blocks; at += 4)
        store_block(out + at, turned_by(q + at, load_block(normed + at) + load_block(bias + at)));
    const int64_t still = 4 * blocks;
    each_vector(state - still, MK_BODY(int64_t i, int64_t lanes) {
        store_part(out + still + i, load_part(normed + still + i, lanes) + load_part(bias + still + i, lanes), lanes);
    });
}

}  // namespace MK_ISA
