// For 64-bit Arm, which always has NEON. The extensions are asked for where the system tells them.
#include "extension.h"
#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
// As in asm/hwcap.h, which older systems do not have whole.
static bool has_dot_products() { return getauxval(AT_HWCAP) >> 20 & 1; }
static bool has_bfloat16() { return getauxval(AT_HWCAP2) >> 14 & 1; }
static bool has_pairs() { return getauxval(AT_HWCAP2) >> 13 & 1; }
#elif defined(__APPLE__)
#include <sys/sysctl.h>
static bool has(const char* feature) {
    int32_t answer = 0;
    size_t size = sizeof answer;
    return sysctlbyname(feature, &answer, &size, nullptr, 0) == 0 && answer;
}
static bool has_dot_products() { return has("hw.optional.arm.FEAT_DotProd"); }
static bool has_bfloat16() { return has("hw.optional.arm.FEAT_BF16"); }
static bool has_pairs() { return has("hw.optional.arm.FEAT_I8MM"); }
#else
static bool has_dot_products() { return false; }
static bool has_bfloat16() { return false; }
static bool has_pairs() { return false; }
#endif
MK_CAN_RUN(neon) { return 1; }
MK_EXTENSION_OF(neon) {
    if (!has_dot_products()) return MK_NO_EXTENSION;
    if (!has_bfloat16()) return MK_VNNI;
    return has_pairs() ? MK_I8MM : MK_BF16;
}
#define MK_ISA neon
#define MK_WIDTH 4
#define MK_NEON
#include "kernels.h"
#endif
