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

}  // namespace MK_ISA
