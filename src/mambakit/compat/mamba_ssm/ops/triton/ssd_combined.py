"""Mamba-2's scan, and a whole block after its input projection, as functions of tensors."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.arguments import check_count
from mambakit.compat.arguments import (
    check_activation,
    in_one_precision,
    in_the_order,
    of_tensors,
    step_size,
    through_apply,
)
from mambakit.compat.causal_conv1d.causal_conv1d_interface import causal_conv1d_fn
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.gradients import pulled_back, written
from mambakit.compat.mamba2_core import scan, scan_packed
from mambakit.compat.mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mambakit.compat.mamba_ssm.ops.triton.layernorm_gated import layernorm_fn
from mambakit.compat.mamba_ssm.ops.triton.ssd_bmm import _bmm_chunk_fwd
from mambakit.compat.mamba_ssm.ops.triton.ssd_chunk_scan import _chunk_scan_fwd
from mambakit.compat.mamba_ssm.ops.triton.ssd_chunk_state import (
    _chunk_cumsum_fwd,
    _chunk_state_fwd,
    chunk_state_varlen,
)
from mambakit.compat.mamba_ssm.ops.triton.ssd_state_passing import _state_passing_fwd
from mambakit.compat.packing import segments_of
from mambakit.compat.references.scans import (
    mamba_conv1d_scan_ref,
    mamba_split_conv1d_scan_ref,
    ssd_chunk_scan_combined_ref,
)
from mambakit.ops.shapes import bind, check_floats, is_autocast

__all__ = [
    "MambaChunkScanCombinedFn",
    "MambaSplitConv1dScanCombinedFn",
    "_mamba_chunk_scan_combined_bwd",
    "_mamba_chunk_scan_combined_fwd",
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_conv1d_scan_ref",
    "mamba_split_conv1d_scan_combined",
    "mamba_split_conv1d_scan_ref",
    "ssd_chunk_scan_combined_ref",
    "ssd_selective_scan",
]

__getattr__ = gpu_only(
    __name__,
    kernels="_chunk_scan_chunk_state_bwd_dx_kernel",
    partial="_chunk_scan_chunk_state_bwd_dx selective_scan_bwd",
    tiles="init_to_zero ensure_stride",
)
ALL_STEPS = (0.0, float("inf"))


@of_tensors
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ALL_STEPS,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """`out` (b, s, h, p), then the states asked for: final ones (b, h, p, r), one per packed sequence (n, h, p, r).

    `x`, `z` are (b, s, h, p), `dt` (b, s, h), `A`, `dt_bias` (h), `B`, `C` (b, s, g, r), `D` (h) or (h, p),
    `initial_states` (b, h, p, r), `seq_idx` (b, s). As officially, `initial_states` belong to sequences with the id 0.
    `chunk_size` and `state_dtype` have no effect: chunks are as long as suits the sizes, states at least float32.
    """
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("return_varlen_states=True needs cu_seqlens, the bounds of the packed sequences")
    dtype = x.dtype
    x, dt, A, B, C, D, z, dt_bias, initial_states = in_one_precision(x, dt, A, B, C, D, z, dt_bias, initial_states)
    size = bind(x_bshp=x, dt_bsh=dt, A_h=A, B_bsgr=B, C_bsgr=C, z_bshp=z, dt_bias_h=dt_bias)
    bind(x_bshp=x, B_bsgr=B, initial_states_bhpr=initial_states)
    dt = step_size(dt, dt_bias, dt_softplus, dt_limit)
    da = dt * A
    segments_of(seq_idx, size.b, size.s)  # for what it refuses
    if seq_idx is not None and initial_states is not None and size.s:
        initial_states = initial_states * (seq_idx[:, 0] == 0)[:, None, None, None]
    # The core takes x, B and C in one dtype, which is that of its output: not to be rounded before skip and gate.
    like = torch.promote_types(x.dtype, torch.promote_types(B.dtype, C.dtype))
    like = like if D is None and z is None else torch.promote_types(like, torch.float32)
    sequence = (x.to(like), B.to(like), C.to(like), da, dt)
    if cu_seqlens is None:
        segments_bs = segments_of(seq_idx, size.b, size.s)
        y, final_states = scan(*sequence, initial_states, segments_bs)
        varlen_states = None
    else:
        y, final_states, varlen_states = scan_packed(sequence, initial_states, cu_seqlens, seq_idx)
    if D is not None:
        bind(x_bshp=x, **{"D_h" if D.dim() == 1 else "D_hp": D})
        y = torch.addcmul(y, x, D[:, None] if D.dim() == 1 else D)
    y = y if z is None else y * F.silu(z.to(torch.promote_types(z.dtype, torch.float32)))
    states = [final_states] if return_final_states else []
    states += [varlen_states] if return_varlen_states else []
    return (y.to(dtype), *states) if states else y.to(dtype)


@in_the_order("x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus", mamba_chunk_scan_combined)
def mamba_chunk_scan(**given: Any) -> Tensor:
    return mamba_chunk_scan_combined(**given)


@of_tensors
def ssd_selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ALL_STEPS,
) -> Tensor:
    """The same scan by Mamba-1's, which also takes `dt` (b, s, h, p), `dt_bias` (h, p) and `A` (h p, r)."""
    heads, p = x.shape[2:]

    def per_channel(t: Tensor | None, axes: int) -> Tensor | None:
        """`[.., h]` or `[.., h, p]`, of `axes` axes without p, to `[.., h p]`."""
        if t is None:
            return None
        return (t[..., None].expand(*t.shape, p) if t.dim() == axes else t).flatten(-2)

    dt_bsi, bias_i = per_channel(dt, 3), per_channel(dt_bias, 1)
    assert dt_bsi is not None
    # As officially, without a limit of its own a negative step passes here.
    dt_bsi = step_size(dt_bsi, bias_i, dt_softplus, None if tuple(dt_limit) == ALL_STEPS else dt_limit)
    A = A[:, None, None].expand(heads, p, B.shape[-1]).flatten(0, 1) if A.dim() == 1 else A
    args = (x.flatten(2).mT, dt_bsi.mT, A, B.permute(0, 2, 3, 1), C.permute(0, 2, 3, 1), per_channel(D, 1))
    y = selective_scan_fn(*args, None if z is None else z.flatten(2).mT)
    return y.mT.unflatten(-1, (heads, p))


