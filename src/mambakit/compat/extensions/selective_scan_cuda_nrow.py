"""VMamba's extension for several rows at a time, which computes what its core does."""

from mambakit.compat.extensions.selective_scan_cuda_core import bwd, fwd

__all__ = ["bwd", "fwd"]
