// Mamba-3's write and read vectors: RMSNorm per rank and group, a bias per head, a turn by the running angle.
//
//     n = x / sqrt(mean(x^2) + eps) weight        out[m, h] = turn(theta[h]) (n[m, group of h] + bias[h, m])
//
// B and C go through the same steps and share the angles. Pairs that turn are neighbours or half the state apart.
#pragma once

#include "bfloat16.h"
#include "border.h"
#include "rotation.h"
#include "rows.h"
#include "threads.h"

namespace MK_ISA {

// B or C.
struct Side {
    MK_FIELDS(Side,
        const void* x;  // [batch, length, ranks, groups, state]
        int64_t x_batch, x_token;
        const float* weight;  // [state]
        const float* bias;    // [heads, ranks, state]
    )
};

struct Prepare {
    MK_FIELDS(Prepare,
        Turns turns;
        Pairs pairs;
        int64_t ranks, groups;
        float eps;
        Side b, c;
        double* entering;  // room for the angles before each block, [batch, blocks, heads, angles]
        bool narrow;       // x, the outputs and their gradients are bfloat16
    )

    const Side& side(int64_t which) const { return which ? c : b; }
    int64_t lines() const { return ranks * groups; }
    int64_t outputs() const { return ranks * turns.heads * pairs.state; }
    int64_t group_of(int64_t head) const { return head / (turns.heads / groups); }
    const float* bias_of(int64_t side, int64_t head, int64_t rank) const {
        return this->side(side).bias + (head * ranks + rank) * pairs.state;
    }
    template <class Number>
    const Number* line(int64_t side, int64_t row, int64_t t, int64_t line) const {
        const Side& from = this->side(side);
        return (const Number*)from.x + row * from.x_batch + t * from.x_token + line * pairs.state;
    }
};

// What a task works in, all of it small enough for the first two caches.
struct Workspace {
    double *angle, *rate;    // [heads, angles], [angles]
    float *normed, *inverse;  // [2, lines, state], [2, lines]
    Turn turn;
    float *d_normed, *d_turn;  // of the backward: [2, lines, state], [state]

