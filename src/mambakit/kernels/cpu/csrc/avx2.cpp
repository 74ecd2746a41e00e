#include "x86.h"
#ifdef MK_X86
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#define MK_ISA avx2
#define MK_WIDTH 8
#include "kernels.h"
#endif
