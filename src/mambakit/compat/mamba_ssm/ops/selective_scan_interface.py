"""Mamba-1's scan and its inner function in the official layout: channels before time."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.compat.arguments import in_one_precision, in_the_order, of_tensors, through_apply
from mambakit.compat.causal_conv1d.causal_conv1d_interface import causal_conv1d_fn
from mambakit.compat.mamba_ssm.ops.triton.layer_norm import layer_norm_fn
from mambakit.compat.references.scans import bimamba_inner_ref, mamba_inner_ref, selective_scan_ref
from mambakit.ops.norm import rms_norm
from mambakit.ops.selective_scan import selective_scan
from mambakit.ops.shapes import bind, check_floats, is_autocast

__all__ = [
    "BiMambaInnerFn",
    "MambaInnerFn",
    "MambaInnerFnNoOutProj",
    "SelectiveScanFn",
    "bimamba_inner_fn",
    "bimamba_inner_ref",
    "mamba_inner_fn",
    "mamba_inner_fn_no_out_proj",
    "mamba_inner_ref",
    "rms_norm_forward",
    "selective_scan_fn",
    "selective_scan_ref",
]


@of_tensors
def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """`out` (b, i, s), or `(out, last_state)` with the state (b, i, r).

    `u`, `delta`, `z` are (b, i, s); `A` is (i, r), real or complex; `B` and `C` are (i, r), (b, r, s) or (b, g, r, s).
    With a complex `A` those that depend on time hold real and imaginary parts interleaved, (.., r, 2 s).
    """
    out, last_state = scan_from(None, u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    return (out, last_state) if return_last_state else out


def scan_from(
    state_bir: Tensor | None,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """`selective_scan_fn` with its last state, from a state that it may continue."""
    dtype = u.dtype
    u, delta, A, B, C, D, z, delta_bias = in_one_precision(u, delta, A, B, C, D, z, delta_bias, may_be_complex=True)
    size = bind(u_bis=u, delta_bis=delta, A_ir=A, D_i=D, z_bis=z, delta_bias_i=delta_bias)
    b_bsgr, c_bsgr = (by_token(name, t, A, size) for name, t in (("B", B), ("C", C)))
    groups = math.lcm(b_bsgr.shape[2], c_bsgr.shape[2])
    b_bsgr, c_bsgr = (t.repeat_interleave(groups // t.shape[2], dim=2) for t in (b_bsgr, c_bsgr))
    y_bsi, state_bir = selective_scan(
        *(u.mT, delta.mT, A, b_bsgr, c_bsgr, state_bir),
        skip_i=D,
        z_bsi=None if z is None else z.mT,
        dt_bias_i=delta_bias,
        dt_softplus=bool(delta_softplus),
    )
    # In the layout of `u`, as callers go on to `view` it.
    y = y_bsi.mT.to(dtype)
    return y.contiguous() if u.is_contiguous() else y, state_bir


def by_token(name: str, x: Tensor, A: Tensor, size: Any) -> Tensor:
    """B or C in any of its official shapes as `bsgr`."""
    if x.dim() == 2:
        if tuple(x.shape) != (size.i, size.r):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected that of A, {(size.i, size.r)}")
        return x.expand(size.b, size.s, size.i, size.r)
    if x.dim() not in (3, 4):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected axes (i, r), (b, r, s) or (b, g, r, s)")
    x_bgrS = x[:, None] if x.dim() == 3 else x
    if A.is_complex() and not x.is_complex():
        pairs = x_bgrS.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
        x_bgrS = torch.view_as_complex(pairs.contiguous())
    expected = (size.b, x_bgrS.shape[1], size.r, size.s)
    if tuple(x_bgrS.shape) != expected or not x_bgrS.shape[1] or size.i % x_bgrS.shape[1]:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, which does not fit a batch of {size.b}, {size.i} channels, "
            f"{size.r} state entries and {size.s} tokens{' with two numbers each' if A.is_complex() else ''}"
        )
    return x_bgrS.permute(0, 3, 1, 2)


class Scanned(NamedTuple):
    """What a block scans: channels and gate (b, i, s), B and C in any official shape."""

    x: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor
    delta_bias: Tensor | None
    delta_softplus: bool

    def reversed(self, A: Tensor) -> "Scanned":
        """From the end to the beginning, with other decays."""
        B, C = (t if t.dim() == 2 else t.flip(-1) for t in (self.B, self.C))
        return self._replace(x=self.x.flip(-1), delta=self.delta.flip(-1), A=A, B=B, C=C, z=self.z.flip(-1))


@of_tensors
def mamba_inner_fn_no_out_proj(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """A Mamba-1 block between its outer projections: `xz` (b, 2 i, s) to (b, i, s). Vision Mamba's name for it.

    `B` and `C` come from the projection unless they are given. `checkpoint_lvl` has no effect on values.
    """
    return selective_scan_fn(*prepared(**locals()))


def prepared(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor | None,
    D: Tensor | None,
    delta_bias: Tensor | None,
    B_proj_bias: Tensor | None,
    C_proj_bias: Tensor | None,
    delta_softplus: bool,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    **unused: Any,
) -> Scanned:
    """Convolution and projections."""
    for name, given, extras in (("B", B, (B_proj_bias, b_rms_weight)), ("C", C, (C_proj_bias, c_rms_weight))):
        if given is not None and any(extra is not None for extra in extras):
            raise ValueError(f"{name} was given: its projection's bias and norm weight have nothing to work on")
    size = bind(x_proj_Ri=x_proj_weight, delta_proj_iq=delta_proj_weight, A_ir=A)
    entries = A.shape[1] * (2 if A.is_complex() else 1)
    own = size.q + entries * ((B is None) + (C is None))
    if not is_autocast(xz.device):
        projections = {"x_proj_weight": x_proj_weight, "delta_proj_weight": delta_proj_weight}
        check_floats({"xz": xz, **projections})
    if A.shape[1] == 0:
        raise ValueError(f"A has shape {tuple(A.shape)}, expected at least one entry of the state for each channel")
    if xz.dim() != 3 or xz.shape[1] != 2 * size.i or own > size.R:
        given = f"xz {tuple(xz.shape)}, x_proj_weight {tuple(x_proj_weight.shape)}"
        raise ValueError(
            f"{given} and delta_proj_weight {tuple(delta_proj_weight.shape)} do not go with A's {size.i} channels"
        )
    x, z = xz.chunk(2, dim=1)
    x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    assert isinstance(x, Tensor)
    rank = size.q
    projected_bsR = F.linear(x.mT, x_proj_weight)
    delta_bsi = F.linear(projected_bsR[..., :rank], delta_proj_weight)
    if dt_rms_weight is not None:
        delta_bsi = rms_norm(delta_bsi, dt_rms_weight, b_c_dt_rms_eps)

    def per_token(x_bsR: Tensor, bias: Tensor | None, norm_weight: Tensor | None) -> Tensor:
        x_bsR = x_bsR if bias is None else x_bsR + bias.to(x_bsR.dtype)
        x_bsR = x_bsR if norm_weight is None else rms_norm(x_bsR, norm_weight, b_c_dt_rms_eps)
        return x_bsR.unflatten(-1, (A.shape[1], -1)).transpose(1, 2).flatten(2)

    if B is None:
        B = per_token(projected_bsR[..., rank : rank + entries], B_proj_bias, b_rms_weight)
    if C is None:
        C = per_token(projected_bsR[..., -entries:], C_proj_bias, c_rms_weight)
    return Scanned(x, delta_bsi.mT, A, B, C, D, z, delta_bias, delta_softplus)


@of_tensors
@in_the_order(
    "xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, D, "
    "delta_bias, B_proj_bias, C_proj_bias, delta_softplus, checkpoint_lvl, b_rms_weight, c_rms_weight, dt_rms_weight, "
    "b_c_dt_rms_eps",
    mamba_inner_fn_no_out_proj,
)
def mamba_inner_fn(*, out_proj_weight: Tensor, out_proj_bias: Tensor | None, **given: Any) -> Tensor:
    """A Mamba-1 block after its input projection: `xz` (b, 2 i, s) to `out` (b, s, d)."""
    return project_out(mamba_inner_fn_no_out_proj(**given), out_proj_weight, out_proj_bias, given["A"])


@of_tensors
@in_the_order(
    "xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, A_b, B, C, "
    "D, delta_bias, B_proj_bias, C_proj_bias, delta_softplus, checkpoint_lvl",
    mamba_inner_fn_no_out_proj,
)
def bimamba_inner_fn(*, out_proj_weight: Tensor, out_proj_bias: Tensor | None, A_b: Tensor, **given: Any) -> Tensor:
    """`mamba_inner_fn` with a second scan, with decays of its own, from the end to the beginning. Vision Mamba's."""
    absent = dict.fromkeys(("B", "C", "D", "delta_bias", "B_proj_bias", "C_proj_bias"))
    scanned = prepared(**{**absent, "delta_softplus": True, **given})
    y = selective_scan_fn(*scanned) + selective_scan_fn(*scanned.reversed(A_b)).flip(-1)
    return project_out(y, out_proj_weight, out_proj_bias, given["A"])


def project_out(y: Tensor, out_proj_weight: Tensor, out_proj_bias: Tensor | None, A: Tensor) -> Tensor:
    bind(out_proj_weight_di=out_proj_weight, out_proj_bias_d=out_proj_bias, A_ir=A)
    if not is_autocast(y.device):
        check_floats({"y": y, "out_proj_weight": out_proj_weight, "out_proj_bias": out_proj_bias})
    return F.linear(y.mT, out_proj_weight, out_proj_bias)


SelectiveScanFn = through_apply("SelectiveScanFn", selective_scan_fn)
MambaInnerFn = through_apply("MambaInnerFn", mamba_inner_fn)
MambaInnerFnNoOutProj = through_apply("MambaInnerFnNoOutProj", mamba_inner_fn_no_out_proj)
BiMambaInnerFn = through_apply("BiMambaInnerFn", bimamba_inner_fn)


def rms_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-6, is_rms_norm: bool = True
) -> Tensor:
    return layer_norm_fn(x, weight, bias, eps=eps, is_rms_norm=is_rms_norm)


def _check_selective_scan_cuda() -> None:
    """The extension is always there."""
