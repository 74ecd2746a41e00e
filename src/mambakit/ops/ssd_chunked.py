"""The core scan in chunks: four steps, and the two algorithms that leave the backward to autograd.

    u_t    = sum_m v_t[m] (x) b_t[m]
    h_t    = exp(da_t) h_{t-1} + w_later_t u_t
    y_t[m] = (exp(da_t) h_{t-1} + w_now_t u_t) c_t[m]

Heads come as `g` groups of `q` that share B and C: `c . b` is formed once per group, and the products with the state
cover all channels of a group at once. For that, states are kept as `grqp` in here, state axis before the channels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FORGOTTEN = -1000.0
"""A log-decay whose exponential is zero in every dtype, as is that of anything below it."""


@dataclass(frozen=True, slots=True)
class SsdChunks:
    """The core's inputs cut into chunks, in the dtype to compute in."""

    v_bnlmgqp: Tensor
    b_bnlmgr: Tensor
    c_bnlmgr: Tensor
    da_bnlgq: Tensor
    w_now_bnlgq: Tensor
    w_later_bnlgq: Tensor
    segments_bnl: Tensor | None = None
    """Ids of packed sequences."""
    before_bn: Tensor | None = None
    """Id of the token before each chunk, whose state enters it."""


def ssd_minimal(x: SsdChunks, state_bgrqp: Tensor) -> tuple[Tensor, Tensor]:
    """Batched products only: all states pass from chunk to chunk in one matrix product."""
    return scan(x, state_bgrqp, gap_by_summing, pass_states_at_once)