    explicit Workspace(const Prepare& all) {
        int64_t size = all.turns.size(), angles = all.turns.angles, lines = 2 * all.lines(), state = all.pairs.state;
        float* at = scratch<PREPARE_TOKEN>(2 * (size + angles) + lines * (2 * state + 1) + 3 * state + angles + 4 * W);
        angle = (double*)at;
        rate = angle + size;
        normed = (float*)(rate + angles);
        d_normed = normed + lines * state;
        inverse = d_normed + lines * state;
        d_turn = inverse + lines;
        turn.cosine = d_turn + state;
        turn.sine = turn.cosine + state + 2 * W;
        turn.angle = turn.sine + state + 2 * W;
    }
};

template <class Number>
static void norm_lines(const Prepare& all, int64_t row, int64_t t, Workspace& work) {
    for (int64_t side = 0; side < 2; side++)
        for (int64_t line = 0; line < all.lines(); line++) {
            int64_t at = side * all.lines() + line;
            work.inverse[at] = rms_norm(all.line<Number>(side, row, t, line), all.pairs.state, all.side(side).weight,
                                        all.eps, work.normed + at * all.pairs.state);
        }
}

// Gradients before the turn are those after it turned back; they are added to the normed line's and the bias's. What
// each entry of the output says about its angle is added to d_turn, with the sign of the second of a pair.
template <class Number>
static void turn_line_backward(const Pairs& pairs, const Turn& turn, const float* normed, const float* bias,
                               const Number* d_out, float* d_normed, float* d_bias, float* d_turn) {
    each_turning(pairs, MK_BODY(int64_t i, int64_t j, int64_t lanes) {
        vf cosine = load_part(turn.cosine + i, lanes), sine = load_part(turn.sine + i, lanes);
        vf own = load_part(normed + i, lanes) + load_part(bias + i, lanes);
        vf other = across(pairs, load_part(normed + j, lanes) + load_part(bias + j, lanes));
        vf d_own = load_part(d_out + i, lanes), d_other = across(pairs, load_part(d_out + j, lanes));
        vf d = d_own * cosine - d_other * sine;
        add_part(d_turn + i, d_own * (other * cosine - own * sine), lanes);
        add_part(d_normed + i, d, lanes);
        add_part(d_bias + i, d, lanes);
    });
    each_still(pairs, MK_BODY(int64_t i, int64_t lanes) {
        vf d = load_part(d_out + i, lanes);
        add_part(d_normed + i, d, lanes);
        add_part(d_bias + i, d, lanes);
    });
}

static void angle_gradients(const Pairs& pairs, const float* d_turn, float* d_theta) {
    int64_t step = pairs.neighbours ? 2 : 1, second = pairs.neighbours ? 1 : pairs.state / 2;
    for (int64_t a = 0; a < pairs.angles; a++) d_theta[a] = d_turn[a * step + second] - d_turn[a * step];
}

// Through the norm of one line; `n` is the normed line with its weight.
template <class Number>
static void norm_line_backward(const Prepare& all, const Number* x, float inverse, const float* weight,
                               const float* d_normed, Number* d_x, float* d_weight) {
    vf products = {};
    each_vector(all.pairs.state, MK_BODY(int64_t i, int64_t lanes) {
        vf share = load_part(d_normed + i, lanes) * load_part(x + i, lanes) * splat(inverse);
        add_part(d_weight + i, share, lanes);
        products += share * load_part(weight + i, lanes);
    });
    float shared = sum(products) / all.pairs.state;
    each_vector(all.pairs.state, MK_BODY(int64_t i, int64_t lanes) {
        vf d_n = load_part(d_normed + i, lanes) * load_part(weight + i, lanes);
        vf n = load_part(x + i, lanes) * splat(inverse);
        store_part(d_x + i, (d_n - n * splat(shared)) * splat(inverse), lanes);
    });
}

// Through the norms of all lines of a token; `sums` are the task's.
template <class Number>
static void norm_token_backward(
    const Prepare& all, int64_t row, int64_t t, Workspace& work, void* d_b, void* d_c, float* sums) {
    int64_t token = row * all.turns.length + t, state = all.pairs.state, lines = all.lines();
    for (int64_t side = 0; side < 2; side++)
        for (int64_t line = 0; line < lines; line++) {
            int64_t at = side * lines + line;
            Number* d_x = (Number*)(side ? d_c : d_b) + (token * lines + line) * state;
            norm_line_backward(all, all.line<Number>(side, row, t, line), work.inverse[at], all.side(side).weight,
                               work.d_normed + at * state, d_x, sums + 2 * all.outputs() + side * state);
        }
}

struct PrepareForward {
    MK_FIELDS(PrepareForward,
        Prepare inputs;
        void *b, *c;   // [batch, length, ranks, heads, state]
        float* after;  // angles after the last token, [batch, heads, angles]
    )
};

struct PrepareBackward {
    MK_FIELDS(PrepareBackward,
        Prepare inputs;
        const void *d_b_out, *d_c_out;   // [batch, length, ranks, heads, state]
        const float* d_after;            // or null
        float* d_theta;                  // room for [batch, length, heads, angles]
        void *d_b, *d_c;                 // [batch, length, ranks, groups, state]
        float *d_rot, *d_dt, *d_before;
        float* sums;  // the gradients of the biases and weights, [2, heads, ranks, state] and [2, state]
    )
};

// One token; `sums` are the task's.
template <class Number>
static void prepare_token_backward(const PrepareBackward& d, int64_t row, int64_t t, Workspace& work, float* sums) {
    const Prepare& all = d.inputs;
    const Turns& turns = all.turns;
    int64_t token = row * turns.length + t, state = all.pairs.state, lines = all.lines();
    clear(work.d_normed, 2 * lines * state);
    for (int64_t head = 0; head < turns.heads; head++) {
        work.turn.of(work.angle + head * turns.angles, all.pairs);
        clear(work.d_turn, state);
        for (int64_t side = 0; side < 2; side++)
            for (int64_t rank = 0; rank < all.ranks; rank++) {
                int64_t line = (side * all.ranks + rank) * all.groups + all.group_of(head);
                const Number* d_outs = (const Number*)(side ? d.d_c_out : d.d_b_out) + token * all.outputs();
                const Number* d_out = d_outs + (rank * turns.heads + head) * state;
                float* d_bias = sums + side * all.outputs() + (head * all.ranks + rank) * state;
                turn_line_backward(all.pairs, work.turn, work.normed + line * state, all.bias_of(side, head, rank), d_out,
                                   work.d_normed + line * state, d_bias, work.d_turn);
            }
        angle_gradients(all.pairs, work.d_turn, d.d_theta + (token * turns.heads + head) * turns.angles);
    }
    norm_token_backward<Number>(all, row, t, work, d.d_b, d.d_c, sums);
}

// body(task, row, t, work) for the tokens of blocks, with the angles and normed lines of each.
template <class Number, class Body>
static void each_prepared(const Prepare& all, int64_t tasks, const Body& body) {
    const Turns& turns = all.turns;
    int64_t blocks = turns.blocks(), every = turns.batch * blocks;
    parallel(tasks, [&](int64_t begin, int64_t end) {
        Workspace work(all);
        for (int64_t task = begin; task < end; task++)
            for (int64_t at = begin_of(task, tasks, every); at < begin_of(task + 1, tasks, every); at++) {
                copy(all.entering + at * turns.size(), turns.size(), work.angle);
                for (int64_t t = turns.first(at % blocks); t < turns.last(at % blocks); t++) {
                    turns.rates(at / blocks, t, work.rate);
                    turns.advance(at / blocks, t, work.rate, work.angle);
                    norm_lines<Number>(all, at / blocks, t, work);
                    body(task, at / blocks, t, work);
                }
            }
    });
}

template <class Number>
static void prepare_of(const PrepareForward& call) {
    const Prepare& all = call.inputs;
    const Turns& turns = all.turns;
    const int64_t state = all.pairs.state;
    angles_before_blocks(turns, all.entering, call.after);
    each_prepared<Number>(all, turns.batch * turns.blocks(), MK_BODY(int64_t, int64_t row, int64_t t, Workspace & work) {
        for (int64_t head = 0; head < turns.heads; head++) {
            work.turn.of(work.angle + head * turns.angles, all.pairs);
            for (int64_t side = 0; side < 2; side++)
                for (int64_t rank = 0; rank < all.ranks; rank++) {
                    int64_t line = (side * all.ranks + rank) * all.groups + all.group_of(head);
                    Number* out = (Number*)(side ? call.c : call.b) + (row * turns.length + t) * all.outputs();
                    turn_line(all.pairs, work.turn, work.normed + line * state, all.bias_of(side, head, rank),
                              out + (rank * turns.heads + head) * state);
                }
        }
    });
}

template <class Number>
static void prepare_backward_of(const PrepareBackward& call) {
    const Prepare& all = call.inputs;
    // What the row's last angle was is of no interest here.
    angles_before_blocks(all.turns, all.entering, call.d_before);
    const int64_t tasks = count_tasks(all.turns.batch * all.turns.blocks(), 1);
    const int64_t parts = 2 * (all.outputs() + all.pairs.state);
    float* task_sums = scratch<TASK_SUMS>(tasks * parts);
    clear(task_sums, tasks * parts);
    each_prepared<Number>(all, tasks, MK_BODY(int64_t task, int64_t row, int64_t t, Workspace & work) {
        prepare_token_backward<Number>(call, row, t, work, task_sums + task * parts);
    });
    add_tasks(task_sums, tasks, parts, call.sums);
    angles_backward(all.turns, all.entering, call.d_theta, call.d_after, call.d_rot, call.d_dt, call.d_before);
}

static void mamba3_prepare(const PrepareForward& call) {
    with_numbers(call.inputs.narrow, [&](auto number) { prepare_of<decltype(number)>(call); });
}
static void mamba3_prepare_backward(const PrepareBackward& call) {
    with_numbers(call.inputs.narrow, [&](auto number) { prepare_backward_of<decltype(number)>(call); });
}

}  // namespace MK_ISA
