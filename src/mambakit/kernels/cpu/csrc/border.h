// What crosses the border to Python: the kernels, and the structs whose fields it fills in.
#pragma once

#include "threads.h"

// The fields of a struct, and their declarations as a text that Python compares with its own (structs.py).
#define MK_FIELDS(Name, ...) \
    __VA_ARGS__              \
    static constexpr char LAYOUT[] = #Name "{" #__VA_ARGS__ "}";

// A function that Python finds as mk_name_<instruction set>. It returns a status, which is zero if all went well.
#define MK_JOIN_(a, b, c) a##b##_##c
#define MK_JOIN(a, b, c) MK_JOIN_(a, b, c)
#define MK_EXPORT(name) extern "C" __attribute__((visibility("default"))) int32_t MK_JOIN(mk_, name, MK_ISA)
#define MK_BEGIN try {
#define MK_END      \
    return MK_DONE; \
    }               \
    catch (mk_status status) { return status; }