@of_tensors
def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = ALL_STEPS,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """A Mamba-2 block after its input projection: `out`, or `(out, final_states)`.

    `zxbcdt` (b, s, ..) holds the gated MLP's part if there is one, z, x, B, C and dt. Without `rmsnorm_weight` the gate
    is applied alone, without `outproj_weight` the inner channels are returned.
    """
    check_activation(activation)
    if (
        D.dim() not in (1, 2)
        or conv1d_weight.dim() != 2
        or zxbcdt.dim() != 3
        or type(ngroups) is not int
        or ngroups < 1
    ):
        given = f"D {tuple(D.shape)}, conv1d_weight {tuple(conv1d_weight.shape)}, zxbcdt {tuple(zxbcdt.shape)}"
        raise ValueError(
            f"{given} and ngroups = {ngroups!r}, expected (h) or (h, p), (channels, k), (b, s, width) and a number"
        )
    if D.dim() == 1 and headdim is None:
        raise ValueError("headdim has to be given when D has one entry per head")
    check_count("headdim", headdim, least=1, optional=True)
    if outproj_bias is not None and outproj_weight is None:
        raise ValueError("outproj_bias was given without outproj_weight")
    heads = D.shape[0]
    p = headdim if D.dim() == 1 else D.shape[1]
    assert p is not None
    width, groups2r = heads * p, conv1d_weight.shape[0] - heads * p
    mlp, odd = divmod(zxbcdt.shape[-1] - 2 * width - groups2r - heads, 2)
    if groups2r < 0 or groups2r % (2 * ngroups) or mlp < 0 or odd:
        raise ValueError(
            f"zxbcdt is {zxbcdt.shape[-1]} wide and conv1d_weight has {conv1d_weight.shape[0]} channels, which do not "
            f"fit {heads} heads of {p} channels and {ngroups} groups"
        )
    z_mlp, x_mlp, z, xBC, dt = zxbcdt.split((mlp, mlp, width, width + groups2r, heads), dim=-1)
    xBC = causal_conv1d_fn(xBC.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation)
    assert isinstance(xBC, Tensor)
    x, B, C = xBC.mT.split((width, groups2r // 2, groups2r // 2), dim=-1)
    x, z_heads = (t.unflatten(-1, (heads, p)) for t in (x, z))
    B, C = (t.unflatten(-1, (ngroups, -1)) for t in (B, C))
    y, final_states = mamba_chunk_scan_combined(
        *(x, dt, A, B, C, chunk_size, D),
        z=z_heads if rmsnorm_weight is None else None,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
    )
    out = y.flatten(-2)
    if rmsnorm_weight is not None:
        out = layernorm_fn(
            out, rmsnorm_weight, None, z, rmsnorm_eps, width // ngroups, norm_before_gate, is_rms_norm=True
        )
    if mlp:
        out = torch.cat((F.silu(z_mlp) * x_mlp, out), dim=-1)
    if outproj_weight is not None:
        bind(out_bsq=out, outproj_weight_dq=outproj_weight, outproj_bias_d=outproj_bias)
        if not is_autocast(out.device):
            check_floats({"out": out, "outproj_weight": outproj_weight, "outproj_bias": outproj_bias})
        out = F.linear(out, outproj_weight, outproj_bias)
    return (out, final_states) if return_final_states else out


@of_tensors
@torch.no_grad()
def _mamba_chunk_scan_combined_fwd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ALL_STEPS,
    state_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """`(out, out_x, dt, dA_cumsum, states, final_states)`, and with `cu_seqlens` the state of every packed sequence.

    `out_x` is the output before the gate, if there is one, `dt` and `dA_cumsum` are (b, h, n, l), `states` (b, n, h, p,
    r) enter the chunks.
    """
    dA_cumsum, steps = _chunk_cumsum_fwd(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit)
    added = _chunk_state_fwd(B, x, steps, dA_cumsum, seq_idx).flatten(3)
    entered = None if initial_states is None else initial_states.flatten(2)
    states, final_states = (
        t.unflatten(-1, (x.shape[3], -1))
        for t in _state_passing_fwd(added, dA_cumsum[..., -1], entered, seq_idx, chunk_size)
    )
    cb = _bmm_chunk_fwd(C, B, chunk_size, seq_idx, output_dtype=added.dtype)
    out, out_x = _chunk_scan_fwd(cb, x, steps, dA_cumsum, C, states, D, z, seq_idx)
    results = (out, out_x, steps, dA_cumsum, states.to(state_dtype or C.dtype), final_states)
    if cu_seqlens is None:
        return results
    return *results, chunk_state_varlen(B[0], x[0], steps[0], dA_cumsum[0], cu_seqlens, states[0])


@of_tensors
def _mamba_chunk_scan_combined_bwd(
    dout: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor | None,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dfinal_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ALL_STEPS,
    dx: Tensor | None = None,
    ddt: Tensor | None = None,
    dB: Tensor | None = None,
    dC: Tensor | None = None,
    dz: Tensor | None = None,
    recompute_output: bool = False,
    state_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """`(dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states)`, None for what was not given.

    Tensors given for results are written. With `recompute_output` the output follows, with a gate the gated one. `out`
    is not read.
    """
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states)

    def forward(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, initial_states: Any) -> Any:
        options = (D, z, dt_bias, initial_states, seq_idx, None, dt_softplus, dt_limit)
        return mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, *options, return_final_states=True)

    grads = pulled_back(forward, inputs, (dout, dfinal_states))
    room = (dx, ddt, None, dB, dC, None, dz, None, None)
    grads = tuple(g if g is None else written(g, r) for g, r in zip(grads, room, strict=True))
    if not recompute_output:
        return grads
    with torch.no_grad():
        return *grads, forward(*inputs)[0]


MambaChunkScanCombinedFn = through_apply("MambaChunkScanCombinedFn", mamba_chunk_scan_combined)
MambaSplitConv1dScanCombinedFn = through_apply("MambaSplitConv1dScanCombinedFn", mamba_split_conv1d_scan_combined)
