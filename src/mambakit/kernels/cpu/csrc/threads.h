// torch's thread pool, and memory that a thread keeps between calls.
#pragma once

#include <stdint.h>
#include <stdlib.h>

typedef void (*mk_body)(int64_t begin, int64_t end, void* context);
typedef int32_t (*mk_parallel_for)(int64_t begin, int64_t end, int64_t grain, mk_body body, void* context);
typedef int32_t (*mk_get_num_threads)(uint32_t* count);

// Set once at load (library.cpp); without them everything runs in the calling thread.
extern mk_parallel_for mk_torch_parallel_for;
extern mk_get_num_threads mk_torch_get_num_threads;

namespace MK_ISA {

// body(begin, end) over disjoint ranges that cover [0, n). The split depends on n and the number of threads alone, so
// results repeat from run to run.
template <class Body>
static void parallel(int64_t n, const Body& body) {
    if (n <= 0) return;
    if (n == 1 || !mk_torch_parallel_for) {
        body(int64_t(0), n);
        return;
    }
    mk_torch_parallel_for(
        0, n, 1, [](int64_t begin, int64_t end, void* context) { (*(const Body*)context)(begin, end); }, (void*)&body);
}

static inline int64_t num_threads() {
    uint32_t count = 1;
    if (mk_torch_get_num_threads) mk_torch_get_num_threads(&count);
    return count;
}

// At least `floats` floats on a 64-byte boundary, not cleared, valid until this thread's next call of the same `slot`.
// Kept by the thread: fresh pages for every call would cost more than most kernels.
struct Scratch {
    float* data = nullptr;
    int64_t size = 0;
    ~Scratch() { free(data); }
};
template <int slot>
static float* scratch(int64_t floats) {
    static thread_local Scratch kept;
    if (floats > kept.size) {
        free(kept.data);
        kept.size = (floats + 1023) / 1024 * 1024;
        kept.data = (float*)aligned_alloc(64, kept.size * sizeof(float));
        if (!kept.data) abort();
    }
    return kept.data;
}

}  // namespace MK_ISA
