// In the place of library.cpp where the thread sanitizer looks on: it sees these threads begin and end, and torch's not.
#include <thread>
#include <vector>

#define MK_ISA library
#include "extension.h"
#include "threads.h"

static const int64_t THREADS = 4;

static int32_t parallel_for(int64_t begin, int64_t end, int64_t, mk_body body, void* context) {
    std::vector<std::thread> threads;
    int64_t share = (end - begin + THREADS - 1) / THREADS;
    for (int64_t at = begin; at < end; at += share) threads.emplace_back(body, at, at + share < end ? at + share : end, context);
    for (std::thread& thread : threads) thread.join();
    return 0;
}

static int32_t get_num_threads(uint32_t* count) {
    *count = THREADS;
    return 0;
}

int32_t mk_extension_in_use = MK_NO_EXTENSION;
int32_t mk_tiles_in_use = MK_NO_TILES;
const bool mk_asks_closest = false;
mk_parallel_for mk_torch_parallel_for = parallel_for;
mk_get_num_threads mk_torch_get_num_threads = get_num_threads;

extern "C" __attribute__((visibility("default"))) void mk_set_threads(void*, void*) {}
extern "C" __attribute__((visibility("default"))) void mk_set_extension(int64_t extension) {
    mk_extension_in_use = (int32_t)extension;
}
extern "C" __attribute__((visibility("default"))) void mk_set_tiles(int64_t tiles) { mk_tiles_in_use = (int32_t)tiles; }
