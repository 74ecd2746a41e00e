"""Norms with the residual added before them, as from mamba_ssm 2.0 on."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.arguments import number, shown
from mambakit.blocks import modules
from mambakit.compat.arguments import check_channels, in_one_precision, in_the_order, of_tensors, through_apply
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.gradients import pulled_back
from mambakit.compat.references.norms import layer_norm_ref
from mambakit.ops.norm import rms_norm
from mambakit.ops.shapes import check_floats

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]
__all__ += ["LayerNormFn", "LayerNormLinearFn", "_layer_norm_bwd", "_layer_norm_fwd"]

__getattr__ = gpu_only(
    __name__,
    kernels="_layer_norm_fwd_1pass_kernel _layer_norm_bwd_kernel",
    tiles="config_prune configs_autotune pruned_configs_autotune",
)

SUMMED = "x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm"
"""The arguments that all forms begin with."""


@of_tensors
def layer_norm_fn(
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
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """`norm(dropout(rowscale x) + dropout(x1) + residual)`, and again with `weight1` and `bias1` if there are any.

    Returns the norms, then with `prenorm` the sum, then with `return_dropout_mask` two masks (None without dropout or
    without `x1`); a single result comes alone. The sum has the dtype of `residual`, else that of `x`, with
    `residual_in_fp32` at least float32.
    """
    if x1 is not None and rowscale is not None:
        raise ValueError("rowscale does not go with x1")
    for name, other in (("residual", residual), ("x1", x1)):
        if other is not None and other.shape != x.shape:
            raise ValueError(f"{name} has shape {tuple(other.shape)} but x has {tuple(x.shape)}")
    check_channels(x, weight=weight, bias=bias, weight1=weight1, bias1=bias1)
    check_floats({"x": x})
    in_one_precision(residual, x1)  # for what it refuses
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide)
    if rowscale is not None:
        if rowscale.numel() * x.shape[-1] != x.numel():
            raise ValueError(f"rowscale has shape {tuple(rowscale.shape)}, expected {tuple(x.shape[:-1])}: one per row")
        total = total * rowscale.reshape(*x.shape[:-1], 1)
    total, mask = dropped(total, dropout_p)
    mask1 = None
    if x1 is not None:
        added, mask1 = dropped(x1.to(wide), dropout_p)
        total = total + added
    if residual is not None:
        total = total + residual
    norms = [normed(total, weight, bias, eps, is_rms_norm).to(x.dtype)]
    if weight1 is not None:
        norms.append(normed(total, weight1, bias1, eps, is_rms_norm).to(x.dtype))
    kept = residual.dtype if residual is not None else wide if residual_in_fp32 else x.dtype
    results = [*norms, *([total.to(kept)] if prenorm else []), *([mask, mask1] if return_dropout_mask else [])]
    return results[0] if len(results) == 1 else tuple(results)


@in_the_order(f"{SUMMED}, residual_in_fp32, return_dropout_mask", layer_norm_fn)
def rms_norm_fn(**given: Any) -> Any:
    """`layer_norm_fn` with RMSNorm."""
    return layer_norm_fn(**given, is_rms_norm=True)


@of_tensors
def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """A linear map of the norm, with `prenorm` also the sum."""
    options = {"residual": residual, "eps": eps, "residual_in_fp32": residual_in_fp32, "is_rms_norm": is_rms_norm}
    y, total = layer_norm_fn(x, norm_weight, norm_bias, prenorm=True, **options)
    y = F.linear(y.to(linear_weight.dtype), linear_weight, linear_bias)
    return (y, total) if prenorm else y


@in_the_order(f"{SUMMED}, dropout_mask, dropout_mask1, upcast", layer_norm_ref)
def rms_norm_ref(**given: Any) -> Any:
    """`layer_norm_ref` with RMSNorm."""
    return layer_norm_ref(**given, is_rms_norm=True)


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_rms_norm: bool) -> Tensor:
    x, weight, bias = in_one_precision(x, weight, bias)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if not is_rms_norm:
        return F.layer_norm(x, x.shape[-1:], weight, bias, number("eps", eps))
    y = rms_norm(x, weight, eps)
    return y if bias is None else y + bias


def dropped(x: Tensor, dropout_p: float) -> tuple[Tensor, Tensor | None]:
    """`x` after dropout, and what was kept."""
    if not isinstance(dropout_p, int | float) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p = {shown(dropout_p)} has to be at least 0 and below 1")
    if dropout_p == 0:
        return x, None
    mask = torch.rand_like(x) >= dropout_p
    return x * mask / (1 - dropout_p), mask


class RMSNorm(modules.RMSNorm):
    def __init__(
        self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, device: Any = None, dtype: Any = None
    ):
        super().__init__(hidden_size, eps, device=device, dtype=dtype)
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0 else None
        self.register_parameter("bias", None)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        dropout_p = self.drop.p if self.drop is not None and self.training else 0.0
        options = {"residual": residual, "prenorm": prenorm, "residual_in_fp32": residual_in_fp32, "is_rms_norm": True}
        return layer_norm_fn(x, self.weight, None, eps=self.eps, dropout_p=dropout_p, **options)


@of_tensors
@torch.no_grad()
def _layer_norm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> tuple[Any, ...]:
    """`(y, y1, mean, rstd, sum, seeds, mask, mask1)` of rows (m, n); statistics (m), no mean with RMS.

    Without anything to add and in its own dtype the sum is `x` itself. There are no seeds: dropout is not repeatable,
    so it has no backward here.
    """
    kept = residual.dtype if residual is not None else residual_dtype or x.dtype
    options = {"eps": eps, "dropout_p": dropout_p, "rowscale": rowscale, "is_rms_norm": is_rms_norm}
    given = (x, weight, bias, residual, x1, weight1, bias1)
    y, *y1, total, mask, mask1 = layer_norm_fn(
        *given, **options, prenorm=True, residual_in_fp32=True, return_dropout_mask=True
    )
    # The norms come in the dtype of `x`.
    wide = torch.promote_types(x.dtype, torch.float32)
    summed = layer_norm_sum(total, x, residual, x1, rowscale, dropout_p, kept)
    if out_dtype not in (None, x.dtype):
        y, *y1 = (
            normed(total.to(wide), w, b, eps, is_rms_norm).to(out_dtype)
            for w, b in ((weight, bias), (weight1, bias1))
            if w is not None
        )
    masks = (mask, mask1) if return_dropout_mask else (None, None)
    return y, y1[0] if y1 else None, *statistics(total.to(wide), eps, is_rms_norm), summed, None, *masks


def layer_norm_sum(total: Tensor, x: Tensor, *added: Any) -> Tensor:
    """The sum as the official function returns it: `x` itself where there is nothing to add or to convert."""
    residual, x1, rowscale, dropout_p, kept = added
    is_x = residual is None and x1 is None and rowscale is None and not dropout_p and kept == x.dtype
    return x if is_x else total.to(kept)


def statistics(x: Tensor, eps: float, is_rms_norm: bool) -> tuple[Tensor | None, Tensor]:
    """Mean, which RMS has none of, and the inverse of the deviation of each row."""
    mean = None if is_rms_norm else x.mean(-1)
    centred = x if mean is None else x - mean[..., None]
    return mean, torch.rsqrt(centred.square().mean(-1) + eps)


@of_tensors
def _layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
    dresidual: Tensor | None = None,
    dy1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    seeds: Tensor | None = None,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    has_residual: bool = False,
    has_x1: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[Any, ...]:
    """`(dx, dweight, dbias, dresidual, dx1, dweight1, dbias1)`, and if asked for `y`; `x` is what was normed."""
    if dropout_p:
        raise NotImplementedError("_layer_norm_bwd with dropout repeats the random numbers of a kernel for a GPU")
    wide = torch.promote_types(x.dtype, torch.float32)

    def forward(x: Tensor, weight: Tensor, bias: Any, weight1: Any, bias1: Any) -> Any:
        y = normed(x, weight, bias, eps, is_rms_norm)
        return y if weight1 is None else (y, normed(x, weight1, bias1, eps, is_rms_norm))

    inputs = (x.to(wide), weight, bias, weight1, bias1)
    d_total, d_weight, d_bias, d_weight1, d_bias1 = pulled_back(
        forward, inputs, (dy,) if weight1 is None else (dy, dy1)
    )
    d_total = d_total if dresidual is None else d_total + dresidual
    dx = (d_total if rowscale is None else d_total * rowscale[:, None]).to(x_dtype or x.dtype)
    grads = (dx, d_weight, d_bias, d_total.to(x.dtype) if has_residual else None, dx if has_x1 else None)
    grads = (*grads, d_weight1, d_bias1)
    if not recompute_output:
        return grads
    return *grads, normed(x.to(wide), weight, bias, eps, is_rms_norm).detach().to(dy.dtype)


LayerNormFn = through_apply("LayerNormFn", layer_norm_fn)
LayerNormLinearFn = through_apply("LayerNormLinearFn", layer_norm_linear_fn)
