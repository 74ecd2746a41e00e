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
    const uintptr_t page = 1 << 21, start = (uintptr_t)call.start, end = start + call.bytes, more = page - 1;
    const uintptr_t first = (start + more) & ~more, last = end & ~more;
#if !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25  // since Linux 6.1; others say that they do not know it
#endif
    auto ask = [&](uintptr_t from, uintptr_t to) {
        if (from >= to) return;
        madvise((void*)from, to - from, MADV_HUGEPAGE);
        if (call.touched) madvise((void*)from, to - from, MADV_COLLAPSE);
    };
    ask(first, last);
    if (!call.touched) return;
    // The ends by themselves: where a neighbour may not move, the system moves nothing that was asked for together with it.
    if (start < first) ask(first - page, first);
    if (last < end && last >= first) ask(last, last + page);
#endif
}

}  // namespace MK_ISA
