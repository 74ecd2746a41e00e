"""RMSNorm and gated RMSNorm over the last axis."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.ops.shapes import check_floats


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5, group_size: int | None = None) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`, the mean over consecutive groups of `group_size` channels (None: all).

    `weight` spans the whole last axis. Computed in at least float32, returned in the dtype of `x`.
    """
    return gated_rms_norm(x, None, weight, eps, group_size=group_size)


def gated_rms_norm(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    eps: float = 1e-5,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Tensor:
    """`rms_norm(x * silu(z))`, or `rms_norm(x) * silu(z)` with `norm_before_gate`; `z=None` is no gate."""
    check_floats({"x": x}, {"z": z, "weight": weight})
    width = x.shape[-1] if x.dim() else 0
    group_size = width if group_size is None else group_size
    if width < 1:
        raise ValueError(f"x needs a last axis of at least one channel, got shape {tuple(x.shape)}")
    if group_size < 1 or width % group_size:
        raise ValueError(f"group_size = {group_size} does not divide the {width} channels of x")
    if z is not None and z.shape != x.shape:
        raise ValueError(f"z has shape {tuple(z.shape)} but x has {tuple(x.shape)}")
    if weight is not None and weight.shape != (width,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected ({width},)")
    wide = torch.promote_types(x.dtype, torch.float32)
    gate = None if z is None else F.silu(z.to(wide))
    y = x.to(wide) if gate is None or norm_before_gate else x * gate
    scale = None if weight is None else weight.unflatten(0, (-1, group_size))
    # The function's bookkeeping takes longer than a token's norm; without gradients it is not needed.
    norm = Norm.apply if torch.is_grad_enabled() else Norm.forward
    y = norm(y.unflatten(-1, (-1, group_size)), scale, eps).flatten(-2)
    return (y if gate is None or not norm_before_gate else y * gate).to(x.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    # Not x.square().mean(): the norm needs no copy of x.
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)


class Norm(torch.autograd.Function):
    """`x * inverse_rms(x) * weight`, keeping only the inputs for the backward."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        y = x * inverse_rms(x, eps)
        return y if weight is None else y.mul_(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] - one output
        x, weight = ctx.saved_tensors
        inverse = inverse_rms(x, ctx.eps)
        normed = x * inverse
        d_normed, d_weight = d_y, None
        if weight is not None:
            d_weight = (d_y * normed).sum_to_size(weight.shape).to(weight.dtype)
            d_normed = d_y * weight
        shared = (d_normed * normed).mean(dim=-1, keepdim=True)
        return torch.addcmul(d_normed, normed, shared, value=-1) * inverse, d_weight, None
