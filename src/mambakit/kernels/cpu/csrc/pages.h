// Memory that has not been touched yet, in large pages.
#pragma once

#include "border.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

// A hint. Where the system gives large pages only to those who ask, touching fresh memory for the first time takes
// several times as long as writing to it.
MK_EXPORT(large_pages)(char* from, int64_t bytes) {
    MK_BEGIN
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21;
    uintptr_t begin = ((uintptr_t)from + page - 1) & ~(page - 1), end = ((uintptr_t)from + bytes) & ~(page - 1);
    if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
    MK_END
}
