"""Softplus. Officially it is code for kernels; here it takes tensors."""

from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.ops import activations

__all__ = ["softplus"]


@of_tensors
def softplus(dt: Tensor) -> Tensor:
    return activations.softplus(dt)