def ssd_serial(x: SsdChunks, state_bgrqp: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a loop over chunks for the states, linear in their number."""
    return scan(x, state_bgrqp, gap_by_difference, pass_states_in_turn)


def scan(x: SsdChunks, state_bgrqp: Tensor, gap: Callable, pass_states: Callable) -> tuple[Tensor, Tensor]:
    """The four steps. Returns `y_bnlmgqp` and the state after the last chunk."""
    a_bnlgq = running_sum(x.da_bnlgq)
    own_bnlmgqp = read_own_chunk(x, gap(x, a_bnlgq))
    written_bngrqp = write_chunk(x, a_bnlgq)
    entering_bngrqp, last_bgrqp = pass_states(written_bngrqp, chunk_gap(x, a_bnlgq), state_bgrqp)
    return own_bnlmgqp + read_entering(x, a_bnlgq, entering_bngrqp), last_bgrqp


def read_own_chunk(x: SsdChunks, gap_bngqlt: Tensor) -> Tensor:
    """What tokens read of their own chunk: earlier writes decayed on the way, their own weighed by `w_now`."""
    weight_bngqlt = pair_weight(x, pair_decay(x, gap_bngqlt))
    mixed_bngqmljt = weight_bngqlt[:, :, :, :, None, :, None] * pair_product(x)[:, :, :, None]
    return torch.einsum("bngqmljt,bntjgqp->bnlmgqp", mixed_bngqmljt, x.v_bnlmgqp)


def write_chunk(x: SsdChunks, a_bnlgq: Tensor) -> Tensor:
    """What each chunk leaves at its end: sum_l exp(a_end - a_l) w_later_l u_l."""
    weight_bnlgq = decay_to_end(x, a_bnlgq) * x.w_later_bnlgq
    return torch.einsum("bnlmgr,bnlmgqp->bngrqp", x.b_bnlmgr, x.v_bnlmgqp * weight_bnlgq[:, :, :, None, :, :, None])


def pass_states_in_turn(written_bngrqp: Tensor, gap_bngq: Tensor, state_bgrqp: Tensor) -> tuple[Tensor, Tensor]:
    """States entering every chunk, and the one leaving the last."""
    decay_bng1q1 = gap_bngq.exp()[:, :, :, None, :, None]
    entering = []
    for n in range(written_bngrqp.shape[1]):
        entering.append(state_bgrqp)
        state_bgrqp = decay_bng1q1[:, n] * state_bgrqp + written_bngrqp[:, n]
    return torch.stack(entering, 1), state_bgrqp


def pass_states_at_once(written_bngrqp: Tensor, gap_bngq: Tensor, state_bgrqp: Tensor) -> tuple[Tensor, Tensor]:
    """The same through a matrix of the decays between all pairs of chunk ends, the first being the entering state."""
    ends_bNgrqp = torch.cat([state_bgrqp[:, None], written_bngrqp], 1)
    gap_bgqN = torch.nn.functional.pad(gap_bngq.permute(0, 2, 3, 1), (1, 0))
    # The gap of a pair sums what lies after the earlier one; -inf at a segment's start cuts off all before it.
    decay_bgqNM = sums_between(gap_bgqN).exp()
    states_bNgrqp = torch.einsum("bgqNM,bMgrqp->bNgrqp", decay_bgqNM, ends_bNgrqp)
    return states_bNgrqp[:, :-1], states_bNgrqp[:, -1]


def read_entering(x: SsdChunks, a_bnlgq: Tensor, entering_bngrqp: Tensor) -> Tensor:
    """What tokens read of the state that entered their chunk: exp(a_l) h c_l."""
    held_bnlmgqp = torch.einsum("bnlmgr,bngrqp->bnlmgqp", x.c_bnlmgr, entering_bngrqp)
    return held_bnlmgqp * decay_from_start(x, a_bnlgq)[:, :, :, None, :, :, None]


def running_sum(da_bnlgq: Tensor) -> Tensor:
    """Inclusive sums `a_l` of the log-decays within each chunk.

    They are differenced below. In float64 (where the device has it) a strong decay early in a chunk does not
    drown the weak ones after it: 1e4 + 1e-4 is already lost in float32. One that forgets everything is bounded, for
    the same reason, and because infinities have no differences.
    """
    wide = da_bnlgq.dtype if da_bnlgq.device.type == "mps" else torch.float64
    return da_bnlgq.clamp(min=FORGOTTEN).cumsum(2, dtype=wide)


def gap_by_difference(x: SsdChunks, a_bnlgq: Tensor) -> Tensor:
    """Sum of the log-decays after writer t up to reader l, meaningful below the diagonal: a_l - a_t."""
    a_bngql = a_bnlgq.permute(0, 1, 3, 4, 2)
    return (a_bngql[..., :, None] - a_bngql[..., None, :]).to(x.da_bnlgq.dtype)


def gap_by_summing(x: SsdChunks, a_bnlgq: Tensor) -> Tensor:
    """The same without a subtraction."""
    return sums_between(x.da_bnlgq.permute(0, 1, 3, 4, 2))


def sums_between(a_l: Tensor) -> Tensor:
    """`[..., l, t]`: sum of `a` after t up to l; -inf above the diagonal."""
    length = a_l.shape[-1]
    below_lt = torch.ones(length, length, dtype=torch.bool, device=a_l.device).tril(-1)
    steps_lt = torch.where(below_lt, a_l[..., :, None], 0)
    return steps_lt.cumsum(-2).masked_fill(below_lt.mT, -math.inf)


def pair_decay(x: SsdChunks, gap_bngqlt: Tensor) -> Tensor:
    """Decay from writer t to a later reader l of the same segment, zero for every other pair."""
    length = gap_bngqlt.shape[-1]
    # Mask before exp: above the diagonal the gap is positive and overflows float32 past 88.
    blocked_lt = torch.ones(length, length, dtype=torch.bool, device=gap_bngqlt.device).triu()
    if x.segments_bnl is not None:
        blocked_lt = blocked_lt | (x.segments_bnl[..., :, None] != x.segments_bnl[..., None, :])[:, :, None, None]
    return gap_bngqlt.masked_fill(blocked_lt, -math.inf).exp()


def pair_weight(x: SsdChunks, decay_bngqlt: Tensor) -> Tensor:
    """How much of what t wrote l reads: decayed `w_later` below the diagonal, `w_now` on it."""
    now_bngql, later_bngql = (w.permute(0, 1, 3, 4, 2) for w in (x.w_now_bnlgq, x.w_later_bnlgq))
    own_lt = torch.eye(decay_bngqlt.shape[-1], dtype=torch.bool, device=decay_bngqlt.device)
    return torch.where(own_lt, now_bngql[..., None], decay_bngqlt * later_bngql[..., None, :])


def pair_product(x: SsdChunks) -> Tensor:
    """`c_l[m] . b_t[j]`, once per group."""
    return torch.einsum("bnlmgr,bntjgr->bngmljt", x.c_bnlmgr, x.b_bnlmgr)


def decay_from_start(x: SsdChunks, a_bnlgq: Tensor) -> Tensor:
    """exp(a_l), zero for tokens that do not continue the sequence before the chunk."""
    decay_bnlgq = a_bnlgq.to(x.da_bnlgq.dtype).exp()
    if x.segments_bnl is None or x.before_bn is None:
        return decay_bnlgq
    return decay_bnlgq * (x.segments_bnl == x.before_bn[:, :, None])[..., None, None]


def decay_to_end(x: SsdChunks, a_bnlgq: Tensor) -> Tensor:
    """exp(a_end - a_l), zero for tokens of a sequence that ends within the chunk."""
    decay_bnlgq = (a_bnlgq[:, :, -1:] - a_bnlgq).to(x.da_bnlgq.dtype).exp()
    if x.segments_bnl is None:
        return decay_bnlgq
    return decay_bnlgq * (x.segments_bnl == x.segments_bnl[:, :, -1:])[..., None, None]


def chunk_gap(x: SsdChunks, a_bnlgq: Tensor) -> Tensor:
    """Log-decay over each chunk, -inf where a new sequence begins in it."""
    gap_bngq = a_bnlgq[:, :, -1].to(x.da_bnlgq.dtype)
    if x.segments_bnl is None or x.before_bn is None:
        return gap_bngq
    return gap_bngq.masked_fill((x.segments_bnl[:, :, -1] != x.before_bn)[..., None, None], -math.inf)
