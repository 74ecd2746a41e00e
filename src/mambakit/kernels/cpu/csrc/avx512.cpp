#include "extension.h"
#ifdef MK_X86
MK_CAN_RUN(avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx2") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
MK_EXTENSION_OF(avx512) {
    if (!__builtin_cpu_supports("avx512vnni")) return MK_NO_EXTENSION;
    return __builtin_cpu_supports("avx512bf16") ? MK_BF16 : MK_VNNI;
}
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi,bmi2,prefer-vector-width=512")
#define MK_ISA avx512
#define MK_WIDTH 16
#include "kernels.h"

// Whether MKL, of which torch's float32 products are, leaves half of the vectors' width unused.
MK_PUBLIC int32_t mk_mkl_is_narrow_avx512() { return __builtin_cpu_is("amd") != 0; }

// Why AMX cannot be used, or "": what the processor and the system say, and, asked if they do not object, what a trial says.
MK_PUBLIC const char* mk_amx_refused_avx512() { return amx_refused(); }
MK_PUBLIC const char* mk_amx_differs_avx512() {
    try {
        return avx512::amx_differs();
    } catch (mk_status) {
        return "there was no memory to try it";
    }
}
#endif
