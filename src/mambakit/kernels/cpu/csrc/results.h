// Where products go, and how far ahead of them memory is asked for.
#pragma once

#include <stdint.h>

#include "extension.h"

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
// The same for each of four rows that are far apart, and for each of four rows of codes, which take longer: into the second
// cache, or where `mk_asks_closest` says so, into the closest one.
struct Soon {
    int64_t second, closest;
};
constexpr Soon SOON_OF_EACH = {1024, 1536}, SOON_OF_CODES = {2560, 3072};

static inline __attribute__((always_inline)) void prefetch_soon(bool closest, const void* at, Soon soon) {
    if (closest) __builtin_prefetch((const void*)((uintptr_t)at + soon.closest), 0, 3);
    else __builtin_prefetch((const void*)((uintptr_t)at + soon.second), 0, 2);
}

}  // namespace MK_ISA
