"""Norms of groups of channels, with a gate before or after."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.blocks import modules
from mambakit.compat.arguments import check_channels, in_one_precision, in_the_order, of_tensors
from mambakit.ops.norm import check_group_size, rms_norm
from mambakit.ops.shapes import check_floats

__all__ = ["LayerNorm", "RMSNorm", "layernorm_fn", "rms_norm_ref", "rmsnorm_fn"]

GATED = "x, weight, bias, z, eps, group_size, norm_before_gate"


@of_tensors
def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """`norm(x) * silu(z)`, or `norm(x * silu(z))` without `norm_before_gate`.

    The norm is taken over groups of `group_size` channels (None: all); `weight` and `bias` span the last axis.
    """
    dtype = x.dtype
    check_channels(x, weight=weight, bias=bias)
    check_floats({"x": x})
    x, weight, bias, z = in_one_precision(x, weight, bias, z)
    if z is not None and z.shape != x.shape:
        raise ValueError(f"z has shape {tuple(z.shape)} but x has {tuple(x.shape)}")
    wide = torch.promote_types(x.dtype, torch.float32)
    gate = None if z is None else F.silu(z.to(wide))
    y = x.to(wide) if gate is None or norm_before_gate else x * gate
    if is_rms_norm:
        y = rms_norm(y, weight.to(wide), eps, group_size)
    else:
        group_size = check_group_size(group_size, y.shape[-1])
        y = F.layer_norm(y.unflatten(-1, (-1, group_size)), (group_size,), eps=eps).flatten(-2) * weight.to(wide)
    y = y if bias is None else y + bias
    return (y * gate if gate is not None and norm_before_gate else y).to(dtype)


@in_the_order(GATED, layernorm_fn)
def rmsnorm_fn(**given: Any) -> Tensor:
    return layernorm_fn(**given, is_rms_norm=True)


@in_the_order(f"{GATED}, upcast", layernorm_fn)
def rms_norm_ref(upcast: bool = True, **given: Any) -> Tensor:
    return layernorm_fn(**given, is_rms_norm=True)


class RMSNorm(modules.RMSNorm):
    is_rms_norm = True
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__(hidden_size, eps, group_size, device=device, dtype=dtype)
        self.norm_before_gate = norm_before_gate
        bias = None if self.is_rms_norm else nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if (bias := getattr(self, "bias", None)) is not None:
            nn.init.zeros_(bias)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        args = (x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)
        return layernorm_fn(*args, is_rms_norm=self.is_rms_norm)


class LayerNorm(RMSNorm):
    is_rms_norm = False
