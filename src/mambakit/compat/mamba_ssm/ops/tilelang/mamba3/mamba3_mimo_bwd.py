"""The backward pass of `mamba3_mimo`, by kernels."""

from mambakit.compat.gpu_only import gpu_only

__getattr__ = gpu_only(__name__, kernels="mamba_mimo_bwd_fwd mamba_mimo_bwd_bwd", partial="mamba_mimo_bwd_combined")
