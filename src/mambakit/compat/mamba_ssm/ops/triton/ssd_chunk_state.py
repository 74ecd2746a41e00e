"""Log-decays and states of chunks: `dt` and `dA_cumsum` are (b, h, n, l), `x` (b, s, h, p), `B` (b, s, g, r)."""

from typing import Any

import torch
from torch import Tensor

from mambakit.compat.arguments import of_tensors, step_size, through_apply
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.gradients import pulled_back, written
from mambakit.compat.mamba_ssm.ops.triton.ssd_bmm import in_chunks
from mambakit.compat.references.chunks import chunk_state_ref

__all__ = [
    "ChunkStateFn",
    "_chunk_cumsum_bwd",
    "_chunk_cumsum_fwd",
    "_chunk_state_bwd_db",
    "_chunk_state_bwd_ddAcs_stable",
    "_chunk_state_bwd_dx",
    "_chunk_state_fwd",
    "chunk_state",
    "chunk_state_ref",
    "chunk_state_varlen",
]

__getattr__ = gpu_only(
    __name__,
    kernels="_chunk_cumsum_fwd_kernel _chunk_cumsum_bwd_kernel _chunk_state_fwd_kernel _chunk_state_bwd_dx_kernel "
    "_chunk_state_bwd_db_kernel _chunk_state_bwd_ddAcs_stable_kernel _chunk_state_varlen_kernel",
    tiles="init_to_zero",
)
ALL_STEPS = (0.0, float("inf"))


@of_tensors
def _chunk_cumsum_fwd(
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ALL_STEPS,
) -> tuple[Tensor, Tensor]:
    """`(dA_cumsum, dt_out)`: running sums of `dt A` in each chunk, and the steps themselves, zero after the end."""
    dt_bhnl = in_chunks(step_size(dt, dt_bias, dt_softplus, dt_limit), chunk_size).permute(0, 3, 1, 2)
    return (dt_bhnl * A[:, None, None]).cumsum(-1), dt_bhnl.contiguous()


@of_tensors
def _chunk_cumsum_bwd(
    ddA: Tensor,
    ddt_out: Tensor,
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ALL_STEPS,
    ddt: Tensor | None = None,
) -> tuple[Any, ...]:
    """Gradients of `dt`, `A` and `dt_bias` from those of `dt A`, not summed, and of the steps."""

    def forward(dt: Tensor, A: Tensor, dt_bias: Any) -> tuple[Tensor, Tensor]:
        dt_bhnl = _chunk_cumsum_fwd(dt, A, ddA.shape[-1], dt_bias, dt_softplus, dt_limit)[1]
        return dt_bhnl * A[:, None, None], dt_bhnl

    d_dt, d_A, d_bias = pulled_back(forward, (dt, A, dt_bias), (ddA, ddt_out))
    return written(d_dt, ddt), d_A, d_bias


@of_tensors
def _chunk_state_fwd(
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    seq_idx: Tensor | None = None,
    states: Tensor | None = None,
    states_in_fp32: bool = True,
) -> Tensor:
    """What each chunk writes into the state, (b, n, h, p, r), as far as it is left at the chunk's end."""
    chunk_size, wide = dt.shape[3], torch.promote_types(x.dtype, torch.float32)
    weight_bhnl = torch.exp(dA_cumsum[..., -1:] - dA_cumsum) * dt
    if seq_idx is not None:
        ids_bnl = in_chunks(seq_idx, chunk_size, -1)
        last_bn = torch.stack([ids[:, ids.shape[1] - 1] for ids in seq_idx.split(chunk_size, dim=1)], dim=1)
        weight_bhnl = weight_bhnl * ((ids_bnl == last_bn[..., None]) & (last_bn >= 0)[..., None])[:, None]
    x_bnlhp, B_bnlgr = in_chunks(x, chunk_size).to(wide), in_chunks(B, chunk_size).to(wide)
    x_bnlgqp = (x_bnlhp * weight_bhnl.permute(0, 2, 3, 1)[..., None]).unflatten(3, (B.shape[2], -1))
    out = torch.einsum("bnlgqp,bnlgr->bngqpr", x_bnlgqp, B_bnlgr).flatten(2, 3)
    return written(out.to(wide if states_in_fp32 else B.dtype), states)


