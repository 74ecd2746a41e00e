// One copy of a token per rank, each with its own weights.
//
//     v[m] = x weight[m]
#pragma once

#include "border.h"
#include "rows.h"
#include "threads.h"

MK_EXPORT(expand_ranks)
(int64_t rows, int64_t ranks, int64_t width, const float* x, int64_t x_row, const float* weight, float* v) {
    MK_BEGIN
    using namespace MK_ISA;
    int64_t tasks = count_tasks(rows, 16);
    parallel(tasks, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin_of(begin, tasks, rows); row < begin_of(end, tasks, rows); row++)
            for (int64_t rank = 0; rank < ranks; rank++)
                each_vector(width, MK_BODY(int64_t i, int64_t lanes) {
                    vf value = load_part(x + row * x_row + i, lanes) * load_part(weight + rank * width + i, lanes);
                    store_part(v + (row * ranks + rank) * width + i, value, lanes);
                });
    });
    MK_END
}

// d_x is [rows, width], d_weight as weight.
MK_EXPORT(expand_ranks_backward)
(int64_t rows, int64_t ranks, int64_t width, const float* x, int64_t x_row, const float* weight, const float* d_v,
 float* d_x, float* d_weight) {
    MK_BEGIN
    using namespace MK_ISA;
    int64_t tasks = count_tasks(rows, 16), parts = ranks * width;
    float* task_sums = scratch<TASK_SUMS>(tasks * parts);
    clear(task_sums, tasks * parts);
    parallel(tasks, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++)
            for (int64_t row = begin_of(task, tasks, rows); row < begin_of(task + 1, tasks, rows); row++)
                each_vector(width, MK_BODY(int64_t i, int64_t lanes) {
                    vf value = load_part(x + row * x_row + i, lanes), d_value = {};
                    for (int64_t rank = 0; rank < ranks; rank++) {
                        vf d = load_part(d_v + (row * ranks + rank) * width + i, lanes);
                        d_value += d * load_part(weight + rank * width + i, lanes);
                        add_part(task_sums + task * parts + rank * width + i, d * value, lanes);
                    }
                    store_part(d_x + row * width + i, d_value, lanes);
                });
    });
    add_tasks(task_sums, tasks, parts, d_weight);
    MK_END
}
