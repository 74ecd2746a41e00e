// Whether this compiler can switch instruction sets inside a file: GCC on x86-64. Elsewhere `plain` is all there is.
#pragma once
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MK_X86
#endif
