"""Gradients of Q and K per head, added up to those per group."""

from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.gpu_only import gpu_only

__all__ = ["reduce_grouped_qk_grads"]

__getattr__ = gpu_only(
    __name__,
    kernels="_reduce_grouped_qk_grads_and_bias_partial_kernel _finalize_qk_bias_kernel",
    partial="reduce_grouped_qk_grads_and_bias_triton",
    tiles="_next_power_of_2",
)


@of_tensors
def reduce_grouped_qk_grads(qk_grads: Tensor, num_qk_groups: int) -> Tensor:
    """(.., h, r) to (.., g, r): the sum over the heads of each group."""
    heads = qk_grads.shape[-2]
    if heads % num_qk_groups:
        raise ValueError(f"{heads} heads are not a multiple of num_qk_groups = {num_qk_groups}")
    return qk_grads.unflatten(-2, (num_qk_groups, -1)).sum(-2)
