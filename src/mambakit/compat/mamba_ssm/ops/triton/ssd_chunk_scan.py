"""Outputs of chunks from what is inside of them, `cb` (b, n, g, l, t), and from the states that enter them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.compat.arguments import of_tensors, through_apply
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.gradients import pulled_back, written
from mambakit.compat.mamba_ssm.ops.triton.ssd_bmm import _bmm_chunk_fwd, in_chunks, of_one_sequence
from mambakit.compat.mamba_ssm.ops.triton.ssd_chunk_state import decays
from mambakit.compat.references.chunks import chunk_scan_ref

__all__ = [
    "ChunkScanFn",
    "_chunk_scan_bwd_dC",
    "_chunk_scan_bwd_dcb",
    "_chunk_scan_bwd_ddAcs_prev",
    "_chunk_scan_bwd_ddAcs_stable",
    "_chunk_scan_bwd_dstates",
    "_chunk_scan_bwd_dx",
    "_chunk_scan_bwd_dz",
    "_chunk_scan_fwd",
    "chunk_scan",
    "chunk_scan_ref",
]

__getattr__ = gpu_only(
    __name__,
    kernels="_chunk_scan_fwd_kernel _chunk_scan_fwd_kernel_wip _chunk_scan_bwd_dz_kernel "
    "_chunk_scan_bwd_dstates_kernel _chunk_scan_bwd_dc_kernel _chunk_scan_bwd_dx_kernel _chunk_scan_bwd_dcb_kernel "
    "_chunk_scan_bwd_ddAcs_unstable_kernel _chunk_scan_bwd_ddAcs_stable_kernel_old "
    "_chunk_scan_bwd_ddAcs_stable_kernel _chunk_scan_bwd_ddAcs_prev_kernel",
    tiles="init_to_zero",
    unfinished="_chunk_scan_fwd_wip _chunk_scan_bwd_ddAcs_unstable _chunk_scan_bwd_ddAcs_stable_old",
)


@of_tensors
def _chunk_scan_fwd(
    cb: Tensor,
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`out` (b, s, h, p), and with a gate what it was before; `states` (b, n, h, p, r) enter the chunks."""
    y = inside(cb, x, dt, dA_cumsum) + entering(C, states, dA_cumsum, seq_idx)
    if D is not None:
        y = y + x * (D[:, None] if D.dim() == 1 else D)
    return (y if z is None else y * F.silu(z.to(y.dtype))).to(x.dtype), None if z is None else y.to(x.dtype)


