// Memory in large pages.
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
        bool touched;  // it is in use: what is there moves into them, with its neighbours at both ends
    )
};

// A hint. Where the system gives large pages only to those who ask, touching fresh memory for the first time takes
// several times as long as writing to it, and what is read in order waits at the end of every small page.
static void large_pages(const LargePages& call) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21, start = (uintptr_t)call.start, more = page - 1;
    const uintptr_t begin = (start + (call.touched ? 0 : more)) & ~more;
    const uintptr_t end = (start + call.bytes + (call.touched ? more : 0)) & ~more;
    if (begin >= end) return;
    madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#if !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25  // since Linux 6.1; others say that they do not know it
#endif
    if (call.touched) madvise((void*)begin, end - begin, MADV_COLLAPSE);
#endif
}

}  // namespace MK_ISA
