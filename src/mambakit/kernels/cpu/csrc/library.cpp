// What is not a kernel: what is set once at load.
#define MK_ISA library
#include "extension.h"
#include "threads.h"

int32_t mk_extension_in_use = MK_NO_EXTENSION;
int32_t mk_tiles_in_use = MK_NO_TILES;
mk_parallel_for mk_torch_parallel_for = nullptr;
mk_get_num_threads mk_torch_get_num_threads = nullptr;

extern "C" __attribute__((visibility("default"))) void mk_set_threads(void* parallel_for, void* get_num_threads) {
    mk_torch_parallel_for = (mk_parallel_for)parallel_for;
    mk_torch_get_num_threads = (mk_get_num_threads)get_num_threads;
}

extern "C" __attribute__((visibility("default"))) void mk_set_extension(int64_t extension) {
    mk_extension_in_use = (int32_t)extension;
}

extern "C" __attribute__((visibility("default"))) void mk_set_tiles(int64_t tiles) { mk_tiles_in_use = (int32_t)tiles; }
