// What follows a scan, token by token: skip, gate, RMSNorm, and the sum over ranks. Each of them may be absent.
//
//     u = y[m] + skip x mimo_x[m]              s = silu(z mimo_z[m])
//     out = sum_m mimo_o[m] f(u, s)            f is u s, norm(u s) or norm(u) s
#pragma once

#include "bfloat16.h"
#include "border.h"
#include "rows.h"
#include "threads.h"

namespace MK_ISA {

enum NormOrder { NO_NORM, GATE_FIRST, NORM_FIRST };

struct Finish {
    MK_FIELDS(Finish,
        int64_t rows, ranks, width, group;
        const void* y;  // [rows, ranks, width]
        int64_t y_row;
        const void* x;  // [rows, width], null: no skip
        int64_t x_row;
        const float* skip;  // [width]
        const void* z;      // [rows, width], null: no gate
        int64_t z_row;
        const float *mimo_x, *mimo_z, *mimo_o;  // [ranks, width], null: ones
        const float* weight;                    // [width], null: ones
        int64_t order;
        float eps;
        bool narrow;  // y, x, z, the output and their gradients are bfloat16
    )
};

struct FinishForward {
    MK_FIELDS(FinishForward,
        Finish inputs;
        void* out;  // [rows, width]
    )
};

struct FinishBackward {
    MK_FIELDS(FinishBackward,
        Finish inputs;
        const void* d_out;  // [rows, width]
        int64_t d_out_row;
        void *d_y, *d_x, *d_z;  // as y, x and z but contiguous; those of absent ones are null
        // Of skip, weight, mimo_x, mimo_z and mimo_o one after the other, [2 + 3 ranks, width]; only those of given
        // parameters are meaningful.
        float* sums;
    )
};

MK_INLINE vf load_or_one(const float* from, int64_t i, int64_t lanes) {
    return from ? load_part(from + i, lanes) : splat(1.0f);
}

// One rank of one token, by channel.
template <class Number>
struct FinishRank {
    const Finish* all;
    const Number *y, *x, *z;
    const float *mimo_x, *mimo_z, *mimo_o;

    FinishRank(const Finish& finish, int64_t row, int64_t rank) {
        all = &finish;
        y = (const Number*)finish.y + row * finish.y_row + rank * finish.width;
        x = finish.x ? (const Number*)finish.x + row * finish.x_row : nullptr;
        z = finish.z ? (const Number*)finish.z + row * finish.z_row : nullptr;
        mimo_x = finish.mimo_x ? finish.mimo_x + rank * finish.width : nullptr;
        mimo_z = finish.mimo_z ? finish.mimo_z + rank * finish.width : nullptr;
        mimo_o = finish.mimo_o ? finish.mimo_o + rank * finish.width : nullptr;
    }

