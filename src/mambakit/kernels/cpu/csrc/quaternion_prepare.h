// Mamba-3's write and read vectors where unit quaternions turn them, each head's own: see mamba3_prepare.h for the rest.
//
//     out = conj(Q_t) (n + bias)      Q_t = q_t Q_{t-1}      q_t: the turn by dt_t range pi tanh(|rot_t|) about rot_t
//
// A turn of Q_t by a small vector s (Q_t becomes Q_t (1 + s)) changes every later Q by the same: what outputs say about
// s is added up from the last token to the first, and reaches q_t as the vector Q_t s conj(Q_t).
#pragma once

#include "mamba3_prepare.h"
#include "quaternion.h"

namespace MK_ISA {

// In `inputs`, angles are blocks of four: rot [batch, length, heads, angles, 3], before [batch, heads, angles, 4].
struct QuaternionForward {
    MK_FIELDS(QuaternionForward,
        Prepare inputs;
        float* running;  // room for [batch, length, heads, angles, 4]
        void *b, *c;     // [batch, length, ranks, heads, state]
        float* after;    // quaternions after the last token, [batch, heads, angles, 4]
    )
};

struct QuaternionBackward {
    MK_FIELDS(QuaternionBackward,
        Prepare inputs;
        const void *d_b_out, *d_c_out;  // [batch, length, ranks, heads, state]
        const float* d_after;           // or null
        float *running, *share;         // room for [batch, length, heads, angles, 4], and 3
        void *d_b, *d_c;                // [batch, length, ranks, groups, state]
        float *d_rot, *d_dt, *d_before;
        float* sums;  // the gradients of the biases and weights, [2, heads, ranks, state] and [2, state]
    )
};

// One head's turns of one token and its running quaternions, block beside block.
struct Spins {
    int64_t blocks;
    double *axis[3], *size, *bent;  // rot, its length, and tanh of that
    double* q[4];                   // running
    double* sum[3];                 // of the backward
    float *half, *sine, *cosine;

    explicit Spins(int64_t blocks) : blocks(blocks) {
        double* at = (double*)scratch<TURN_RATES>((2 * 12 + 3) * blocks);
        for (double*& part : axis) part = at, at += blocks;
        for (double*& part : q) part = at, at += blocks;
        for (double*& part : sum) part = at, at += blocks;
        size = at, bent = at + blocks;
        half = (float*)(at + 2 * blocks), sine = half + blocks, cosine = sine + blocks;
    }

    // `range` is that of a rate: the half turn is dt range / 2 tanh(|rot|).
    void turns(const float* rot, double dt, double range) {
        for (int64_t j = 0; j < blocks; j++)
            for (int i = 0; i < 3; i++) axis[i][j] = rot[3 * j + i];
        for (int64_t j = 0; j < blocks; j++) {
            size[j] = length_of(axis[0][j] * axis[0][j] + axis[1][j] * axis[1][j] + axis[2][j] * axis[2][j]);
            bent[j] = tanh_of(size[j]);
            half[j] = (float)wrapped(dt * range * 0.5 * bent[j]);
        }
        each_vector(blocks, MK_BODY(int64_t j, int64_t lanes) {
            vf s, c;
            vsincos(load_part(half + j, lanes), &s, &c);
            store_part(sine + j, s, lanes);
            store_part(cosine + j, c, lanes);
        });
    }

    // From before the token to after it.
    void advance() {
        for (int64_t j = 0; j < blocks; j++) {
            const double by = sine[j] / size[j], w = cosine[j];
            const double x = by * axis[0][j], y = by * axis[1][j], z = by * axis[2][j];
            const double a = q[0][j], b = q[1][j], c = q[2][j], d = q[3][j];
            const double o[4] = {w * a - x * b - y * c - z * d, w * b + x * a + y * d - z * c,
                                 w * c - x * d + y * a + z * b, w * d + x * c - y * b + z * a};
            const double scale = 1 / length_of(o[0] * o[0] + o[1] * o[1] + o[2] * o[2] + o[3] * o[3]);
            for (int i = 0; i < 4; i++) q[i][j] = scale * o[i];
        }
    }

