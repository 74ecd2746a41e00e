// What is not a kernel: torch's thread pool, handed in at load.
#define MK_ISA library
#include "threads.h"

mk_parallel_for mk_torch_parallel_for = nullptr;
mk_get_num_threads mk_torch_get_num_threads = nullptr;

extern "C" __attribute__((visibility("default"))) void mk_set_threads(void* parallel_for, void* get_num_threads) {
    mk_torch_parallel_for = (mk_parallel_for)parallel_for;
    mk_torch_get_num_threads = (mk_get_num_threads)get_num_threads;
}
