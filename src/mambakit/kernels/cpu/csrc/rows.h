// Loops over the channels of a token, and over tokens in tasks.
#pragma once

namespace MK_ISA {

// A method, and a lambda, that becomes part of its caller, so that vectors stay in registers.
#define MK_INSIDE inline __attribute__((always_inline))
#define MK_BODY(...) [&](__VA_ARGS__) __attribute__((always_inline))

// body(i, lanes) over [0, n): `lanes` floats from i on, W of them in every call but the last.
template <class Body>
MK_INLINE void each_vector(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; i + W <= n; i += W) body(i, W);
    if (i < n) body(i, n - i);
}

MK_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Pointers to nothing may be null, which memset and memcpy do not take.
template <class T>
MK_INLINE void clear(T* to, int64_t n) {
    if (n > 0) memset(to, 0, n * sizeof(T));
}
template <class T>
MK_INLINE void copy(const T* from, int64_t n, T* to) {
    if (n > 0) memcpy(to, from, n * sizeof(T));
}

MK_INLINE void add_part(float* to, vf x, int64_t lanes) { store_part(to, load_part(to, lanes) + x, lanes); }

// Tokens go to a number of tasks that does not depend on the number of threads, nor do sums over them.
constexpr int64_t MOST_TASKS = 32;

MK_INLINE int64_t count_tasks(int64_t rows, int64_t rows_each) {
    int64_t tasks = (rows + rows_each - 1) / rows_each;
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

// The derivative of silu at x, given sigmoid(x).
MK_INLINE vf silu_slope(vf x, vf gate) { return gate + x * gate * (splat(1.0f) - gate); }

}  // namespace MK_ISA
