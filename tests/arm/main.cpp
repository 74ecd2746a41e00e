// The compiled kernels against plain loops in double: every kernel on random shapes, forward and backward, without
// torch.
//
//     agreement LIBRARY CASES [INSTRUCTION_SET [EXTENSION]]
//
// The same program for every machine. Without an instruction set, all that this one can run, each with every extension
// and, one number beyond them, with emulated tiles.
#define MK_ISA shapes  // of the structs alone: what is called is in the library
#define MK_WIDTH 4
#include "causal_conv.h"
#include "decode.h"
#include "elementwise.h"
#include "mamba3_prepare.h"
#include "matvec.h"
#include "norm.h"
#include "pages.h"
#include "quaternion_prepare.h"
#include "ranks.h"
#include "selective_scan_backward.h"
#include "ssd_backward.h"
#include "ssd_forward.h"

// Never called; the headers want them.
int32_t mk_extension_in_use = MK_NO_EXTENSION;
const bool mk_asks_closest = false;
mk_parallel_for mk_torch_parallel_for = nullptr;
mk_get_num_threads mk_torch_get_num_threads = nullptr;

#include "check_elementwise.h"
#include "check_quaternions.h"
#include "check_scans.h"
#include "check_whole_model.h"

namespace agreement {

static const int64_t THREADS = 3;

static int32_t parallel_for(int64_t begin, int64_t end, int64_t, mk_body body, void* context) {
    std::vector<std::thread> threads;
    const int64_t share = (end - begin + THREADS - 1) / THREADS;
    for (int64_t at = begin; at < end; at += share)
        threads.emplace_back(body, at, at + share < end ? at + share : end, context);
    for (std::thread& thread : threads) thread.join();
    return 0;
}

static int32_t get_num_threads(uint32_t* count) {
    *count = THREADS;
    return 0;
}

static void check_memory(Draw& draw) {
    Floats data = draw.floats(draw.whole(1, 3000));
    float result = 0;
    ReadMemory read = {};
    read.data = data.data(), read.floats = (int64_t)data.size(), read.result = &result;
    run("read_memory", read);
    LargePages pages = {};
    pages.start = data.data(), pages.bytes = (int64_t)(data.size() * sizeof(float));
    run("large_pages", pages);
}

static const struct {
    const char* name;
    void (*check)(Draw&);
} CHECKS[] = {
    {"vector functions", check_functions},
    {"convolution", check_conv},
    {"finish", check_finish},
    {"ranks", check_ranks},
    {"preparation", check_prepare},
    {"preparation with quaternions", check_quaternions},
    {"selective scan", check_scan},
    {"ssd", check_ssd},
    {"step of Mamba-1", check_mamba1_step},
    {"step of Mamba-2", check_mamba2_step},
    {"step of Mamba-3", check_mamba3_step},
    {"products", check_products},
    {"decode", check_model},
    {"memory", check_memory},
};

}  // namespace agreement

int main(int count, char** given) {
    using namespace agreement;
    if (count < 3) return fprintf(stderr, "agreement LIBRARY CASES [INSTRUCTION_SET [EXTENSION]]\n"), 2;
    now.library = dlopen(given[1], RTLD_NOW);
    if (!now.library) return fprintf(stderr, "%s\n", dlerror()), 2;
    ((void (*)(void*, void*))find("mk_set_threads"))((void*)parallel_for, (void*)get_num_threads);
    auto set_extension = (void (*)(int64_t))find("mk_set_extension"), set_tiles = (void (*)(int64_t))find("mk_set_tiles");
    int64_t wrong = 0, ran = 0;
    for (const char* isa : {"avx512", "avx2", "neon", "plain"}) {
        if (count > 3 && strcmp(given[3], isa)) continue;
        void* can_run = dlsym(now.library, (std::string("mk_can_run_") + isa).c_str());
        if (!can_run || !((int32_t (*)())can_run)()) continue;
        now.isa = isa;
        const int32_t most = ((int32_t (*)())find(std::string("mk_extension_of_") + isa))();
        const bool has_tiles = dlsym(now.library, (std::string("mk_amx_refused_") + isa).c_str());
        for (int32_t extension = 0; extension <= most + has_tiles; extension++) {
            if (count > 4 && extension != atoi(given[4])) continue;
            const bool tiles = extension > most;
            set_extension(tiles ? most : extension), set_tiles(tiles ? MK_EMULATED_TILES : MK_NO_TILES);
            now.compared = now.wrong = 0;
            for (const auto& one : CHECKS)
                for (int64_t seed = 0; seed < atoi(given[2]); seed++) {
                    Draw draw = {(uint64_t)seed * 1000003};
                    now.what = std::string(one.name) + ", seed " + std::to_string(seed);
                    // Only products know extensions.
                    if (!extension || one.check == check_products || one.check == check_model) one.check(draw);
                }
            printf("%s, extension %d%s: %lld comparisons, %lld wrong\n", isa, extension, tiles ? " (emulated tiles)" : "",
                   (long long)now.compared, (long long)now.wrong);
            wrong += now.wrong, ran++;
        }
    }
    if (!ran) fprintf(stderr, "nothing ran: this machine has none of what was asked for\n");
    return wrong || !ran ? 1 : 0;
}
