// torch's thread pool, memory that a thread keeps between calls, and what a kernel says when one of them is refused.
#pragma once

#include <stdint.h>
#include <stdlib.h>

#include "crew.h"

// What a kernel returns, and throws inside; STATUS of library.py says it in words.
enum mk_status : int32_t { MK_DONE, MK_NO_MEMORY, MK_NO_THREADS };

typedef void (*mk_body)(int64_t begin, int64_t end, void* context);
typedef int32_t (*mk_parallel_for)(int64_t begin, int64_t end, int64_t grain, mk_body body, void* context);
typedef int32_t (*mk_get_num_threads)(uint32_t* count);

// Set once at load (library.cpp); without them everything runs in the calling thread.
extern mk_parallel_for mk_torch_parallel_for;
extern mk_get_num_threads mk_torch_get_num_threads;

namespace MK_ISA {

static inline int64_t num_threads() {
    uint32_t count = 1;
    if (mk_torch_get_num_threads && mk_torch_get_num_threads(&count)) throw MK_NO_THREADS;
    return count;
}

// A body that other threads run too. What is thrown there is thrown once more in this one.
template <class Body>
struct Task {
    const Body& body;
    mk_status thrown = MK_DONE;

    void run(int64_t begin, int64_t end) {
        try {
            body(begin, end);
        } catch (mk_status status) {
            __atomic_store_n(&thrown, status, __ATOMIC_RELAXED);
        }
    }
    void done() const {
        if (thrown) throw thrown;
    }
};

// body(begin, end) over disjoint ranges that cover [0, n). The split depends on n and the number of threads alone, so
// results repeat from run to run.
template <class Body>
static void parallel(int64_t n, const Body& body) {
    if (n <= 0) return;
    if (n == 1 || !mk_torch_parallel_for) {
        body(int64_t(0), n);
        return;
    }
    if (Crew* crew = Crew::led()) {
        struct Shared {
            Task<Body> task;
            int64_t n, shares;
        } shared = {{body}, n, n < crew->threads ? n : crew->threads};
        auto run = [](int64_t share, void* context) {
            Shared& all = *(Shared*)context;
            all.task.run(all.n * share / all.shares, all.n * (share + 1) / all.shares);
        };
        crew->run(shared.shares, run, &shared);
        return shared.task.done();
    }
    Task<Body> task = {body};
    auto run = [](int64_t begin, int64_t end, void* context) { ((Task<Body>*)context)->run(begin, end); };
    int32_t failed = mk_torch_parallel_for(0, n, 1, run, &task);
    task.done();
    // Some ranges may have run and others not, and a state that changes in place must not change twice: no second try.
    if (failed) throw MK_NO_THREADS;
}

// body(), whose parallel loops all have the same threads.
template <class Body>
static void with_crew(const Body& body) {
    const int64_t threads = num_threads();
    if (threads == 1 || !mk_torch_parallel_for || Crew::led()) return body();
    Crew crew(threads);
    parallel(crew.threads, [&](int64_t begin, int64_t) {
        if (begin) return crew.help(begin);
        // Whatever happens, the others are let go.
        struct Lead {
            Crew& crew;
            Lead(Crew& crew) : crew(crew) { Crew::led() = &crew; }
            ~Lead() {
                Crew::led() = nullptr;
                crew.end();
            }
        } lead(crew);
        body();
    });
}

// One for each purpose: no two that are in use at the same time may share one. Those that say so are the calling
// thread's and seen by all others, the rest are each thread's own.
enum Slot {
    TASK_SUMS,  // the calling thread's: gradients of parameters, task by task
    CONV_TAPS,  // the calling thread's
    CONV_ROWS,
    NORM_GROUP,
    TURN_ANGLES,  // the calling thread's
    TURN_RATES,
    PREPARE_TOKEN,
    SCAN_PART,
    SCAN_SUMS,
    SSD_CHUNK,
    PRODUCT_ROWS,
    PRODUCT_SCALES,
    PRODUCT_NARROW,
    PRODUCT_DECODED,
    PRODUCT_WIDENED,
    PRODUCT_SHARED,  // the calling thread's
    STEP_ROWS,   // the calling thread's
    STEP_FRESH,  // the calling thread's
    STEP_HEAD,
    STEP_STATE,
    STEP_SCORES,
    DECODE_RESIDUAL,  // the calling thread's, like those that follow
    DECODE_INPUT,
    DECODE_PROJECTED,
    DECODE_INNER,
    DECODE_SMALL,
    DECODE_DT,
    DECODE_CHOICES,
    DECODE_NORMED,
    DECODE_GATHERED,
};

// At least `floats` floats on a 64-byte boundary, not cleared, valid until this thread's next call of the same `slot`.
// Kept by the thread: fresh pages for every call would cost more than most kernels.
struct Scratch {
    float* data = nullptr;
    int64_t size = 0;
    ~Scratch() { free(data); }
};
template <Slot slot>
static float* scratch(int64_t floats) {
    static thread_local Scratch kept;
    if (floats > kept.size) {
        free(kept.data);
        kept.size = (floats + 1023) / 1024 * 1024;
        kept.data = (float*)aligned_alloc(64, kept.size * sizeof(float));
        if (!kept.data) {
            kept.size = 0;
            throw MK_NO_MEMORY;
        }
    }
    return kept.data;
}

}  // namespace MK_ISA
