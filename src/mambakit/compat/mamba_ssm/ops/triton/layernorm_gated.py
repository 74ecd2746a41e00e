"""Norms of groups of channels, with a gate before or after."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.blocks import modules
from mambakit.compat.arguments import check_channels, in_one_precision, in_the_order, of_tensors, through_apply
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.gradients import pulled_back, written
from mambakit.compat.mamba_ssm.ops.triton.layer_norm import statistics
from mambakit.compat.references.norms import gated_rms_norm_ref as rms_norm_ref
from mambakit.ops.norm import check_group_size, rms_norm
from mambakit.ops.shapes import check_floats

__all__ = [
    "LayerNorm",
    "LayerNormFn",
    "RMSNorm",
    "_layer_norm_bwd",
    "_layer_norm_fwd",
    "layernorm_fn",
    "rms_norm_ref",
    "rmsnorm_fn",
]

__getattr__ = gpu_only(__name__, kernels="_layer_norm_fwd_1pass_kernel _layer_norm_bwd_kernel")
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


@of_tensors
@torch.no_grad()
def _layer_norm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    z: Tensor | None = None,
    out: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`(out, mean, rstd)` of rows (m, n); the statistics (groups m), the rows of a group together, no mean with RMS."""
    y = layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(wide) if z is None or norm_before_gate else x.to(wide) * F.silu(z.to(wide))
    groups = normed.unflatten(-1, (-1, group_size or x.shape[-1])).transpose(0, 1).flatten(0, 1)
    return written(y, out), *statistics(groups, eps, is_rms_norm)


@of_tensors
def _layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
    z: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    recompute_output: bool = False,
    dz: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Any, ...]:
    """`(dx, dweight, dbias, dz)`, and if asked for the output once more. The statistics are not read."""

    def forward(x: Any, weight: Any, bias: Any, z: Any) -> Tensor:
        return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)

    d_x, d_weight, d_bias, d_z = pulled_back(forward, (x, weight, bias, z), (dy,))
    grads = (d_x, d_weight, d_bias, None if z is None else written(d_z, dz))
    return (*grads, written(forward(x, weight, bias, z).detach(), out)) if recompute_output else grads


LayerNormFn = through_apply("LayerNormFn", layernorm_fn)
