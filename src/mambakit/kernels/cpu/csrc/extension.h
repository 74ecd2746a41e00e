// What a processor may have beyond the instruction set that a source is compiled for: instructions that multiply narrow
// numbers. They are written out as such, so that every compiler with the instruction set makes them.
#pragma once

#include <stdint.h>

#include "x86.h"

// Each includes those before it: int8 products (AVX-512 VNNI or AVX-VNNI, Arm's dot products), bfloat16 products (AVX-512
// BF16, Arm's BF16), int8 products of two rows with two (Arm's I8MM).
enum mk_extension : int32_t { MK_NO_EXTENSION, MK_VNNI, MK_BF16, MK_I8MM };

// Set once at load (library.cpp), to at most what mk_extension_of_<instruction set>() answers.
extern int32_t mk_extension_in_use;

// Beside either, for the many rows of a prompt on x86: tiles, emulated or of AMX (amx_product.h). Set once at load too.
enum mk_tiles : int32_t { MK_NO_TILES, MK_EMULATED_TILES, MK_AMX };
extern int32_t mk_tiles_in_use;

// Whether memory is read fastest if it is asked for into the cache closest by (library.cpp).
extern const bool mk_asks_closest;

#define MK_EXTENSION_OF(isa) extern "C" __attribute__((visibility("default"))) int32_t mk_extension_of_##isa()
