// Loops over the channels of a token, and over tokens in tasks.
#pragma once

#include <float.h>

#include "bfloat16.h"
#include "vec.h"

namespace MK_ISA {

// body(i, lanes) over [0, n): `lanes` floats from i on, W of them in every call but the last.
template <class Body>
MK_INLINE void each_vector(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; i + W <= n; i += W) body(i, W);
    if (i < n) body(i, n - i);
}

MK_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
constexpr int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

// A number that is known to the compiler, as an argument.
template <int n>
struct Count {
    static constexpr int value = n;
};

// Pointers to nothing may be null, which memset and memcpy do not take.
template <class T>
MK_INLINE void clear(T* to, int64_t n) {
    if (n > 0) memset(to, 0, n * sizeof(T));
}
template <class T>
MK_INLINE void copy(const T* from, int64_t n, T* to) {
    if (n > 0) memcpy(to, from, n * sizeof(T));
}

template <class Number>
MK_INLINE void add_part(Number* to, vf x, int64_t lanes) { store_part(to, load_part(to, lanes) + x, lanes); }
template <class Number>
MK_INLINE void put_part(Number* to, vf x, int64_t lanes, bool add) {
    if (add) add_part(to, x, lanes);
    else store_part(to, x, lanes);
}

// Tokens go to a number of tasks that does not depend on the number of threads, nor do sums over them.
constexpr int64_t MOST_TASKS = 32;

MK_INLINE int64_t count_tasks(int64_t rows, int64_t rows_each) {
    int64_t tasks = ceil_div(rows, rows_each);
    return tasks < 1 ? 1 : tasks > MOST_TASKS ? MOST_TASKS : tasks;
}
MK_INLINE int64_t begin_of(int64_t task, int64_t tasks, int64_t rows) { return rows * task / tasks; }

// total[i] = sum over tasks of parts[task][i], in their order.
static void add_tasks(const float* parts, int64_t tasks, int64_t n, float* total) {
    each_vector(n, MK_BODY(int64_t i, int64_t lanes) {
        vf x = {};
        for (int64_t task = 0; task < tasks; task++) x += load_part(parts + task * n + i, lanes);
        store_part(total + i, x, lanes);
    });
}

// 1 / sqrt(mean(x^2) + eps), scaled before it is squared. What is no number stays what it is.
template <class Number>
static float scaled_inverse_rms(const Number* x, int64_t n, float eps) {
    float largest = 0.0f, total = 0.0f;
    for (int64_t i = 0; i < n; i++)
        if (!(fabsf((float)x[i]) <= largest)) largest = fabsf((float)x[i]);
    if (!(largest > 0.0f && largest <= FLT_MAX)) return 1.0f / sqrtf(largest + eps);
    for (int64_t i = 0; i < n; i++) total += (x[i] / largest) * (x[i] / largest);
    return 1.0f / sqrtf(total / n + eps / largest / largest) / largest;
}

// The same from the sum of the n squares. `values` gives the numbers where that has left the range of float32.
template <class Values>
MK_INLINE float inverse_rms(vf squares, int64_t n, float eps, const Values& values) {
    const float mean = sum(squares) / n;
    return mean <= FLT_MAX && mean + eps > 1e-30f ? 1.0f / sqrtf(mean + eps) : scaled_inverse_rms(values(), n, eps);
}
template <class Number>
MK_INLINE float inverse_rms(const Number* x, int64_t n, float eps) {
    vf squares = {};
    each_vector(n, MK_BODY(int64_t i, int64_t lanes) {
        vf part = load_part(x + i, lanes);
        squares += part * part;
    });
    return inverse_rms(squares, n, eps, [=] { return x; });
}

// y = x / sqrt(mean(x^2) + eps) weight; returns the factor without the weight.
template <class Number>
MK_INLINE float rms_norm(const Number* x, int64_t n, const float* weight, float eps, float* y) {
    const float inverse = inverse_rms(x, n, eps);
    each_vector(n, MK_BODY(int64_t i, int64_t lanes) {
        store_part(y + i, load_part(x + i, lanes) * splat(inverse) * load_part(weight + i, lanes), lanes);
    });
    return inverse;
}

}  // namespace MK_ISA
