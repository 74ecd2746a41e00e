// Running unit quaternions (w, x, y, z), one for each block of four entries of a state, and what they turn.
//
//     Q_t = q_t Q_{t-1}, normalised,    q_t: the turn by dt_t range pi tanh(|rot_t|) about the axis rot_t
#pragma once

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

// out[state] = conj(q) (normed + bias) in each of the first `blocks`, normed + bias in the others.
static void turn_blocks(
    int64_t state, int64_t blocks, const float* q, const float* normed, const float* bias, float* out) {
    const vf4 of_x = {1, -1, 1, -1}, of_y = {1, -1, -1, 1}, of_z = {1, 1, -1, -1};
    for (int64_t at = 0; at < 4 * blocks; at += 4) {
        const vf4 v = load_block(normed + at) + load_block(bias + at);
        vf4 turned = q[at] * v;
        turned += (q[at + 1] * of_x) * __builtin_shufflevector(v, v, 1, 0, 3, 2);
        turned += (q[at + 2] * of_y) * __builtin_shufflevector(v, v, 2, 3, 0, 1);
        turned += (q[at + 3] * of_z) * __builtin_shufflevector(v, v, 3, 2, 1, 0);
        memcpy(out + at, &turned, sizeof turned);
    }
    const int64_t still = 4 * blocks;
    each_vector(state - still, MK_BODY(int64_t i, int64_t lanes) {
        store_part(out + still + i, load_part(normed + still + i, lanes) + load_part(bias + still + i, lanes), lanes);
    });
}

}  // namespace MK_ISA
