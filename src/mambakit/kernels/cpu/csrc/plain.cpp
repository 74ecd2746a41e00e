// For every machine: what the compiler's default target has (SSE2, NEON, ...).
#include "extension.h"
MK_CAN_RUN(plain) { return 1; }
// None of ours: whether other libraries may have wider vectors where these kernels are the best.
MK_CAN_RUN(avx) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx") != 0;
#else
    return 0;
#endif
}
MK_EXTENSION_OF(plain) { return MK_NO_EXTENSION; }
#define MK_ISA plain
#define MK_WIDTH 4
#include "kernels.h"