@of_tensors
def _chunk_state_bwd_dx(
    B: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor, dstates: Tensor, dx: Tensor | None = None
) -> tuple[Any, ...]:
    """Gradients of `x`, `dt` and `dA_cumsum` from that of the states."""

    def forward(x: Tensor, dt: Tensor, dA_cumsum: Tensor) -> Tensor:
        return _chunk_state_fwd(B, x, dt, dA_cumsum)

    d_x, d_dt, d_dA = pulled_back(forward, (x, dt, dA_cumsum), (dstates,))
    return written(d_x, dx), d_dt, d_dA


@of_tensors
def _chunk_state_bwd_db(
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    dstates: Tensor,
    seq_idx: Tensor | None = None,
    B: Tensor | None = None,
    ngroups: int = 1,
) -> Any:
    """The gradient of `B`, and if `B` is given that of the log-decays, not of their running sums."""
    zeros = x.new_zeros(*x.shape[:2], ngroups, dstates.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))
    (dB,) = pulled_back(lambda B: _chunk_state_fwd(B, x, dt, dA_cumsum, seq_idx), (zeros,), (dstates,))
    return dB if B is None else (dB, _chunk_state_bwd_ddAcs_stable(B, x, dt, dA_cumsum, dstates, seq_idx))


@of_tensors
def _chunk_state_bwd_ddAcs_stable(
    B: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor, dstates: Tensor, seq_idx: Tensor | None = None
) -> Tensor:
    """The gradient of the log-decays whose running sums are `dA_cumsum`."""

    def forward(dA: Tensor) -> Tensor:
        return _chunk_state_fwd(B, x, dt, dA.cumsum(-1), seq_idx)

    return pulled_back(forward, (decays(dA_cumsum),), (dstates,))[0]


def decays(dA_cumsum: Tensor) -> Tensor:
    return torch.cat((dA_cumsum[..., :1], dA_cumsum.diff(dim=-1)), dim=-1)


@of_tensors
def chunk_state_varlen(
    B: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor, cu_seqlens: Tensor, chunk_states: Tensor
) -> Tensor:
    """The state at the end of every packed sequence, (sequences, h, p, r), from those that enter the chunks.

    All without an axis for the batch.
    """
    chunk_size, states = dt.shape[2], []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        chunk = max(end - 1, 0) // chunk_size
        first = chunk * chunk_size
        begin, last = max(start, first), dA_cumsum[:, chunk, max(end - 1 - first, 0)]
        inside = slice(begin - first, max(end, begin) - first)
        weight_hl = torch.exp(last[:, None] - dA_cumsum[:, chunk, inside]) * dt[:, chunk, inside]
        x_lhp, B_lgr = x[begin : max(end, begin)], B[begin : max(end, begin)]
        B_lhr = B_lgr.repeat_interleave(x.shape[1] // B.shape[1], dim=1)
        state = torch.einsum("hl,lhp,lhr->hpr", weight_hl, x_lhp.to(weight_hl.dtype), B_lhr.to(weight_hl.dtype))
        if start < first:
            state = state + torch.exp(last)[:, None, None] * chunk_states[chunk]
        states.append(state.to(chunk_states.dtype))
    return torch.stack(states)


@of_tensors
def chunk_state(B: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor, states_in_fp32: bool = True) -> Tensor:
    """`_chunk_state_fwd` without packed sequences; differentiable, as it is."""
    return _chunk_state_fwd(B, x, dt, dA_cumsum, states_in_fp32=states_in_fp32)


ChunkStateFn = through_apply("ChunkStateFn", chunk_state)
