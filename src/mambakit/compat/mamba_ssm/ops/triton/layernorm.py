"""The norms of mamba_ssm 1.x, whose arguments come in another order than those of `layer_norm`."""

from typing import Any

from torch import Tensor

from mambakit.compat.mamba_ssm.ops.triton import layer_norm
from mambakit.compat.mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_linear_fn

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    return layer_norm.layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        eps=eps,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
    )


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    return layer_norm_fn(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm=True)


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    upcast: bool = False,
) -> Any:
    return layer_norm_fn(x, weight, bias, residual, eps, prenorm)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    upcast: bool = False,
) -> Any:
    return layer_norm_fn(x, weight, bias, residual, eps, prenorm, is_rms_norm=True)
