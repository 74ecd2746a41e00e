"""Functions for the official kernels of Mamba-3."""

from mambakit.compat.gpu_only import gpu_only

__getattr__ = gpu_only(__name__, triton="cos_approx sin_approx tanh_approx sech2_approx sigmoid_approx silu")
