"""Kernels for GPUs in Triton, each registered behind its operation when this is imported.

Triton itself is imported by the first launch; see docs/gpu.md for what was proved and what never ran.
"""

from mambakit.kernels.triton import causal_conv, fused_step, mamba3_prepare, norm, selective_scan, ssd  # noqa: F401
