"""The steps of the backward pass of `mamba3_siso_combined`."""

from mambakit.compat.gpu_only import gpu_only

__getattr__ = gpu_only(
    __name__,
    kernels="mamba3_siso_bwd_kernel_dzdo mamba3_siso_bwd_kernel_dqkv mamba3_siso_bwd_kernel_rotary_bias_angles "
    "mamba3_siso_bwd_kernel_dk_state_post mamba3_siso_bwd_kernel_ddt_dtrap_dinput_states",
    partial="compute_dzdo compute_dqkv compute_dqktheta apply_dk_state_post compute_ddt_dtrap_dinput_states",
    tiles="_alloc_fn",
)
