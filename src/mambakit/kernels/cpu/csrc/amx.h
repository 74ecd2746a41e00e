// AMX: whether this process may use it, and another process to try it in. Linux alone, which lends its registers on demand.
#pragma once

#include "x86.h"

#if defined(MK_X86) && defined(__linux__)
#include <cpuid.h>
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

// Why not, or "". What is granted holds for all threads, those to come included.
static inline const char* amx_refused() {
    const uint32_t needed = 1u << 22 | 1u << 24 | 1u << 25;  // its bfloat16, tiles and int8
    uint32_t a, b, c, d, kept, above;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & needed) != needed) return "the processor has none";
    __get_cpuid(1, &a, &b, &c, &d);
    if (!(c >> 27 & 1)) return "the system keeps no registers";
    __asm__("xgetbv" : "=a"(kept), "=d"(above) : "c"(0));
    if ((kept >> 17 & 3) != 3) return "the system does not keep its registers";
    const long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // as in asm/prctl.h, which older systems do not have whole
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) return "the system refuses it to this process";
    return "";
}

// What `body` returns, from 0 to 127, in a process that may die of it: -1 if it did, or could not be made. Nobody is told of
// its end, and nothing is left of it. It is alone with what another thread may have locked: `body` must not allocate.
template <class Body>
static int32_t in_a_child(const Body& body) {
    const pid_t child = (pid_t)syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr);
    if (child == 0) {
        const int deadly[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};
        for (int number : deadly) signal(number, SIG_DFL);
        prctl(PR_SET_DUMPABLE, 0);
        _exit(body());
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, __WALL) < 0)
        if (errno != EINTR) return -1;
    return child > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#elif defined(MK_X86)
static inline const char* amx_refused() { return "it is used on Linux alone"; }
template <class Body>
static int32_t in_a_child(const Body&) { return -1; }
#endif
