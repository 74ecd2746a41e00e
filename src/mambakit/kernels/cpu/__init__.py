"""Fused kernels for the CPU, each registered behind its operation when this is imported."""

from mambakit.kernels.cpu import (  # noqa: F401
    causal_conv,
    decode,
    expand_ranks,
    few_rows,
    fused_step,
    mamba3_prepare,
    norm,
    quaternion_prepare,
    selective_scan,
    ssd,
)
