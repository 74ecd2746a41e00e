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
// The same where few rows of x meet the weights in the order in which they lie, where they meet four neighbouring rows of the
// matrix together, and for each of four rows that are far apart. Into the cache closest by: what is in order there waits for
// nothing else.
constexpr int64_t SOON = 6144, SOON_OF_FOUR = 12288, SOON_OF_EACH = 1536;

static inline __attribute__((always_inline)) void prefetch_soon(const void* at, int64_t bytes = SOON) {
    __builtin_prefetch((const void*)((uintptr_t)at + bytes), 0, 3);
}

}  // namespace MK_ISA
