#include "x86.h"
#ifdef MK_X86
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi,bmi2,prefer-vector-width=512")
#define MK_ISA avx512
#define MK_WIDTH 16
#include "kernels.h"
#endif