    void unturned() {
        for (int i = 0; i < 4; i++)
            for (int64_t j = 0; j < blocks; j++) q[i][j] = i ? 0.0 : 1.0;
    }
    // To unit length; null is unturned.
    void read(const float* from) {
        if (!from) return unturned();
        for (int64_t j = 0; j < blocks; j++) {
            double squares = 0;
            for (int i = 0; i < 4; i++) squares += (double)from[4 * j + i] * from[4 * j + i];
            for (int i = 0; i < 4; i++) q[i][j] = from[4 * j + i] / length_of(squares);
        }
    }
    void write(float* to) const {
        for (int64_t j = 0; j < blocks; j++)
            for (int i = 0; i < 4; i++) to[4 * j + i] = (float)q[i][j];
    }
};

// body(row, head, spins) with the quaternions that enter the row, heads among threads.
template <class Body>
static void each_head(const Turns& turns, const Body& body) {
    parallel(turns.batch * turns.heads, [&](int64_t begin, int64_t end) {
        Spins spins(turns.angles);
        for (int64_t at = begin; at < end; at++) {
            spins.read(turns.before ? turns.before + at * 4 * turns.angles : nullptr);
            body(at / turns.heads, at % turns.heads, spins);
        }
    });
}

static void run_quaternions(const Turns& turns, float* running, float* after) {
    const int64_t blocks = turns.angles;
    each_head(turns, [&](int64_t row, int64_t head, Spins& spins) {
        for (int64_t t = 0; t < turns.length; t++) {
            if (turns.starts(row, t)) spins.unturned();
            spins.turns(turns.rot + row * turns.rot_batch + t * turns.rot_token + head * 3 * blocks,
                        turns.dt_of(row, t)[head], turns.range);
            spins.advance();
            spins.write(running + ((row * turns.length + t) * turns.heads + head) * 4 * blocks);
        }
        spins.write(after + (row * turns.heads + head) * 4 * blocks);
    });
}

// Gradients of rot, dt and the entering quaternions from the shares of each token's outputs.
static void quaternions_backward(const QuaternionBackward& d) {
    const Turns& turns = d.inputs.turns;
    const int64_t blocks = turns.angles;
    each_head(turns, [&](int64_t row, int64_t head, Spins& spins) {
        // The quaternions that leave the row, those that enter it if it is empty.
        const float* entering = turns.before ? turns.before + (row * turns.heads + head) * 4 * blocks : nullptr;
        auto at = [&](int64_t t) { return (row * turns.length + t) * turns.heads + head; };
        if (turns.length) spins.read(d.running + at(turns.length - 1) * 4 * blocks);
        for (int64_t j = 0; j < blocks; j++) {
            const float* g = d.d_after ? d.d_after + ((row * turns.heads + head) * blocks + j) * 4 : nullptr;
            const double w = spins.q[0][j], x = spins.q[1][j], y = spins.q[2][j], z = spins.q[3][j];
            spins.sum[0][j] = g ? w * g[1] - x * g[0] - y * g[3] + z * g[2] : 0.0;
            spins.sum[1][j] = g ? w * g[2] + x * g[3] - y * g[0] - z * g[1] : 0.0;
            spins.sum[2][j] = g ? w * g[3] - x * g[2] + y * g[1] - z * g[0] : 0.0;
        }
        for (int64_t t = turns.length - 1; t >= 0; t--) {
            const double dt = turns.dt_of(row, t)[head];
            spins.turns(turns.rot + row * turns.rot_batch + t * turns.rot_token + head * 3 * blocks, dt, turns.range);
            const float *q = d.running + at(t) * 4 * blocks, *share = d.share + at(t) * 3 * blocks;
            float* d_rot = d.d_rot + at(t) * 3 * blocks;
            double d_step = 0;
            for (int64_t j = 0; j < blocks; j++) {
                for (int i = 0; i < 3; i++) spins.sum[i][j] += share[3 * j + i];
                const double sx = spins.sum[0][j], sy = spins.sum[1][j], sz = spins.sum[2][j];
                // p = Q s conj(Q)
                const double w = q[4 * j], x = q[4 * j + 1], y = q[4 * j + 2], z = q[4 * j + 3];
                const double ux = 2 * (y * sz - z * sy), uy = 2 * (z * sx - x * sz), uz = 2 * (x * sy - y * sx);
                const double px = sx + w * ux + y * uz - z * uy, py = sy + w * uy + z * ux - x * uz,
                             pz = sz + w * uz + x * uy - y * ux;
                // About its own axis p changes the turn, across it the axis.
                const double inverse = 1 / spins.size[j], sine = spins.sine[j], cosine = spins.cosine[j];
                const double nx = spins.axis[0][j] * inverse, ny = spins.axis[1][j] * inverse,
                             nz = spins.axis[2][j] * inverse;
                const double along = px * nx + py * ny + pz * nz, bent = spins.bent[j];
                const double slope = along * dt * turns.range * 0.5 * (1 - bent * bent), by = sine * inverse;
                d_step += along * turns.range * 0.5 * bent;
                d_rot[3 * j] = (float)(by * (cosine * (px - along * nx) + sine * (py * nz - pz * ny)) + slope * nx);
                d_rot[3 * j + 1] = (float)(by * (cosine * (py - along * ny) + sine * (pz * nx - px * nz)) + slope * ny);
                d_rot[3 * j + 2] = (float)(by * (cosine * (pz - along * nz) + sine * (px * ny - py * nx)) + slope * nz);
            }
            d.d_dt[at(t)] = (float)d_step;
            if (turns.starts(row, t))
                for (double* sum : spins.sum) clear(sum, blocks);
        }
        spins.read(entering);
        float* d_before = d.d_before + (row * turns.heads + head) * 4 * blocks;
        for (int64_t j = 0; j < blocks; j++) {
            double squares = 0;
            for (int i = 0; i < 4; i++) squares += entering ? (double)entering[4 * j + i] * entering[4 * j + i] : 0.25;
            const double by = 1 / length_of(squares), w = by * spins.q[0][j], x = by * spins.q[1][j],
                         y = by * spins.q[2][j], z = by * spins.q[3][j];
            const double sx = spins.sum[0][j], sy = spins.sum[1][j], sz = spins.sum[2][j];
            d_before[4 * j] = (float)(-x * sx - y * sy - z * sz);
            d_before[4 * j + 1] = (float)(w * sx + y * sz - z * sy);
            d_before[4 * j + 2] = (float)(w * sy + z * sx - x * sz);
            d_before[4 * j + 3] = (float)(w * sz + x * sy - y * sx);
        }
    });
}

// One head of one token: to the gradients of normed lines and biases, and to what the outputs say about its quaternions.
template <class Number>
static void turn_head_backward(const QuaternionBackward& d, int64_t token, int64_t head, Workspace& work, float* sums) {
    const Prepare& all = d.inputs;
    const int64_t state = all.pairs.state, blocks = all.turns.angles, heads = all.turns.heads, lines = 2 * all.ranks;
    const float* q = d.running + (token * heads + head) * 4 * blocks;
    float* share = d.share + (token * heads + head) * 3 * blocks;
    for (int64_t line = 0; line < lines; line++) {
        const int64_t side = line / all.ranks, rank = line % all.ranks;
        const int64_t from = (line * all.groups + all.group_of(head)) * state;
        const float *normed = work.normed + from, *bias = all.bias_of(side, head, rank);
        const Number* d_outs = (const Number*)(side ? d.d_c_out : d.d_b_out) + token * all.outputs();
        const Number* d_out = d_outs + (rank * heads + head) * state;
        float* d_normed = work.d_normed + from;
        float* d_bias = sums + side * all.outputs() + (head * all.ranks + rank) * state;
        for (int64_t j = 0; j < blocks; j++) {
            const int64_t at = 4 * j;
            const vf4 out = turned_by(q + at, load_block(normed + at) + load_block(bias + at));
            const vf4 d_own = load_block(d_out + at), d_in = turned_back_by(q + at, d_own);
            const float of[3] = {sum(beside_x(out) * d_own), sum(beside_y(out) * d_own), sum(beside_z(out) * d_own)};
            for (int i = 0; i < 3; i++) share[3 * j + i] = line ? share[3 * j + i] + of[i] : of[i];
            store_block(d_normed + at, load_block(d_normed + at) + d_in);
            store_block(d_bias + at, load_block(d_bias + at) + d_in);
        }
        const int64_t still = 4 * blocks;
        each_vector(state - still, MK_BODY(int64_t i, int64_t lanes) {
            const vf d_in = load_part(d_out + still + i, lanes);
            add_part(d_normed + still + i, d_in, lanes);
            add_part(d_bias + still + i, d_in, lanes);
        });
    }
}

// body(task, row, t, work) for all tokens, with their normed lines.
template <class Number, class Body>
static void each_normed(const Prepare& all, int64_t tasks, const Body& body) {
    const int64_t length = all.turns.length, every = all.turns.batch * length;
    parallel(tasks, [&](int64_t begin, int64_t end) {
        Workspace work(all);
        for (int64_t task = begin; task < end; task++)
            for (int64_t at = begin_of(task, tasks, every); at < begin_of(task + 1, tasks, every); at++) {
                norm_lines<Number>(all, at / length, at % length, work);
                body(task, at / length, at % length, work);
            }
    });
}

template <class Number>
static void quaternion_prepare_of(const QuaternionForward& call) {
    const Prepare& all = call.inputs;
    const Turns& turns = all.turns;
    const int64_t state = all.pairs.state, tasks = count_tasks(turns.batch * turns.length, TURN_BLOCK);
    run_quaternions(turns, call.running, call.after);
    each_normed<Number>(all, tasks, MK_BODY(int64_t, int64_t row, int64_t t, Workspace & work) {
        const int64_t token = row * turns.length + t;
        for (int64_t head = 0; head < turns.heads; head++)
            for (int64_t side = 0; side < 2; side++)
                for (int64_t rank = 0; rank < all.ranks; rank++) {
                    int64_t line = (side * all.ranks + rank) * all.groups + all.group_of(head);
                    Number* out = (Number*)(side ? call.c : call.b) + token * all.outputs();
                    turn_blocks(state, turns.angles, call.running + (token * turns.heads + head) * 4 * turns.angles,
                                work.normed + line * state, all.bias_of(side, head, rank),
                                out + (rank * turns.heads + head) * state);
                }
    });
}

template <class Number>
static void quaternion_prepare_backward_of(const QuaternionBackward& call) {
    const Prepare& all = call.inputs;
    const Turns& turns = all.turns;
    const int64_t state = all.pairs.state, lines = all.lines();
    // What the row's last quaternions were is of no interest here.
    run_quaternions(turns, call.running, call.d_before);
    const int64_t tasks = count_tasks(turns.batch * turns.length, TURN_BLOCK);
    const int64_t parts = 2 * (all.outputs() + state);
    float* task_sums = scratch<TASK_SUMS>(tasks * parts);
    clear(task_sums, tasks * parts);
    each_normed<Number>(all, tasks, MK_BODY(int64_t task, int64_t row, int64_t t, Workspace & work) {
        const int64_t token = row * turns.length + t;
        float* sums = task_sums + task * parts;
        clear(work.d_normed, 2 * lines * state);
        for (int64_t head = 0; head < turns.heads; head++) turn_head_backward<Number>(call, token, head, work, sums);
        norm_token_backward<Number>(all, row, t, work, call.d_b, call.d_c, sums);
    });
    add_tasks(task_sums, tasks, parts, call.sums);
    quaternions_backward(call);
}

static void quaternion_prepare(const QuaternionForward& call) {
    with_numbers(call.inputs.narrow, [&](auto number) { quaternion_prepare_of<decltype(number)>(call); });
}
static void quaternion_prepare_backward(const QuaternionBackward& call) {
    with_numbers(call.inputs.narrow, [&](auto number) { quaternion_prepare_backward_of<decltype(number)>(call); });
}

}  // namespace MK_ISA
