// AMX's instructions against their plain twins, on random products: a program for a machine without a system, `make amx`.
#include <immintrin.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#define thread_local  // there is one
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi,bmi2,prefer-vector-width=512")
#define MK_ISA avx512
#define MK_WIDTH 16
#include "amx_product.h"

int32_t mk_extension_in_use, mk_tiles_in_use;
const bool mk_asks_closest = false;
mk_parallel_for mk_torch_parallel_for;
mk_get_num_threads mk_torch_get_num_threads;

// What there is of a C library.
static char* memory = (char*)0x1000000;
extern "C" {
void* aligned_alloc(size_t, size_t bytes) {
    char* found = memory;
    memory += (bytes + 63) / 64 * 64;
    return found;
}
void free(void*) {}
void* memcpy(void* to, const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) ((volatile char*)to)[i] = ((const char*)from)[i];
    return to;
}
void* memset(void* to, int value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) ((volatile char*)to)[i] = (char)value;
    return to;
}
int memcmp(const void* a, const void* b, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (((const char*)a)[i] != ((const char*)b)[i]) return 1;
    return 0;
}
int atexit(void (*)()) { return 0; }
long syscall(long, ...) { return 0; }
}

// Ports of Bochs: what is written, and the end.
static void say(const char* text) {
    for (; *text; text++) __asm__ volatile("outb %0, $0xe9" : : "a"(*text));
}
static void say(int64_t n) {
    if (n >= 10) say(n / 10);
    const char digit[] = {(char)('0' + n % 10), 0};
    say(digit);
}
static void shut_down() {
    for (const char* text = "Shutdown"; *text; text++) __asm__ volatile("outb %0, %1" : : "a"(*text), "d"((short)0x8900));
}

namespace avx512 {

static uint64_t state = 1;
static int64_t whole(int64_t least, int64_t most) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return least + (int64_t)((state >> 33) % (uint64_t)(most - least + 1));
}
// Some are not normal in bfloat16, or make products that are not.
static float number() {
    const float x = (float)whole(-(1 << 23), 1 << 23) / (1 << 23);
    return whole(0, 40) ? x : x * (whole(0, 1) ? 1e-38f : 1e-20f);
}
static float* numbers(int64_t n) {
    float* x = (float*)aligned_alloc(64, n * sizeof(float));
    for (int64_t i = 0; i < n; i++) x[i] = number();
    return x;
}

// Results that differ, of how many.
static int64_t differences(int64_t format, int64_t* compared) {
    const int64_t rows = whole(1, 80), columns = whole(1, 300), batch = whole(32, 120);
    Matrix m = {format, rows, columns, format == INT4_NARROW ? 32 : 0, nullptr, nullptr, nullptr};
    const int64_t bytes = rows * bytes_per_row(m);
    uint8_t* weight = (uint8_t*)aligned_alloc(64, bytes);
    for (int64_t i = 0; i < bytes; i++) weight[i] = (uint8_t)whole(0, 255);
    for (int64_t i = 0; format == BFLOAT16_NARROW && i < rows * columns; i++) {
        const float x = number();
        memcpy(weight + 2 * i, (const char*)&x + 2, 2);
    }
    m.weight = weight, m.scales = numbers(rows), m.bias = whole(0, 1) ? numbers(rows) : nullptr;
    char* x = room_for_rows<PRODUCT_NARROW>(m, batch);
    round_rows(m, numbers(batch * columns), columns, 0, batch, x);
    float* found[3];
    for (int32_t tiles = MK_EMULATED_TILES; tiles <= MK_AMX; tiles++) {
        found[tiles] = numbers(batch * rows), mk_tiles_in_use = tiles;
        multiply_tiles(m, 0, rows, (const NarrowRow*)x, batch, {found[tiles], rows, false});
    }
    int64_t differ = 0;
    for (int64_t i = 0; i < batch * rows; i++) differ += memcmp(found[MK_AMX] + i, found[MK_EMULATED_TILES] + i, 4);
    *compared += batch * rows;
    return differ;
}

}  // namespace avx512

extern "C" __attribute__((section(".first"))) void run() {
    const struct {
        const char* name;
        int64_t format;
    } formats[] = {{"int8", avx512::INT8_NARROW}, {"int4", avx512::INT4_NARROW}, {"bfloat16", avx512::BFLOAT16_NARROW}};
    say("\nAMX is refused: "), say(*amx_refused() ? amx_refused() : "no"), say("\n");
    for (const auto& one : formats) {
        int64_t compared = 0, differ = 0;
        for (int64_t i = 0; i < 40; i++) differ += avx512::differences(one.format, &compared);
        say(one.name), say(": "), say(differ), say(" of "), say(compared), say(" results differ\n");
    }
    shut_down();
}
