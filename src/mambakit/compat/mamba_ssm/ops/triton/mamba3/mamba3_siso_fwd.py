"""The forward pass of `mamba3_siso_combined` with what its backward pass keeps."""

from mambakit.compat.gpu_only import gpu_only

__getattr__ = gpu_only(
    __name__,
    kernels="mamba3_siso_fwd_kernel",
    partial="mamba3_siso_fwd",
    tiles="_prune_mamba3_siso_fwd_configs _alloc_fn",
)
