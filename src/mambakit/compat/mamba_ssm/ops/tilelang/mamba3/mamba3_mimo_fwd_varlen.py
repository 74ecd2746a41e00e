"""The forward pass of `mamba3_mimo` for packed sequences, by kernels."""

from mambakit.compat.gpu_only import gpu_only

__getattr__ = gpu_only(__name__, kernels="mamba_mimo_fwd", partial="mamba_mimo_forward_varlen")