def inside(cb: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor) -> Tensor:
    """What the tokens of a chunk read of each other, (b, s, h, p) in at least float32."""
    heads, (groups, length) = x.shape[2], cb.shape[2:4]
    wide = torch.promote_types(x.dtype, torch.float32)
    gap_bhnlt = dA_cumsum[..., :, None] - dA_cumsum[..., None, :]
    causal_lt = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    # Mask before exp: above the diagonal the gap is positive and may overflow.
    decay_bhnlt = torch.exp(gap_bhnlt.masked_fill(~causal_lt, float("-inf")))
    cb_bnhlt = cb.to(wide).repeat_interleave(heads // groups, dim=2)
    weight_bnhlt = cb_bnhlt * decay_bhnlt.transpose(1, 2) * dt.transpose(1, 2)[..., None, :]
    y_bnlhp = torch.einsum("bnhlt,bnthp->bnlhp", weight_bnhlt, in_chunks(x, length).to(wide))
    return y_bnlhp.flatten(1, 2)[:, : x.shape[1]]


def entering(C: Tensor, states: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None) -> Tensor:
    """What tokens read of the states that enter their chunks, (b, s, h, p) in at least float32."""
    length, wide = dA_cumsum.shape[3], torch.promote_types(C.dtype, torch.float32)
    C_bnlgr, states_bngqpr = in_chunks(C, length).to(wide), states.to(wide).unflatten(2, (C.shape[2], -1))
    y_bnlhp = torch.einsum("bnlgr,bngqpr->bnlgqp", C_bnlgr, states_bngqpr).flatten(3, 4)
    decay_bnlh = torch.exp(dA_cumsum).permute(0, 2, 3, 1)
    if seq_idx is not None:
        ids_bnl = in_chunks(seq_idx, length, -1)
        before_bn = F.pad(ids_bnl[:, :-1, -1], (1, 0))
        decay_bnlh = decay_bnlh * (ids_bnl == before_bn[..., None])[..., None]
    return (y_bnlhp * decay_bnlh[..., None]).flatten(1, 2)[:, : C.shape[1]]


@of_tensors
def _chunk_scan_bwd_dz(
    x: Tensor,
    z: Tensor,
    out: Tensor,
    dout: Tensor,
    chunk_size: int,
    has_ddAcs: bool = True,
    D: Tensor | None = None,
    dz: Tensor | None = None,
    recompute_output: bool = False,
) -> tuple[Any, ...]:
    """`(dz, dout_x, dD)` from `out` before the gate, then if asked for the gated output.

    With `has_ddAcs` the sum over p of `out`, without its skip, times its gradient comes fourth, (b, h, n, l).
    """
    wide = torch.promote_types(out.dtype, torch.float32)
    d_out, d_z = pulled_back(lambda y, z: y * F.silu(z), (out.to(wide), z.to(wide)), (dout,))
    skip = 0 if D is None else x * (D[:, None] if D.dim() == 1 else D)
    results = [written(d_z.to(z.dtype), dz), d_out.to(dout.dtype), None]
    if D is not None:
        results[2] = (d_out * x).sum((0, 1, 3) if D.dim() == 1 else (0, 1)).to(D.dtype)
    if has_ddAcs:
        results.append(in_chunks(((out - skip) * d_out).sum(-1), chunk_size).permute(0, 3, 1, 2))
    return (*results, (out * F.silu(z.to(wide))).to(x.dtype)) if recompute_output else tuple(results)


@of_tensors
def _chunk_scan_bwd_dstates(
    C: Tensor, dA_cumsum: Tensor, dout: Tensor, seq_idx: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The gradient of the states that enter the chunks."""
    shape = (len(C), dA_cumsum.shape[2], *dout.shape[2:], C.shape[-1])
    zeros = C.new_zeros(shape, dtype=torch.promote_types(C.dtype, torch.float32))
    (d_states,) = pulled_back(lambda s: entering(C, s, dA_cumsum, seq_idx), (zeros,), (dout,))
    return d_states.to(dtype or C.dtype)


@of_tensors
def _chunk_scan_bwd_dC(
    prev_states: Tensor,
    dA_cumsum: Tensor,
    dout: Tensor,
    seq_idx: Tensor | None = None,
    C: Tensor | None = None,
    ngroups: int = 1,
) -> Any:
    """The gradient of `C` by the states that enter, and if `C` is given that of `dA_cumsum`."""
    shape = (*dout.shape[:2], ngroups, prev_states.shape[-1])
    zeros = dout.new_zeros(shape, dtype=torch.promote_types(dout.dtype, torch.float32))
    (dC,) = pulled_back(lambda C: entering(C, prev_states, dA_cumsum, seq_idx), (zeros,), (dout,))
    return dC if C is None else (dC, _chunk_scan_bwd_ddAcs_prev(prev_states, C, dout, dA_cumsum, seq_idx))


@of_tensors
def _chunk_scan_bwd_ddAcs_prev(
    prev_states: Tensor, C: Tensor, dout: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None = None
) -> Tensor:
    """The gradient of `dA_cumsum` by the states that enter."""
    return pulled_back(lambda dA: entering(C, prev_states, dA, seq_idx), (dA_cumsum,), (dout,))[0]


@of_tensors
def _chunk_scan_bwd_dcb(
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    dout: Tensor,
    seq_idx: Tensor | None = None,
    CB: Tensor | None = None,
    ngroups: int = 1,
) -> Any:
    """The gradient of `cb`, and if `CB` is given that of the log-decays, not of their running sums."""
    length = dt.shape[3]
    shape = (len(x), dt.shape[2], ngroups, length, length)
    zeros = x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))
    (dcb,) = pulled_back(lambda cb: inside(cb, x, dt, dA_cumsum), (zeros,), (dout,))
    if seq_idx is not None:
        dcb = dcb * of_one_sequence(seq_idx, length)[:, :, None]
    return dcb if CB is None else (dcb, _chunk_scan_bwd_ddAcs_stable(x, dt, dA_cumsum, dout, CB))


@of_tensors
def _chunk_scan_bwd_dx(
    cb: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor, dout: Tensor, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `x`, the skip's part included, and of `dt` by what is inside of chunks."""
    d_x, d_dt = pulled_back(lambda x, dt: inside(cb, x, dt, dA_cumsum), (x, dt), (dout,))
    return d_x if D is None else d_x + (dout * (D[:, None] if D.dim() == 1 else D)).to(x.dtype), d_dt


@of_tensors
def _chunk_scan_bwd_ddAcs_stable(x: Tensor, dt: Tensor, dA_cumsum: Tensor, dout: Tensor, cb: Tensor) -> Tensor:
    """The gradient of the log-decays whose running sums are `dA_cumsum` by what is inside of chunks."""
    return pulled_back(lambda dA: inside(cb, x, dt, dA.cumsum(-1)), (decays(dA_cumsum),), (dout,))[0]


@of_tensors
def chunk_scan(
    B: Tensor,
    C: Tensor,
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    prev_states: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
) -> Tensor:
    """`_chunk_scan_fwd` from B and C, differentiable."""
    cb = _bmm_chunk_fwd(C, B, dt.shape[3])
    return _chunk_scan_fwd(cb, x, dt, dA_cumsum, C, prev_states, D, z)[0]


ChunkScanFn = through_apply("ChunkScanFn", chunk_scan)
