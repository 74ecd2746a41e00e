// Products of narrow weights with the many rows of a prompt by AMX, which multiplies tiles of 16 rows with 64 bytes each.
// A line of 16 rows of x is such a tile as it lies, and so is one of a panel of panel_product.h.
//
// What is done with tiles has two forms: the instructions, and plain loops with what Intel documents of them, which run
// anywhere. Sums of integers are those of narrow_product.h to the last digit, those of bfloat16 are in another order.
#pragma once

#include "amx.h"
#include "panel_product.h"

#if defined(MK_X86) && MK_WIDTH == 16

namespace MK_ISA {

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = TILE_ROWS * LINE;
static_assert(W == TILE_ROWS && MANY_ROWS >= 2 * TILE_ROWS, "a panel is as wide as a tile, and there are rows for two");

// What the processor is told of its eight tiles: all are whole.
struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64 && offsetof(TileConfig, bytes) == 16 && offsetof(TileConfig, rows) == 48, "");
alignas(64) static constexpr TileConfig TILES = {};

// The tiles of the thread that makes it, for as long as it lives. No compiler uses tiles itself, so none has to be told.
struct AmxTiles {
    AmxTiles() { __asm__ volatile("ldtilecfg %0" : : "m"(TILES)); }
    ~AmxTiles() { __asm__ volatile("tilerelease"); }
    template <int tile>
    MK_INSIDE void zero() {
        __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile));
    }
    template <int tile>
    MK_INSIDE void load(const void* from, int64_t stride) {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
    }
    template <int tile>
    MK_INSIDE void store(void* to, int64_t stride) {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
    }
    template <class Dot, int sums, int x, int w>
    MK_INSIDE void dot() {
        if constexpr (__is_same(Dot, Bfloat16Dot))
            __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(w));
        else __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(w));
    }
};

// The same in plain C++.
struct EmulatedTiles {
    TileConfig config = TILES;
    char data[8][TILE_ROWS][LINE];
    template <int tile>
    void zero() {
        memset(data[tile], 0, TILE_BYTES);
    }
    template <int tile>
    void load(const void* from, int64_t stride) {
        zero<tile>();
        for (int64_t r = 0; r < config.rows[tile]; r++)
            memcpy(data[tile][r], (const char*)from + r * stride, config.bytes[tile]);
    }
    template <int tile>
    void store(void* to, int64_t stride) {
        for (int64_t r = 0; r < config.rows[tile]; r++)
            memcpy((char*)to + r * stride, data[tile][r], config.bytes[tile]);
    }
    // sums[m][n] += x[m][k] w[k][n], where x and w have four int8 or two bfloat16 in the place of a number.
    template <class Dot, int sums, int x, int w>
    void dot() {
        for (int64_t m = 0; m < config.rows[sums]; m++)
            if constexpr (__is_same(Dot, Bfloat16Dot)) add_bfloat16(data[sums][m], data[x][m], data[w], config.rows[w]);
            else add_int8(data[sums][m], data[x][m], data[w], config.rows[w]);
    }
    static void add_int8(char* to, const char* x, const char (*w)[LINE], int64_t count) {
        int32_t sums[LINE / 4];
        memcpy(sums, to, sizeof sums);
        for (int64_t k = 0; k < count; k++)
            for (int64_t n = 0; n < LINE / 4; n++)
                for (int64_t q = 0; q < 4; q++) sums[n] += (int8_t)x[4 * k + q] * (int8_t)w[k][4 * n + q];
        memcpy(to, sums, sizeof sums);
    }
    // The first of each two and the second have sums of their own, which are added to what was there in the end. Each step
    // rounds once, to the nearest, and numbers below the normal ones are zeros.
    static void add_bfloat16(char* to, const char* x, const char (*w)[LINE], int64_t count) {
        float sums[LINE / 4], parts[LINE / 2] = {};
        memcpy(sums, to, sizeof sums);
        for (int64_t k = 0; k < count; k++)
            for (int64_t n = 0; n < LINE / 2; n++)
                parts[n] = normal(__builtin_fmaf(number(x, 2 * k + n % 2), number(w[k], n), parts[n]));
        for (int64_t n = 0; n < LINE / 4; n++) sums[n] = normal(sums[n] + normal(parts[2 * n] + parts[2 * n + 1]));
        memcpy(to, sums, sizeof sums);
    }
    MK_INLINE float normal(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x; }
    MK_INLINE float number(const char* from, int64_t i) {
        uint16_t half;
        float x;
        memcpy(&half, from + 2 * i, sizeof half);
        widen(&half, &x, 1);
        return normal(x);
    }
};

// X times 16 rows of x, `pitch` bytes apart, with P panels. Tiles 0 to 3 are sums, 4 and 5 of x, 6 and 7 of panels.
template <class Dot, int X, int P, class Tiles>
MK_INLINE void tile_block(
    Tiles& tiles, const char* x, int64_t pitch, const char* panel, int64_t lines,
    typename Dot::Sum (&sums)[2][2][TILE_ROWS]) {
    tiles.template zero<0>();
    if (P > 1) tiles.template zero<1>();
    if (X > 1) tiles.template zero<2>();
    if (X > 1 && P > 1) tiles.template zero<3>();
    for (int64_t line = 0; line < lines; line++, x += LINE, panel += TILE_BYTES) {
        tiles.template load<4>(x, pitch);
        tiles.template load<6>(panel, LINE);
        tiles.template dot<Dot, 0, 4, 6>();
        if (P > 1) tiles.template load<7>(panel + lines * TILE_BYTES, LINE);
        if (P > 1) tiles.template dot<Dot, 1, 4, 7>();
        if (X > 1) tiles.template load<5>(x + TILE_ROWS * pitch, pitch);
        if (X > 1) tiles.template dot<Dot, 2, 5, 6>();
        if (X > 1 && P > 1) tiles.template dot<Dot, 3, 5, 7>();
    }
    tiles.template store<0>(sums[0][0], LINE);
    if (P > 1) tiles.template store<1>(sums[0][1], LINE);
    if (X > 1) tiles.template store<2>(sums[1][0], LINE);
    if (X > 1 && P > 1) tiles.template store<3>(sums[1][1], LINE);
}

