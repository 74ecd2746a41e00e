// Whether this compiler can switch instruction sets inside a file: GCC on x86-64. Elsewhere there are `plain` and, on 64-bit
// Arm, `neon`.
#pragma once

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MK_X86
#endif

// mk_can_run_<instruction set>(): whether this machine has everything that the file's `#pragma GCC target` lists. It
// stands before the pragma, so that any machine can ask.
#define MK_CAN_RUN(isa) extern "C" __attribute__((visibility("default"))) int32_t mk_can_run_##isa()
