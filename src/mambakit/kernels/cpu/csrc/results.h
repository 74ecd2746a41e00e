// Where products go, and how far ahead of them memory is asked for.
#pragma once

#include <stdint.h>

namespace MK_ISA {

// y[b * stride + row], times `scale`, on top of what is there if `add`.
struct Results {
    float* y;
    int64_t stride;
    bool add;
    float scale = 1.0f;
};

// Bytes between what is multiplied and what is asked for from memory.
constexpr int64_t AHEAD = 8192;
// The same where one row of x meets the weights in the order in which they lie. Into the second cache, as everywhere: the
// one closest by waits for few lines at a time, fewer than memory's speed takes.
constexpr int64_t SOON = 2048;

static inline __attribute__((always_inline)) void prefetch_soon(const void* at) {
    __builtin_prefetch((const void*)((uintptr_t)at + SOON), 0, 2);
}

}  // namespace MK_ISA
