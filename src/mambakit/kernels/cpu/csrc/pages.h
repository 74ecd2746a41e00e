// Memory that has not been touched yet, in large pages.
#pragma once

#include "border.h"

#include <stdint.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace MK_ISA {

struct LargePages {
    MK_FIELDS(LargePages,
        void* start;
        int64_t bytes;
    )
};

// A hint. Where the system gives large pages only to those who ask, touching fresh memory for the first time takes
// several times as long as writing to it.
static void large_pages(const LargePages& call) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21, start = (uintptr_t)call.start;
    uintptr_t begin = (start + page - 1) & ~(page - 1), end = (start + call.bytes) & ~(page - 1);
    if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace MK_ISA
