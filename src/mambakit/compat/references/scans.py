"""The scans of Mamba-1 and Mamba-2, one token after the other."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.compat.references.convolution import activated, causal_conv1d_ref, widest
from mambakit.compat.references.norms import gated_rms_norm_ref

ALL_STEPS = (0.0, float("inf"))


def selective_scan_ref(
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
    """`out` (b, i, s), or `(out, last_state)`, in the shapes of `selective_scan_fn`."""
    wide = widest(u, delta, A.real, B.real, C.real)
    dtype = wide.to_complex() if A.is_complex() else wide
    u_wide, A = u.to(wide), A.to(dtype)
    delta = stepped(delta.to(wide), None if delta_bias is None else delta_bias[:, None], delta_softplus)
    state = torch.zeros(len(u), *A.shape, dtype=dtype, device=u.device)
    outputs = []
    for t in range(u.shape[-1]):
        step = delta[:, :, t, None]
        state = torch.exp(step * A) * state + step * u_wide[:, :, t, None] * of_token(B, t, A, u)
        y = (state * of_token(C, t, A, u)).sum(-1)
        outputs.append(2 * y.real if A.is_complex() else y)
    out = torch.stack(outputs, dim=-1) if outputs else u_wide
    out = out if D is None else out + D.to(wide)[:, None] * u_wide
    out = (out if z is None else out * activated(z.to(wide), "silu")).to(u.dtype)
    return (out, state) if return_last_state else out


def of_token(x: Tensor, t: int, A: Tensor, u: Tensor) -> Tensor:
    """B or C of token `t`, (b or 1, i, r), from any of the official shapes."""
    if x.dim() == 2:
        return x.to(A.dtype)[None]
    x_bgrS = x[:, None] if x.dim() == 3 else x
    if A.is_complex() and not x.is_complex():
        x_bgr = torch.complex(*(x_bgrS[..., 2 * t + part].to(A.real.dtype) for part in (0, 1)))
    else:
        x_bgr = x_bgrS[..., t].to(A.dtype)
    return x_bgr.repeat_interleave(u.shape[1] // x_bgr.shape[1], dim=1)


def inner_ref(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor | None,
    B_proj_bias: Tensor | None,
    C_proj_bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """`(x, delta, B, C, z)` that a block scans."""
    x, z = xz.chunk(2, dim=1)
    x = causal_conv1d_ref(x, conv1d_weight[:, 0], conv1d_bias, activation="silu")
    assert isinstance(x, Tensor)
    rank, entries = delta_proj_weight.shape[1], A.shape[1] * (2 if A.is_complex() else 1)
    projected = x.mT @ x_proj_weight.t()

    def per_token(values: Tensor, bias: Tensor | None) -> Tensor:
        values = values if bias is None else values + bias
        return values.unflatten(-1, (A.shape[1], -1)).transpose(1, 2).flatten(2)

    B = per_token(projected[..., rank : rank + entries], B_proj_bias) if B is None else B
    C = per_token(projected[..., -entries:], C_proj_bias) if C is None else C
    return x, (projected[..., :rank] @ delta_proj_weight.t()).mT, B, C, z


def mamba_inner_ref(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """A Mamba-1 block after its input projection: `xz` (b, 2 i, s) to `out` (b, s, d)."""
    projections = (conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight)
    x, delta, B, C, z = inner_ref(xz, *projections, A, B, C, B_proj_bias, C_proj_bias)
    y = selective_scan_ref(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
    return F.linear(y.mT, out_proj_weight, out_proj_bias)


def bimamba_inner_ref(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    A_b: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """`mamba_inner_ref` with a second scan, with decays of its own, from the end to the beginning."""
    projections = (conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight)
    x, delta, B, C, z = inner_ref(xz, *projections, A, B, C, B_proj_bias, C_proj_bias)
    y = selective_scan_ref(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
    x, delta, z = (t.flip(-1) for t in (x, delta, z))
    B, C = (t if t.dim() == 2 else t.flip(-1) for t in (B, C))
    y = y + selective_scan_ref(x, delta, A_b, B, C, D, z, delta_bias, delta_softplus).flip(-1)
    return F.linear(y.mT, out_proj_weight, out_proj_bias)


def selective_state_update_ref(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """One token in the shapes of `selective_state_update`, written into `state`."""
    wide = widest(state, x, dt, A)
    step = stepped(dt.to(wide), dt_bias, dt_softplus)[..., None]
    B, C = (
        t.to(wide)[..., None, :] if state.dim() == 3 else t.to(wide).repeat_interleave(A.shape[0] // t.shape[1], 1)
        for t in (B, C)
    )
    B, C = (t[..., None, :] if state.dim() == 4 else t for t in (B, C))
    after = torch.exp(step * A.to(wide)) * state.to(wide) + step * B * x.to(wide)[..., None]
    with torch.no_grad():
        state.copy_(after)
    y = (after * C).sum(-1)
    y = y if D is None else y + D.to(wide) * x.to(wide)
    return (y if z is None else y * activated(z.to(wide), "silu")).to(x.dtype)


def ssd_loop(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float] = ALL_STEPS,
) -> Tensor:
    """Mamba-2's scan: `x`, `z` (b, s, h, p), `dt` (b, s, h), `A` (h), `B`, `C` (b, s, g, r), `D` (h) or (h, p)."""
    heads, wide = x.shape[2], widest(x, dt, B)
    dt = stepped(dt.to(wide), dt_bias, dt_softplus).clamp(*dt_limit)
    x_wide = x.to(wide)
    B, C = (t.to(wide).repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    state = x_wide.new_zeros(len(x), heads, x.shape[3], B.shape[3])
    outputs = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        written = x_wide[:, t, :, :, None] * B[:, t, :, None]
        state = torch.exp(step * A.to(wide)[:, None, None]) * state + step * written
        outputs.append((state * C[:, t, :, None]).sum(-1))
    out = torch.stack(outputs, dim=1) if outputs else x_wide
    if D is not None:
        out = out + (D[:, None] if D.dim() == 1 else D).to(wide) * x_wide
    return (out if z is None else out * activated(z.to(wide), "silu")).to(x.dtype)


def ssd_chunk_scan_combined_ref(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """Mamba-2's scan; `chunk_size` has no effect."""
    return ssd_loop(x, dt, A, B, C, D, z, dt_bias, dt_softplus, (-float("inf"), float("inf")))


def mamba_conv1d_scan_ref(
    xBC: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ALL_STEPS,
    activation: str | None = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
) -> Tensor:
    """Convolution and scan of `xBC` (b, s, ..): `out` (b, s, h p)."""
    heads = dt.shape[2]
    if z is not None:
        headdim = z.shape[-1] // heads
    elif D is not None and D.dim() == 2:
        headdim = D.shape[1]
    if headdim is None:
        raise ValueError("headdim has to be given when neither z nor a D of two axes shows it")
    x, B, C = convolved(xBC, conv1d_weight, conv1d_bias, activation, (heads, headdim), ngroups)
    z = None if z is None else z.unflatten(-1, (heads, headdim))
    # As officially, without a limit of its own a negative step passes.
    dt_limit = (-float("inf"), float("inf")) if tuple(dt_limit) == ALL_STEPS else dt_limit
    return ssd_loop(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit).flatten(-2)


def mamba_split_conv1d_scan_ref(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    dt_limit: tuple[float, float] = ALL_STEPS,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """A Mamba-2 block after its input projection. With several groups the official reference norms over all of them."""
    heads = D.shape[0]
    if D.dim() == 1 and headdim is None:
        raise ValueError("headdim has to be given when D has one entry per head")
    per_head = headdim if headdim is not None and D.dim() == 1 else D.shape[1]
    width = heads * per_head
    z, xBC, dt = zxbcdt.split((width, conv1d_weight.shape[0], heads), dim=-1)
    x, B, C = convolved(xBC, conv1d_weight, conv1d_bias, activation, (heads, per_head), ngroups)
    gate = z.unflatten(-1, (heads, per_head)) if rmsnorm_weight is None else None
    out = ssd_loop(x, dt, A, B, C, D, gate, dt_bias, True, dt_limit).flatten(-2)
    if rmsnorm_weight is not None:
        out = gated_rms_norm_ref(out, rmsnorm_weight, None, z, rmsnorm_eps, width // ngroups, norm_before_gate)
    return out if outproj_weight is None else F.linear(out, outproj_weight, outproj_bias)


def convolved(
    xBC: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, heads: tuple[int, int], ngroups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x (b, s, h, p), B and C (b, s, g, r)."""
    xBC_conv = causal_conv1d_ref(xBC.mT, weight, bias, activation=activation)
    assert isinstance(xBC_conv, Tensor)
    width = heads[0] * heads[1]
    x, B, C = xBC_conv.mT.split((width, *[(xBC.shape[-1] - width) // 2] * 2), dim=-1)
    return x.unflatten(-1, heads), B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1))


def stepped(dt: Tensor, bias: Tensor | None, is_softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return torch.logaddexp(dt, torch.zeros_like(dt)) if is_softplus else dt
