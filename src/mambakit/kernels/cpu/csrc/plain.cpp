// For every machine: what the compiler's default target has (SSE2, NEON, ...).
#include "x86.h"
MK_CAN_RUN(plain) { return 1; }
#define MK_ISA plain
#define MK_WIDTH 4
#include "kernels.h"
