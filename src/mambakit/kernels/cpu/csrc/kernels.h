// All kernels, once per instruction set. Each header ends in functions marked MK_EXPORT(name), which Python finds as
// mk_name_<instruction set>.
#pragma once

#define MK_JOIN_(a, b, c) a##b##_##c
#define MK_JOIN(a, b, c) MK_JOIN_(a, b, c)
#define MK_EXPORT(name) extern "C" __attribute__((visibility("default"))) void MK_JOIN(mk_, name, MK_ISA)

#include "vec.h"
#include "threads.h"

#include "rows.h"

#include "causal_conv.h"
#include "elementwise.h"
#include "rotation.h"
#include "mamba3_prepare.h"
#include "matvec.h"
#include "norm.h"
#include "selective_scan.h"
#include "selective_scan_backward.h"
#include "ssd_backward.h"
#include "ssd_forward.h"
#include "pages.h"
#include "ranks.h"
#include "step.h"
#include "step_mamba1.h"
#include "step_mamba2.h"
#include "step_mamba3.h"
#include "decode.h"
