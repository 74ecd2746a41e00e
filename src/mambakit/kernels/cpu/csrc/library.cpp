// What is not a kernel: the choice of the instruction set, and torch's thread pool handed in at load.
#define MK_ISA library
#include "threads.h"
#include "x86.h"

#define MK_PUBLIC extern "C" __attribute__((visibility("default")))

mk_parallel_for mk_torch_parallel_for = nullptr;
mk_get_num_threads mk_torch_get_num_threads = nullptr;

MK_PUBLIC void mk_set_threads(void* parallel_for, void* get_num_threads) {
    mk_torch_parallel_for = (mk_parallel_for)parallel_for;
    mk_torch_get_num_threads = (mk_get_num_threads)get_num_threads;
}

// Bits: 1 AVX2, 2 AVX-512 with VNNI.
MK_PUBLIC int32_t mk_instruction_sets() {
    int32_t found = 0;
#ifdef MK_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) found |= 1;
    if (found && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        found |= 2;
#endif
    return found;
}
