// The matrices of a chunk as factors of products: floats as they lie, or bfloat16 in words of two (`Factors` of
// small_gemm.h). By where the numbers of a word lie in the matrix,
//
//     rows    side by side: the left factor of a product over columns
//     across  the same, transposed: its right factor
//     down    below each other: either factor of a product over rows
//
// A matrix of floats is its own rows and its own down; others are made in a `room` as large as the matrix.
#pragma once

#include "bfloat16.h"
#include "rows.h"
#include "small_gemm.h"

namespace MK_ISA {
namespace ssd {

template <class Factors>
constexpr int64_t words(int64_t numbers) {
    return ceil_div(numbers, Factors::HELD);
}

#if defined(MK_X86) && MK_WIDTH == 16
// A vector of words: the numbers of `first`, each with that of `second` behind it.
MK_INLINE vf paired(vf first, vf second) {
    vi both;
    __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(second), "v"(first));
    typedef uint16_t vw __attribute__((vector_size(4 * MK_WIDTH)));
    return (vf)__builtin_shuffle((vw)both, vw{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
}
MK_INLINE vh rounded_natively(vf x) {
    vh bits;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(bits) : "v"(x));
    return bits;
}
#endif

// A vector of bfloat16.
template <class Factors>
MK_INLINE void put_rounded(bfloat16* to, vf x) {
    if constexpr (Factors::HELD == 1) store(to, x);
#if defined(MK_X86) && MK_WIDTH == 16
    else {
        vh bits = rounded_natively(x);
        memcpy(to, &bits, sizeof bits);
    }
#endif
}

// Numbers [at, at + W) of a row, whose words begin at `row`.
template <class Factors>
MK_INLINE void put_numbers(float* row, int64_t at, vf x) {
    if constexpr (Factors::HELD == 1) store(row + at, x);
    else put_rounded<Factors>((bfloat16*)row + at, x);
}
template <class Factors>
MK_INLINE vf get_numbers(const float* row, int64_t at) {
    if constexpr (Factors::HELD == 1) return load(row + at);
    else return load((const bfloat16*)row + at);
}

// Of a matrix in words down or across, W numbers of matrix row `i`. Which of a word's, has to be known: i is even + k.
template <class Factors>
MK_INLINE vf numbers_of(const float* matrix, int64_t ld, int64_t i, int k, int64_t column) {
    if constexpr (Factors::HELD == 1) return load(matrix + (i + k) * ld + column);
    vi word = (vi)load(matrix + (i + k) / 2 * ld + column);
    return (vf)(k % 2 ? word & splat_int((int32_t)0xffff0000) : word << 16);
}

// Words down from numbers(i, j), the vector from column j on of row i.
template <class Numbers>
MK_INLINE void pair_rows(int64_t rows, int64_t width, float* room, const Numbers& numbers) {
#if defined(MK_X86) && MK_WIDTH == 16
    for (int64_t i = 0; i < rows; i += 2, room += width)
        for (int64_t j = 0; j < width; j += W)
            store(room + j, paired(numbers(i, j), i + 1 < rows ? numbers(i + 1, j) : vf{}));
#endif
}

// Of a matrix of floats.
template <class Factors>
MK_INLINE const float* as_rows(const float* matrix, int64_t rows, int64_t width, float* room) {
    if constexpr (Factors::HELD == 1) return matrix;
    for (int64_t i = 0; i < rows * width; i += W) put_numbers<Factors>(room, i, load(matrix + i));
    return room;
}
template <class Factors>
MK_INLINE const float* as_down(const float* matrix, int64_t rows, int64_t width, float* room) {
    if constexpr (Factors::HELD == 1) return matrix;
    pair_rows(rows, width, room, MK_BODY(int64_t i, int64_t j) { return load(matrix + i * width + j); });
    return room;
}

// Of a matrix in words by rows.
template <class Factors>
MK_INLINE const float* rows_as_down(const float* matrix, int64_t rows, int64_t width, float* room) {
    if constexpr (Factors::HELD == 1) return matrix;
    const bfloat16* numbers = (const bfloat16*)matrix;
    for (int64_t i = 0; i < rows; i += 2)
        for (int64_t j = 0; j < width; j += W) {
            vh first, second = {};
            memcpy(&first, numbers + i * width + j, sizeof first);
            if (i + 1 < rows) memcpy(&second, numbers + (i + 1) * width + j, sizeof second);
            vi word = __builtin_convertvector(first, vi) | __builtin_convertvector(second, vi) << 16;
            store(room + i / 2 * width + j, (vf)word);
        }
    return room;
}
// The same, row i times weight(i).
template <class Factors, class Weight>
MK_INLINE void weigh_rows_down(const float* matrix, int64_t rows, int64_t width, const Weight& weight, float* to) {
    if constexpr (Factors::HELD == 1) {
        for (int64_t i = 0; i < rows; i++) {
            vf factor = splat(weight(i));
            for (int64_t j = 0; j < width; j += W) store(to + i * width + j, factor * load(matrix + i * width + j));
        }
    } else {
        const bfloat16* numbers = (const bfloat16*)matrix;
        pair_rows(rows, width, to, MK_BODY(int64_t i, int64_t j) { return splat(weight(i)) * load(numbers + i * width + j); });
    }
}

// And for words what rounding has left of each number, rounded in its turn: 16 bits of the number in all. Returns these
// rests, or null.
template <class Factors, class Weight>
MK_INLINE const float* weigh_rows_twice(const float* matrix, int64_t rows, int64_t width, const Weight& weight, float* to) {
    if constexpr (Factors::HELD == 1) {
        weigh_rows_down<Factors>(matrix, rows, width, weight, to);
        return nullptr;
    }
#if defined(MK_X86) && MK_WIDTH == 16
    float* rests = to + words<Factors>(rows) * width;
    const bfloat16* numbers = (const bfloat16*)matrix;
    for (int64_t i = 0; i < rows; i += 2)
        for (int64_t j = 0, at = i / 2 * width; j < width; j += W, at += W) {
            vf first = splat(weight(i)) * load(numbers + i * width + j), second = {};
            if (i + 1 < rows) second = splat(weight(i + 1)) * load(numbers + (i + 1) * width + j);
            vf word = paired(first, second);
            store(to + at, word);
            vf first_rest = first - (vf)((vi)word << 16);
            store(rests + at, paired(first_rest, second - (vf)((vi)word & splat_int((int32_t)0xffff0000))));
        }
    return rests;
#endif
}

}  // namespace ssd
}  // namespace MK_ISA
