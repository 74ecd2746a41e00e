// For every machine: what the compiler's default target has (SSE2, NEON, ...).
#define MK_ISA plain
#define MK_WIDTH 4
#include "kernels.h"
