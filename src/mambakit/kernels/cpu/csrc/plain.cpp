// For every machine: what the compiler's default target has (SSE2, NEON, ...).
#include "extension.h"
MK_CAN_RUN(plain) { return 1; }
MK_EXTENSION_OF(plain) { return MK_NO_EXTENSION; }
#define MK_ISA plain
#define MK_WIDTH 4
#include "kernels.h"
