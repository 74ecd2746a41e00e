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
    grouped = (t if t is None else t.unflatten(-1, (-1, group_size)) for t in (x, z, weight))
    return GatedNorm.apply(*grouped, eps, norm_before_gate).flatten(-2)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    # Not x.square().mean(): the norm needs no copy of x.
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)


class GatedNorm(torch.autograd.Function):
    """Gate and norm over the last axis in one piece, keeping only the inputs, in their own dtype, for the backward."""

    @staticmethod
    def forward(x: Tensor, z: Tensor | None, weight: Tensor | None, eps: float, norm_before_gate: bool) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        gate = None if z is None else F.silu(z.to(wide))
        gated = x.to(wide) if gate is None or norm_before_gate else x * gate
        y = gated * inverse_rms(gated, eps)
        if weight is not None:
            y *= weight
        if gate is not None and norm_before_gate:
            y *= gate
        return y.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.eps, ctx.norm_before_gate = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] - one output
        x, z, weight = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        d_y = d_y.to(wide)
        if z is None:
            d_x, d_weight = norm_backward(x.to(wide), weight, d_y, ctx.eps)
            return d_x.to(x.dtype), None, d_weight, None, None
        sigmoid = torch.sigmoid(z.to(wide))
        gate = z * sigmoid
        slope = sigmoid * (1 + z - gate)
        if ctx.norm_before_gate:
            d_x, d_weight = norm_backward(x.to(wide), weight, d_y * gate, ctx.eps)
            d_gate = d_y * x * inverse_rms(x.to(wide), ctx.eps)
            d_z = (d_gate if weight is None else d_gate * weight) * slope
        else:
            d_gated, d_weight = norm_backward(x * gate, weight, d_y, ctx.eps)
            d_x, d_z = d_gated * gate, d_gated * x * slope
        return d_x.to(x.dtype), d_z.to(z.dtype), d_weight, None, None


def norm_backward(x: Tensor, weight: Tensor | None, d_y: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    """Gradients of `x` and `weight` in `y = x * inverse_rms(x) * weight`."""
    inverse = inverse_rms(x, eps)
    normed = x * inverse
    d_weight = None if weight is None else (d_y * normed).sum_to_size(weight.shape).to(weight.dtype)
    d_normed = d_y if weight is None else d_y * weight
    return (d_normed - normed * (d_normed * normed).mean(dim=-1, keepdim=True)) * inverse, d_weight
