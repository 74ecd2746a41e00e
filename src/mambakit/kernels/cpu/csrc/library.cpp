// What is not a kernel: what is set once at load.
#define MK_ISA library
#include "extension.h"
#include "threads.h"

#ifdef MK_X86
#include <cpuid.h>
#endif

// On a Zen 5, four places of a matrix are read at memory's speed that way. On a Zen 4, the closest cache waits for too few lines
// at a time: 24 GB/s where the second one has 31.
static bool asks_closest() {
#ifdef MK_X86
    uint32_t a, vendor, c, d;
    if (!__get_cpuid(0, &a, &vendor, &c, &d) || vendor != signature_AMD_ebx || !__get_cpuid(1, &a, &vendor, &c, &d)) return false;
    return (a >> 8 & 15) == 15 && (a >> 20 & 255) >= 11;
#else
    return false;
#endif
}

const bool mk_asks_closest = asks_closest();
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
