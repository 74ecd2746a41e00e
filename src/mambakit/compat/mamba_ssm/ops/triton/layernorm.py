"""The norms of mamba_ssm 1.x, whose arguments come in another order than those of `layer_norm`."""

from typing import Any

from mambakit.compat.arguments import in_the_order
from mambakit.compat.mamba_ssm.ops.triton import layer_norm
from mambakit.compat.mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_linear_fn

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]


@in_the_order("x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm", layer_norm.layer_norm_fn)
def layer_norm_fn(**given: Any) -> Any:
    return layer_norm.layer_norm_fn(**given)


@in_the_order("x, weight, bias, residual, prenorm, residual_in_fp32, eps", layer_norm.rms_norm_fn)
def rms_norm_fn(**given: Any) -> Any:
    return layer_norm.layer_norm_fn(**given, is_rms_norm=True)


@in_the_order("x, weight, bias, residual, eps, prenorm, upcast", layer_norm.layer_norm_ref)
def layer_norm_ref(**given: Any) -> Any:
    return layer_norm.layer_norm_ref(**given)


@in_the_order("x, weight, bias, residual, eps, prenorm, upcast", layer_norm.rms_norm_ref)
def rms_norm_ref(**given: Any) -> Any:
    return layer_norm.layer_norm_ref(**given, is_rms_norm=True)
