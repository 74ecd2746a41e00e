// What crosses the border to Python: structs whose fields it fills in, one for each kernel and others inside of them.
#pragma once

// The fields of a struct, and their declarations as a text that Python compares with its own (structs.py).
#define MK_FIELDS(Name, ...) \
    __VA_ARGS__              \
    static constexpr char LAYOUT[] = #Name "{" #__VA_ARGS__ "}";
