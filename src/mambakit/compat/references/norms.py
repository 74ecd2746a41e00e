"""Norms by their formula. Without `upcast` they compute in the dtype of `x`, as officially."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.compat.references.convolution import activated


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """The norms of `dropout(rowscale x) + dropout(x1) + residual` and with `prenorm` that sum; a single one alone."""
    dtype, weights = x.dtype, ((weight, bias), (weight1, bias1))
    if upcast:
        x, residual, x1 = (at_least_float32(t) for t in (x, residual, x1))
        weights = tuple((at_least_float32(w), at_least_float32(b)) for w, b in weights)
    if rowscale is not None:
        x = x * rowscale[..., None]
    x = without_dropped(x, dropout_p, dropout_mask)
    if x1 is not None:
        x = x + without_dropped(x1, dropout_p, dropout_mask1)
    if residual is not None:
        x = (x + residual).to(x.dtype)
    normed = x if is_rms_norm else x - x.mean(dim=-1, keepdim=True)
    normed = normed / torch.sqrt(normed.square().mean(dim=-1, keepdim=True) + eps)
    results = [(normed * w if b is None else normed * w + b).to(dtype) for w, b in weights if w is not None]
    results += [x] if prenorm else []
    return results[0] if len(results) == 1 else tuple(results)


def gated_rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> Tensor:
    """RMSNorm of groups of channels with a gate after it, or without `norm_before_gate` before it."""
    dtype = x.dtype
    if upcast:
        x, z = at_least_float32(x), at_least_float32(z)
    if z is not None and not norm_before_gate:
        x = x * activated(z, "silu")
    groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    out = (groups / torch.sqrt(groups.square().mean(dim=-1, keepdim=True) + eps)).flatten(-2) * at_least_float32(weight)
    out = out if bias is None else out + bias
    return (out * activated(z, "silu") if z is not None and norm_before_gate else out).to(dtype)


def without_dropped(x: Tensor, dropout_p: float, mask: Tensor | None) -> Tensor:
    """After dropout, of the entries where `mask` is false if there is one."""
    if dropout_p == 0:
        return x
    return F.dropout(x, dropout_p) if mask is None else x.masked_fill(~mask, 0.0) / (1 - dropout_p)


def at_least_float32(x: Any) -> Any:
    return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32))
