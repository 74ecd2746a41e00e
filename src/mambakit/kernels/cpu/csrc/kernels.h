// All kernels, once per instruction set. Each header ends in functions marked MK_EXPORT(name).
#pragma once

#include "causal_conv.h"
#include "decode.h"
#include "elementwise.h"
#include "mamba3_prepare.h"
#include "matvec.h"
#include "norm.h"
#include "pages.h"
#include "ranks.h"
#include "selective_scan.h"
#include "selective_scan_backward.h"
#include "ssd_backward.h"
#include "ssd_forward.h"
#include "step_mamba1.h"
#include "step_mamba2.h"
#include "step_mamba3.h"

namespace MK_ISA {

// The structs of structs.py.
static const char* const LAYOUTS[] = {
    Matrix::LAYOUT,      Norm::LAYOUT,           Mamba1Step::LAYOUT,          Mamba2Step::LAYOUT,
    Mamba3Step::LAYOUT,  DecodeLayer::LAYOUT,    DecodeModel::LAYOUT,         scan::PerToken::LAYOUT,
    scan::Scan::LAYOUT,  scan::ScanGradients::LAYOUT, ssd::Sequence::LAYOUT,  ssd::Arguments::LAYOUT,
    ssd::Gradients::LAYOUT,
};

}  // namespace MK_ISA

// The n-th struct's fields as C++ declares them, or null.
extern "C" __attribute__((visibility("default"))) const char* MK_JOIN(mk_, layout, MK_ISA)(int64_t n) {
    return n < int64_t(sizeof(MK_ISA::LAYOUTS) / sizeof(char*)) ? MK_ISA::LAYOUTS[n] : nullptr;
}
