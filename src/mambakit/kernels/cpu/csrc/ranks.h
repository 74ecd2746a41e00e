// One copy of a token per rank, each with its own weights.
//
//     v[m] = x weight[m]
#pragma once

#include "bfloat16.h"
#include "border.h"
#include "rows.h"
#include "threads.h"

namespace MK_ISA {

struct Ranks {
    MK_FIELDS(Ranks,
        int64_t rows, ranks, width;
        const void* x;  // [rows, width]
        int64_t x_row;
        const float* weight;  // [ranks, width]
        bool narrow;          // x, v and their gradients are bfloat16
    )
};

struct ExpandRanks {
    MK_FIELDS(ExpandRanks,
        Ranks inputs;
        void* v;  // [rows, ranks, width]
    )
};

template <class Number>
static void expand_ranks_of(const ExpandRanks& call) {
    const Ranks& of = call.inputs;
    const int64_t width = of.width, tasks = count_tasks(of.rows, 16);
    parallel(tasks, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin_of(begin, tasks, of.rows); row < begin_of(end, tasks, of.rows); row++)
            for (int64_t rank = 0; rank < of.ranks; rank++) {
                const Number* x = (const Number*)of.x + row * of.x_row;
                const float* weight = of.weight + rank * width;
                Number* v = (Number*)call.v + (row * of.ranks + rank) * width;
                each_vector(width, MK_BODY(int64_t i, int64_t lanes) {
                    store_part(v + i, load_part(x + i, lanes) * load_part(weight + i, lanes), lanes);
                });
            }
    });
}

struct ExpandRanksBackward {
    MK_FIELDS(ExpandRanksBackward,
        Ranks inputs;
        const void* d_v;
        void* d_x;        // [rows, width]
        float* d_weight;  // as weight
    )
};

template <class Number>
static void expand_ranks_backward_of(const ExpandRanksBackward& call) {
    const Ranks& of = call.inputs;
    const int64_t rows = of.rows, width = of.width, parts = of.ranks * width, tasks = count_tasks(rows, 16);
    float* task_sums = scratch<TASK_SUMS>(tasks * parts);
    clear(task_sums, tasks * parts);
    parallel(tasks, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++)
            for (int64_t row = begin_of(task, tasks, rows); row < begin_of(task + 1, tasks, rows); row++) {
                const Number *x = (const Number*)of.x + row * of.x_row, *d_v = (const Number*)call.d_v + row * parts;
                Number* d_x = (Number*)call.d_x + row * width;
                float* sums = task_sums + task * parts;
                each_vector(width, MK_BODY(int64_t i, int64_t lanes) {
                    vf value = load_part(x + i, lanes), d_value = {};
                    for (int64_t at = i; at < parts; at += width) {
                        vf d = load_part(d_v + at, lanes);
                        d_value += d * load_part(of.weight + at, lanes);
                        add_part(sums + at, d * value, lanes);
                    }
                    store_part(d_x + i, d_value, lanes);
                });
            }
    });
    add_tasks(task_sums, tasks, parts, call.d_weight);
}

static void expand_ranks(const ExpandRanks& call) {
    with_numbers(call.inputs.narrow, [&](auto number) { expand_ranks_of<decltype(number)>(call); });
}
static void expand_ranks_backward(const ExpandRanksBackward& call) {
    with_numbers(call.inputs.narrow, [&](auto number) { expand_ranks_backward_of<decltype(number)>(call); });
}

}  // namespace MK_ISA
