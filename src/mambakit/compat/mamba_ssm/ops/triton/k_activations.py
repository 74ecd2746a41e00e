"""The gate of an MLP, `silu(x) y`, of two halves of a tensor."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mambakit.compat.arguments import in_full_precision, of_tensors, through_apply
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.gradients import pulled_back, written

__all__ = ["SwiGLU", "_swiglu_bwd", "_swiglu_fwd", "swiglu"]

__getattr__ = gpu_only(__name__, kernels="_swiglu_fwd_kernel _swiglu_bwd_kernel")


@of_tensors
def swiglu(xy: Tensor) -> Tensor:
    """Half as wide as `xy`; differentiable."""
    x, y = in_full_precision(*xy.chunk(2, dim=-1))
    return (F.silu(x) * y).to(xy.dtype)


@of_tensors
def _swiglu_fwd(xy: Tensor, out: Tensor | None = None) -> Tensor:
    return written(swiglu(xy), out)


@of_tensors
def _swiglu_bwd(
    xy: Tensor, dout: Tensor, dxy: Tensor | None = None, recompute_output: bool = False, out: Tensor | None = None
) -> Any:
    """The gradient of `xy`, and if asked for the output once more."""
    grad = written(pulled_back(swiglu, (xy,), (dout,))[0], dxy)
    return (grad, _swiglu_fwd(xy, out)) if recompute_output else grad


SwiGLU = through_apply("SwiGLU", swiglu)