// Panels that stay in the second cache while all rows of x pass: half of the 2 MB that processors with AMX have.
constexpr int64_t NEAR_PANELS = 1 << 20;

// Rows [begin, end) of the product with `batch` rows, at least as many as two tiles have.
template <class Tiles, class Dot>
static void multiply_tiles_by(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to) {
    const int64_t lines = ceil_div(stored_bytes(m), LINE), panel = lines * TILE_BYTES;
    const int64_t fit = NEAR_PANELS / (2 * panel), near = 2 * W * (fit ? fit : 1);
    const int64_t used = ceil_div(least(near, end - begin), W);
    char* panels = (char*)scratch<PRODUCT_DECODED>(used * panel / (int64_t)sizeof(float));
    Tiles tiles;
    for (int64_t first = begin; first < end; first += near) {
        const int64_t stop = least(first + near, end);
        for (int64_t row = first; row < stop; row += W)
            make_panel<Dot>(m, row, least(W, stop - row), (vi*)(panels + (row - first) / W * panel));
        for (int64_t b = 0; b < batch; b += 2 * TILE_ROWS) {
            // Tiles are whole: the last ones begin with rows of x whose results are there.
            const int64_t count = batch - b > TILE_ROWS ? 2 : 1, from = least(b, batch - count * TILE_ROWS);
            for (int64_t row = first; row < stop; row += 2 * W) {
                const char *rows = narrow_at(m, x, from)->data, *own = panels + (row - first) / W * panel;
                typename Dot::Sum sums[2][2][TILE_ROWS];
                by_count<2>(count, MK_BODY(auto inputs) {
                    by_count<2>(ceil_div(stop - row, W), MK_BODY(auto near_panels) {
                        constexpr int X = decltype(inputs)::value, P = decltype(near_panels)::value;
                        tile_block<Dot, X, P>(tiles, rows, narrow_pitch(m), own, lines, sums);
                    });
                });
                for (int64_t i = b - from; i < count * TILE_ROWS; i++)
                    for (int64_t at = row; at < least(row + 2 * W, stop); at += W)
                        put_panel<Dot>(sums[i / TILE_ROWS][(at - row) / W][i % TILE_ROWS], m, at, least(W, stop - at),
                                       *narrow_at(m, x, from + i), to, from + i);
            }
        }
    }
}

template <class Tiles>
static void multiply_tiles_as(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to) {
    if (m.format == BFLOAT16_NARROW) multiply_tiles_by<Tiles, Bfloat16Dot>(m, begin, end, x, batch, to);
    else multiply_tiles_by<Tiles, Int8Dot>(m, begin, end, x, batch, to);
}

static void multiply_tiles(
    const Matrix& m, int64_t begin, int64_t end, const NarrowRow* x, int64_t batch, const Results& to) {
    if (mk_tiles_in_use == MK_AMX) multiply_tiles_as<AmxTiles>(m, begin, end, x, batch, to);
    else multiply_tiles_as<EmulatedTiles>(m, begin, end, x, batch, to);
}

// Why AMX is not to be used although it may be, or "": both forms multiply whole numbers, in int8 and in bfloat16, whose
// sums are exact in any order. In another process, since the instructions are not known to run.
static const char* amx_differs() {
    constexpr int64_t ROWS = 39, COLUMNS = 150, BATCH = 37;
    uint32_t state = 1;
    auto draw = [&] { return (int32_t)((state = state * 1664525 + 1013904223) >> 24) % 255 - 127; };
    int8_t bytes[ROWS * COLUMNS];
    uint16_t halves[ROWS * COLUMNS];
    float x[BATCH * COLUMNS], scales[ROWS], found[BATCH * ROWS], expected[BATCH * ROWS];
    for (float& number : x) number = (float)draw();
    for (float& scale : scales) scale = 1.0f;
    for (int64_t i = 0; i < ROWS * COLUMNS; i++) {
        const float number = bytes[i] = (int8_t)draw();
        memcpy(&halves[i], (const char*)&number + 2, 2);
    }
    const Matrix matrices[2] = {{INT8_NARROW, ROWS, COLUMNS, 0, bytes, scales, nullptr},
                                {BFLOAT16_NARROW, ROWS, COLUMNS, 0, halves, nullptr, nullptr}};
    for (const Matrix& m : matrices) {
        char* rows = room_for_rows<PRODUCT_NARROW>(m, BATCH);
        round_rows(m, x, COLUMNS, 0, BATCH, rows);
        // First, so that the other finds memory.
        multiply_tiles_as<EmulatedTiles>(m, 0, ROWS, (const NarrowRow*)rows, BATCH, {expected, ROWS, false});
        const int32_t answer = in_a_child([&] {
            multiply_tiles_as<AmxTiles>(m, 0, ROWS, (const NarrowRow*)rows, BATCH, {found, ROWS, false});
            return memcmp(found, expected, sizeof found) ? 1 : 0;
        });
        if (answer < 0) return "a process that tried it died";
        if (answer) return "its products were wrong when it was tried";
    }
    return "";
}

}  // namespace MK_ISA
#endif
