// All kernels, once per instruction set: Python finds `name` as mk_name_<instruction set>.
#pragma once

#include "causal_conv.h"
#include "decode.h"
#include "elementwise.h"
#include "mamba3_prepare.h"
#include "matvec.h"
#include "norm.h"
#include "pages.h"
#include "quaternion_prepare.h"
#include "ranks.h"
#include "selective_scan.h"
#include "selective_scan_backward.h"
#include "ssd_backward.h"
#include "ssd_forward.h"
#include "step_mamba1.h"
#include "step_mamba2.h"
#include "step_mamba3.h"
#include "threads.h"

// Each with the struct it takes.
#define MK_KERNELS(kernel)                                  \
    kernel(causal_conv, ConvForward)                        \
    kernel(causal_conv_backward, ConvBackward)              \
    kernel(decode, Decode)                                  \
    kernel(expand_ranks, ExpandRanks)                       \
    kernel(expand_ranks_backward, ExpandRanksBackward)      \
    kernel(finish, FinishForward)                           \
    kernel(finish_backward, FinishBackward)                 \
    kernel(large_pages, LargePages)                         \
    kernel(mamba1_step_conv, Mamba1StepConv)                \
    kernel(mamba1_step_scan, Mamba1StepScan)                \
    kernel(mamba2_step, Mamba2StepCall)                     \
    kernel(mamba3_prepare, PrepareForward)                  \
    kernel(mamba3_prepare_backward, PrepareBackward)        \
    kernel(mamba3_step, Mamba3StepCall)                     \
    kernel(matvec, Matvec)                                  \
    kernel(quaternion_prepare, QuaternionForward)           \
    kernel(quaternion_prepare_backward, QuaternionBackward) \
    kernel(read_memory, ReadMemory)                         \
    kernel(selective_scan, ScanForward)                     \
    kernel(selective_scan_backward, ScanBackward)           \
    kernel(ssd_backward, SsdBackward)                       \
    kernel(ssd_forward, SsdForward)                         \
    kernel(vector_function, VectorFunction)

// The structs inside of those.
#define MK_PARTS(part)                                                                                          \
    part(AttentionPart) part(AttentionStep) part(Conv) part(DecodeModel) part(DecodePart) part(Finish)          \
    part(Mamba1Part) part(Mamba1Step) part(Mamba2Part) part(Mamba2Step) part(Mamba3Carried) part(Mamba3Part)    \
    part(Mamba3Step) part(Matrix) part(MlpPart) part(MlpStep) part(MoePart) part(MoeStep) part(Norm)            \
    part(Pairs) part(Prepare) part(Ranks) part(scan::PerToken) part(scan::Scan) part(Side)                      \
    part(ssd::Sequence) part(ssd::Ssd) part(Turns)

#define MK_JOIN_(a, b, c) a##b##_##c
#define MK_JOIN(a, b, c) MK_JOIN_(a, b, c)
#define MK_PUBLIC extern "C" __attribute__((visibility("default")))

// What Python asks for at load and compares with its own: every kernel and every struct. Null after the last.
#define MK_KERNEL_TEXT(name, Call) #name "(" #Call ")", MK_ISA::Call::LAYOUT,
#define MK_PART_TEXT(Part) MK_ISA::Part::LAYOUT,
MK_PUBLIC const char* MK_JOIN(mk_, layout, MK_ISA)(int64_t n) {
    static const char* const texts[] = {MK_KERNELS(MK_KERNEL_TEXT) MK_PARTS(MK_PART_TEXT) nullptr};
    return texts[n];
}

#define MK_EXPORT(name, Call)                                               \
    MK_PUBLIC int32_t MK_JOIN(mk_, name, MK_ISA)(const MK_ISA::Call* call) { \
        try {                                                               \
            MK_ISA::name(*call);                                            \
        } catch (mk_status status) {                                        \
            return status;                                                  \
        }                                                                   \
        return MK_DONE;                                                     \
    }
MK_KERNELS(MK_EXPORT)