    MK_INSIDE vf after_skip(int64_t i, int64_t lanes) const {
        vf u = load_part(y + i, lanes);
        if (!x) return u;
        return u + load_part(all->skip + i, lanes) * load_part(x + i, lanes) * load_or_one(mimo_x, i, lanes);
    }
    MK_INSIDE vf gate_input(int64_t i, int64_t lanes) const {
        return load_part(z + i, lanes) * load_or_one(mimo_z, i, lanes);
    }
};

// out (+)= the rank's share, for the channels [from, from + group). `kept` holds 2 * group floats.
template <class Number, class To>
static void finish_group(const FinishRank<Number>& r, int64_t from, int64_t group, bool add, float* kept, To* out) {
    const Finish& all = *r.all;
    float *value = kept, *gate = kept + group;
    vf squares = {};
    each_vector(group, MK_BODY(int64_t i, int64_t lanes) {
        vf u = r.after_skip(from + i, lanes);
        vf s = r.z ? vsilu(r.gate_input(from + i, lanes)) : splat(1.0f);
        if (all.order != NORM_FIRST) u *= s;
        else store_part(gate + i, s, lanes);
        // Lanes beyond the end are zero: they add nothing.
        squares += u * u;
        store_part(value + i, u, lanes);
    });
    float inverse = all.order == NO_NORM ? 1.0f : inverse_rms(squares, group, all.eps, [=] { return value; });
    each_vector(group, MK_BODY(int64_t i, int64_t lanes) {
        vf result = load_part(value + i, lanes) * splat(inverse) * load_or_one(all.weight, from + i, lanes);
        if (all.order == NORM_FIRST) result *= load_part(gate + i, lanes);
        result *= load_or_one(r.mimo_o, from + i, lanes);
        put_part(out + from + i, result, lanes, add);
    });
}

// Gradients of one token go to their own rows, those of parameters are added to a task's sums; null: not wanted.
template <class Number, class Sum>
struct FinishGradients {
    Number* y;                                          // rows of the token
    Sum *x, *z;                                         // the same, sums over ranks
    float *skip, *weight, *mimo_x, *mimo_z, *mimo_o;    // [width] or, of the last three, the rank's [width]
};

// `kept` holds 4 * group floats.
template <class Number, class Sum>
static void finish_group_backward(const FinishRank<Number>& r, int64_t from, int64_t group, bool add,
                                  const Number* d_out, float* kept, const FinishGradients<Number, Sum>& d) {
    const Finish& all = *r.all;
    const bool gate_first = all.order != NORM_FIRST;
    float *skipped = kept, *opened = kept + group, *slope = kept + 2 * group, *again = kept + 3 * group;
    vf squares = {};
    each_vector(group, MK_BODY(int64_t i, int64_t lanes) {
        vf u = r.after_skip(from + i, lanes);
        store_part(skipped + i, u, lanes);
        if (r.z) {
            vf a = r.gate_input(from + i, lanes), open = vsigmoid(a);
            store_part(opened + i, a * open, lanes);
            store_part(slope + i, silu_slope(a, open), lanes);
            if (gate_first) u *= a * open;
        }
        squares += u * u;
    });
    float inverse = 1.0f;
    if (all.order != NO_NORM)
        inverse = inverse_rms(squares, group, all.eps, [&] {
            const bool gated = r.z && gate_first;
            for (int64_t i = 0; i < group; i++) again[i] = skipped[i] * (gated ? opened[i] : 1.0f);
            return again;
        });
    // A group of one is all but a sign: 1 - n^2, of which the subtraction would leave no digit.
    const float alone = all.order != NO_NORM && group == 1 ? all.eps * inverse * inverse : 1.0f;

    // n, the normed value, and the gradient that reaches it; `shared` is what the root mean square passes on.
    auto normed = MK_BODY(int64_t i, int64_t lanes) {
        vf n = load_part(skipped + i, lanes) * splat(inverse);
        return r.z && gate_first ? n * load_part(opened + i, lanes) : n;
    };
    auto d_normed = MK_BODY(int64_t i, int64_t lanes) {
        vf d_n = load_part(d_out + from + i, lanes) * load_or_one(r.mimo_o, from + i, lanes) *
                 load_or_one(all.weight, from + i, lanes);
        return r.z && !gate_first ? d_n * load_part(opened + i, lanes) : d_n;
    };
    vf products = {};
    each_vector(group, MK_BODY(int64_t i, int64_t lanes) {
        vf n = normed(i, lanes), d_n = d_normed(i, lanes);
        products += n * d_n;
        vf result = r.z && !gate_first ? n * load_part(opened + i, lanes) : n;
        vf share = load_part(d_out + from + i, lanes) * result;
        if (d.weight) add_part(d.weight + from + i, share * load_or_one(r.mimo_o, from + i, lanes), lanes);
        if (d.mimo_o) add_part(d.mimo_o + from + i, share * load_or_one(all.weight, from + i, lanes), lanes);
    });
    float shared = all.order == NO_NORM || group == 1 ? 0.0f : sum(products) / group;

    each_vector(group, MK_BODY(int64_t i, int64_t lanes) {
        vf n = normed(i, lanes), d_n = d_normed(i, lanes);
        vf d_value = (d_n * splat(alone) - n * splat(shared)) * splat(inverse);
        vf d_u = d_value;
        if (r.z) {
            vf open = load_part(opened + i, lanes);
            // The gate multiplies u before the norm, or what the norm and its weight made of it.
            vf d_gate;
            if (gate_first) {
                d_gate = d_value * load_part(skipped + i, lanes);
                d_u = d_value * open;
            } else {
                d_gate = n * load_part(d_out + from + i, lanes) * load_or_one(r.mimo_o, from + i, lanes) *
                         load_or_one(all.weight, from + i, lanes);
            }
            vf d_a = d_gate * load_part(slope + i, lanes);
            if (d.mimo_z) add_part(d.mimo_z + from + i, d_a * load_part(r.z + from + i, lanes), lanes);
            vf d_z = d_a * load_or_one(r.mimo_z, from + i, lanes);
            put_part(d.z + from + i, d_z, lanes, add);
        }
        store_part(d.y + from + i, d_u, lanes);
        if (r.x) {
            vf x = load_part(r.x + from + i, lanes), skip = load_part(all.skip + from + i, lanes);
            vf ones = load_or_one(r.mimo_x, from + i, lanes);
            if (d.skip) add_part(d.skip + from + i, d_u * x * ones, lanes);
            if (d.mimo_x) add_part(d.mimo_x + from + i, d_u * x * skip, lanes);
            vf d_x = d_u * skip * ones;
            put_part(d.x + from + i, d_x, lanes, add);
        }
    });
}

// body(Sum{}) with the type of sums over ranks: float32 where there are several.
template <class Number, class Body>
MK_INLINE void with_sums(int64_t ranks, const Body& body) {
    if (ranks > 1) body(float{});
    else body(Number{});
}
// Where sums over ranks go: `into` itself if it is of their kind, else `room`, from where `deliver` brings them.
MK_INLINE float* sums_in(float* into, float*) { return into; }
MK_INLINE bfloat16* sums_in(bfloat16* into, bfloat16*) { return into; }
MK_INLINE float* sums_in(bfloat16* into, float* room) { return into ? room : nullptr; }
MK_INLINE void deliver(const float*, int64_t, float*) {}
MK_INLINE void deliver(const bfloat16*, int64_t, bfloat16*) {}
MK_INLINE void deliver(const float* sums, int64_t width, bfloat16* to) {
    if (to) each_vector(width, MK_BODY(int64_t i, int64_t lanes) { store_part(to + i, load_part(sums + i, lanes), lanes); });
}

template <class Number, class Sum>
static void finish_of(const FinishForward& call) {
    const Finish& all = call.inputs;
    const int64_t tasks = count_tasks(all.rows, 16), width = all.width;
    parallel(tasks, [&](int64_t begin, int64_t end) {
        float* kept = scratch<NORM_GROUP>(2 * all.group + width);
        for (int64_t row = begin_of(begin, tasks, all.rows); row < begin_of(end, tasks, all.rows); row++) {
            Number* out = (Number*)call.out + row * width;
            Sum* sums = sums_in(out, (Sum*)(kept + 2 * all.group));
            for (int64_t rank = 0; rank < all.ranks; rank++) {
                FinishRank<Number> r(all, row, rank);
                for (int64_t from = 0; from < width; from += all.group)
                    finish_group(r, from, all.group, rank > 0, kept, sums);
            }
            deliver(sums, width, out);
        }
    });
}

template <class Number, class Sum>
static void finish_backward_of(const FinishBackward& call) {
    const Finish& all = call.inputs;
    const int64_t rows = all.rows, ranks = all.ranks, width = all.width, parts = (2 + 3 * ranks) * width;
    const int64_t tasks = count_tasks(rows, 16);
    float* task_sums = scratch<TASK_SUMS>(tasks * parts);
    clear(task_sums, tasks * parts);
    parallel(tasks, [&](int64_t begin, int64_t end) {
        float* kept = scratch<NORM_GROUP>(4 * all.group + 2 * width);
        Sum* room = (Sum*)(kept + 4 * all.group);
        for (int64_t task = begin; task < end; task++) {
            float* own = task_sums + task * parts;
            float *own_x = own + 2 * width, *own_z = own_x + ranks * width, *own_o = own_z + ranks * width;
            for (int64_t row = begin_of(task, tasks, rows); row < begin_of(task + 1, tasks, rows); row++) {
                Number* d_x = call.d_x ? (Number*)call.d_x + row * width : nullptr;
                Number* d_z = call.d_z ? (Number*)call.d_z + row * width : nullptr;
                Sum *sums_x = sums_in(d_x, room), *sums_z = sums_in(d_z, room + width);
                const Number* d_out = (const Number*)call.d_out + row * call.d_out_row;
                for (int64_t rank = 0; rank < ranks; rank++) {
                    FinishRank<Number> r(all, row, rank);
                    FinishGradients<Number, Sum> d = {(Number*)call.d_y + (row * ranks + rank) * width,
                                                      sums_x,
                                                      sums_z,
                                                      all.skip ? own : nullptr,
                                                      all.weight ? own + width : nullptr,
                                                      all.mimo_x ? own_x + rank * width : nullptr,
                                                      all.mimo_z ? own_z + rank * width : nullptr,
                                                      all.mimo_o ? own_o + rank * width : nullptr};
                    for (int64_t from = 0; from < width; from += all.group)
                        finish_group_backward(r, from, all.group, rank > 0, d_out, kept, d);
                }
                deliver(sums_x, width, d_x);
                deliver(sums_z, width, d_z);
            }
        }
    });
    add_tasks(task_sums, tasks, parts, call.sums);
}

static void finish(const FinishForward& call) {
    with_numbers(call.inputs.narrow, [&](auto number) {
        with_sums<decltype(number)>(call.inputs.ranks, [&](auto sum) { finish_of<decltype(number), decltype(sum)>(call); });
    });
}
static void finish_backward(const FinishBackward& call) {
    with_numbers(call.inputs.narrow, [&](auto number) {
        with_sums<decltype(number)>(call.inputs.ranks,
                                    [&](auto sum) { finish_backward_of<decltype(number), decltype(sum)>(call); });
    });
}

}  // namespace MK_ISA
