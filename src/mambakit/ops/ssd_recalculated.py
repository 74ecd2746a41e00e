"""The serial scan with a backward of its own: it keeps the inputs only and visits one chunk at a time.

It stands behind the torch operator of `SSD`, so that `torch.compile` and `torch.export` see one node and no unrolled
loop. The derivation of the backward is in docs/math.md, "The recalculated backward".
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.ops.shapes import full_precision
from mambakit.ops.ssd_chunked import (
    SsdChunks,
    chunk_gap,
    decay_from_start,
    decay_to_end,
    gap_by_difference,
    pair_decay,
    pair_product,
    pair_weight,
    read_entering,
    read_own_chunk,
    running_sum,
    write_chunk,
)
from mambakit.ops.ssd_path import SsdPath


class Sequence(NamedTuple):
    """The core's inputs, whole and in their own dtypes: what the backward keeps."""

    dtype: torch.dtype
    segments_bs: Tensor | None
    v_bsmhp: Tensor
    b_bsmgr: Tensor
    c_bsmgr: Tensor
    da_bsh: Tensor
    w_now_bsh: Tensor
    w_later_bsh: Tensor

    def cut(self, span: slice) -> SsdChunks:
        """The tokens of `span` as one chunk."""
        g = self.b_bsmgr.shape[3]

        def by_group(tensor: Tensor, heads: int) -> Tensor:
            return tensor[:, span].unflatten(heads, (g, tensor.shape[heads] // g))[:, None].to(self.dtype)

        before = max(span.start - 1, 0)
        return SsdChunks(
            v_bnlmgqp=by_group(self.v_bsmhp, 3),
            b_bnlmgr=self.b_bsmgr[:, None, span].to(self.dtype),
            c_bnlmgr=self.c_bsmgr[:, None, span].to(self.dtype),
            da_bnlgq=by_group(self.da_bsh, 2),
            w_now_bnlgq=by_group(self.w_now_bsh, 2),
            w_later_bnlgq=by_group(self.w_later_bsh, 2),
            segments_bnl=None if self.segments_bs is None else self.segments_bs[:, None, span],
            before_bn=None if self.segments_bs is None else self.segments_bs[:, before, None],
        )


def spans(length: int, chunk_len: int) -> list[slice]:
    return [slice(start, min(start + chunk_len, length)) for start in range(0, length, chunk_len)]


def to_core(state_bhpr: Tensor, groups: int) -> Tensor:
    """`bhpr` to the layout of the chunk steps, `bgrqp`."""
    # Contiguous, because sums inherit this layout from chunk to chunk and the products want it.
    return state_bhpr.unflatten(1, (groups, -1)).permute(0, 1, 4, 2, 3).contiguous()


def from_core(state_bgrqp: Tensor) -> Tensor:
    return state_bgrqp.permute(0, 1, 3, 4, 2).flatten(1, 2).contiguous()


def advance(x: SsdChunks, state_bgrqp: Tensor) -> Tensor:
    """The state after one chunk."""
    a_bnlgq = running_sum(x.da_bnlgq)
    decay_bg1q1 = chunk_gap(x, a_bnlgq)[:, 0].exp()[:, :, None, :, None]
    return decay_bg1q1 * state_bgrqp + write_chunk(x, a_bnlgq)[:, 0]


def default_chunk_len(v_bsmhp: Tensor, b_bsmgr: Tensor) -> int:
    # The pairs of a chunk number (l m)^2: with several ranks, chunks as much shorter take half the time.
    optimal = SsdPath.optimal_chunk_len(b_bsmgr.shape[-1], v_bsmhp.shape[-1])
    return max(optimal // v_bsmhp.shape[2], 16)


def read_inputs(*inputs: Any) -> tuple[Sequence, Tensor, int]:
    """The inputs of `SSD`: its sequence, the entering state and the length of chunks."""
    *sequence, state_bhpr, segments_bs, chunk_len = inputs
    x = Sequence(state_bhpr.dtype, segments_bs, *sequence)
    return x, state_bhpr, min(chunk_len or default_chunk_len(x.v_bsmhp, x.b_bsmgr), x.v_bsmhp.shape[1])


def recalculated(*inputs: Any) -> list[Tensor]:
    """The outputs and the last state of `SSD`."""
    x, state_bhpr, chunk_len = read_inputs(*inputs)
    y_bsmhp = x.v_bsmhp.new_empty(x.v_bsmhp.shape)
    state_bgrqp = to_core(state_bhpr, x.b_bsmgr.shape[3])
    with full_precision(y_bsmhp.device):
        for span in spans(y_bsmhp.shape[1], chunk_len):
            chunk = x.cut(span)
            a_bnlgq = running_sum(chunk.da_bnlgq)
            y_bnlmgqp = read_own_chunk(chunk, gap_by_difference(chunk, a_bnlgq))
            y_bnlmgqp += read_entering(chunk, a_bnlgq, state_bgrqp[:, None])
            y_bsmhp[:, span] = y_bnlmgqp[:, 0].flatten(3, 4)
            state_bgrqp = advance(chunk, state_bgrqp)
    return [y_bsmhp, from_core(state_bgrqp)]


def recalculated_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor]:
    """Gradients of the seven floating-point inputs of `SSD`, in its order."""
    *inputs, _ = inputs_and_needs
    x, state_bhpr, chunk_len = read_inputs(*inputs)
    d_y_bsmhp, d_state_bhpr = grads
    found = [tensor.new_empty(tensor.shape) for tensor in inputs[:6]]
    groups = x.b_bsmgr.shape[3]
    d_state_bgrqp = to_core(d_state_bhpr, groups)
    with full_precision(d_y_bsmhp.device):
        for span, entering_bgrqp in entering_backwards(x, to_core(state_bhpr, groups), chunk_len):
            d_y_bnlmgqp = d_y_bsmhp[:, None, span].unflatten(4, (groups, -1)).to(x.dtype)
            d_chunk, d_state_bgrqp = chunk_backward(x.cut(span), entering_bgrqp, d_y_bnlmgqp, d_state_bgrqp)
            for whole, part in zip(found, d_chunk, strict=True):
                whole[:, span] = part[:, 0].reshape(whole[:, span].shape)
    return [*found, from_core(d_state_bgrqp)]


def entering_backwards(x: Sequence, state_bgrqp: Tensor, chunk_len: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield every chunk's span and entering state, last chunk first.

    Only every root-th state is kept on the way up and the stretch between two of them recomputed on the way down: with
    `n` chunks about `2 sqrt(n)` states exist at a time instead of `n`, for one more pass over the writes.
    """
    todo = spans(x.v_bsmhp.shape[1], chunk_len)
    stride = math.isqrt(len(todo) - 1) + 1
    kept = []
    for i in range((len(todo) - 1) // stride * stride):
        if i % stride == 0:
            kept.append(state_bgrqp)
        state_bgrqp = advance(x.cut(todo[i]), state_bgrqp)
    kept.append(state_bgrqp)
    for k in reversed(range(len(kept))):
        stretch = todo[k * stride : (k + 1) * stride]
        states = [kept.pop()]
        for span in stretch[:-1]:
            states.append(advance(x.cut(span), states[-1]))
        while states:
            yield stretch[len(states) - 1], states.pop()


def chunk_backward(
    x: SsdChunks, entering_bgrqp: Tensor, d_y_bnlmgqp: Tensor, d_last_bgrqp: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of one chunk's tensors (v, b, c, da, w_now, w_later) and of the state that entered it."""
    a_bnlgq = running_sum(x.da_bnlgq)
    d_v, d_b, d_c, d_gap_bnlgq, d_w_now, d_w_later = read_own_chunk_backward(x, a_bnlgq, d_y_bnlmgqp)
    entering_bngrqp, d_last_bngrqp = entering_bgrqp[:, None], d_last_bgrqp[:, None]

    # Reading the entering state: y += exp(a_l) h c_l.
    d_held_bnlmgqp = d_y_bnlmgqp * decay_from_start(x, a_bnlgq)[:, :, :, None, :, :, None]
    held_bnlmgqp = torch.einsum("bnlmgr,bngrqp->bnlmgqp", x.c_bnlmgr, entering_bngrqp)
    d_start_bnlgq = (d_held_bnlmgqp * held_bnlmgqp).sum((3, 6))
    d_c += torch.einsum("bnlmgqp,bngrqp->bnlmgr", d_held_bnlmgqp, entering_bngrqp)
    d_entering_bgrqp = torch.einsum("bnlmgr,bnlmgqp->bgrqp", x.c_bnlmgr, d_held_bnlmgqp)

    # Writing the leaving state: h_end += exp(a_end - a_l) w_later_l u_l.
    end_bnlgq = decay_to_end(x, a_bnlgq)
    weight_bnlmgqp = (end_bnlgq * x.w_later_bnlgq)[:, :, :, None, :, :, None]
    d_write_bnlmgqp = torch.einsum("bnlmgr,bngrqp->bnlmgqp", x.b_bnlmgr, d_last_bngrqp)
    d_weight_bnlgq = (d_write_bnlmgqp * x.v_bnlmgqp).sum((3, 6))
    d_b += torch.einsum("bnlmgqp,bngrqp->bnlmgr", x.v_bnlmgqp * weight_bnlmgqp, d_last_bngrqp)
    d_v += d_write_bnlmgqp.mul_(weight_bnlmgqp)
    d_w_later += end_bnlgq * d_weight_bnlgq
    d_end_bnlgq = end_bnlgq * x.w_later_bnlgq * d_weight_bnlgq

    # Carrying the state over: h_end += exp(a_end) h.
    decay_bngq = chunk_gap(x, a_bnlgq).exp()
    d_carry_bngq = decay_bngq * (d_last_bngrqp * entering_bngrqp).sum((3, 5))
    d_entering_bgrqp += decay_bngq[:, 0, :, None, :, None] * d_last_bgrqp

    # Token k decays every read at or after it and every write before it. Summing just those never subtracts.
    d_da = d_gap_bnlgq + d_carry_bngq[:, :, None]
    d_da += d_start_bnlgq.flip(2).cumsum(2).flip(2)
    d_da[:, :, 1:] += d_end_bnlgq[:, :, :-1].cumsum(2)
    return (d_v, d_b, d_c, d_da, d_w_now, d_w_later), d_entering_bgrqp


def read_own_chunk_backward(x: SsdChunks, a_bnlgq: Tensor, d_y_bnlmgqp: Tensor) -> tuple[Tensor, ...]:
    """Gradients of `read_own_chunk` for v, b, c, da, w_now and w_later."""
    decay_bngqlt = pair_decay(x, gap_by_difference(x, a_bnlgq))
    weight_bngqlt = pair_weight(x, decay_bngqlt)[:, :, :, :, None, :, None]
    product_bngmljt = pair_product(x)[:, :, :, None]
    d_v = torch.einsum("bngqmljt,bnlmgqp->bntjgqp", weight_bngqlt * product_bngmljt, d_y_bnlmgqp)

    d_mixed_bngqmljt = torch.einsum("bnlmgqp,bntjgqp->bngqmljt", d_y_bnlmgqp, x.v_bnlmgqp)
    d_product_bngmljt = (d_mixed_bngqmljt * weight_bngqlt).sum(3)
    d_c = torch.einsum("bngmljt,bntjgr->bnlmgr", d_product_bngmljt, x.b_bnlmgr)
    d_b = torch.einsum("bngmljt,bnlmgr->bntjgr", d_product_bngmljt, x.c_bnlmgr)

    d_weight_bngqlt = d_mixed_bngqmljt.mul_(product_bngmljt).sum((4, 6))
    d_w_now = d_weight_bngqlt.diagonal(dim1=-2, dim2=-1).permute(0, 1, 4, 2, 3)
    d_later_bngqlt = d_weight_bngqlt * decay_bngqlt
    d_w_later = d_later_bngqlt.sum(-2).permute(0, 1, 4, 2, 3)
    d_gap_bngqlt = d_later_bngqlt.mul_(x.w_later_bnlgq.permute(0, 1, 3, 4, 2)[..., None, :])
    return d_v, d_b, d_c, sum_of_crossing(d_gap_bngqlt).permute(0, 1, 4, 2, 3), d_w_now, d_w_later


def sum_of_crossing(d_gap_lt: Tensor) -> Tensor:
    """For every token k the sum over the pairs it lies between, t < k <= l: those whose gap holds its decay."""
    length = d_gap_lt.shape[-1]
    below_lt = torch.ones(length, length, dtype=d_gap_lt.dtype, device=d_gap_lt.device).tril(-1)
    up_to_lt = d_gap_lt.cumsum(-1).mul_(below_lt)
    return torch.nn.functional.pad(up_to_lt.sum(-2)[..., :-1], (1, 0))
