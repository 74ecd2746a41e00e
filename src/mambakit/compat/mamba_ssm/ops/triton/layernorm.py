"""The norms of mamba_ssm 1.x, whose arguments come in another order than those of `layer_norm`."""

from typing import Any

from mambakit.compat.arguments import in_the_order, through_apply
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.mamba_ssm.ops.triton import layer_norm
from mambakit.compat.mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_linear_fn

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]
__all__ += ["LayerNormFn", "LayerNormLinearFn", "_layer_norm_bwd", "_layer_norm_fwd"]

__getattr__ = gpu_only(__name__, kernels="_layer_norm_fwd_1pass_kernel _layer_norm_bwd_kernel")


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


@in_the_order("x, weight, bias, eps, residual, out_dtype, residual_dtype, is_rms_norm", layer_norm._layer_norm_fwd)
def _layer_norm_fwd(**given: Any) -> Any:
    """`(y, mean, rstd, sum)`."""
    y, _, mean, rstd, total, *_ = layer_norm._layer_norm_fwd(**given)
    return y, mean, rstd, total


@in_the_order(
    "dy, x, weight, bias, eps, mean, rstd, dresidual, has_residual, is_rms_norm, x_dtype, recompute_output",
    layer_norm._layer_norm_bwd,
)
def _layer_norm_bwd(**given: Any) -> Any:
    """`(dx, dweight, dbias, dresidual)`, and if asked for `y`."""
    grads = layer_norm._layer_norm_bwd(**given)
    return *grads[:4], *grads[7:]


LayerNormFn = through_apply("LayerNormFn", layer_norm_fn)
LayerNormLinearFn = through_apply("LayerNormLinearFn", layer_norm_linear_fn)
