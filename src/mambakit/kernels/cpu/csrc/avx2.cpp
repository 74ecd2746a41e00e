#include "extension.h"
#ifdef MK_X86
MK_CAN_RUN(avx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2");
}
MK_EXTENSION_OF(avx2) { return __builtin_cpu_supports("avxvnni") ? MK_VNNI : MK_NO_EXTENSION; }
#pragma GCC target("avx2,fma,bmi,bmi2")
#define MK_ISA avx2
#define MK_WIDTH 8
#include "kernels.h"
#endif
