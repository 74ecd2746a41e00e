"""What crosses from one share of a sequence to the next, where every rank of a group has a share; see docs/parallel.md.

Ranks are `j`, in the order of their shares. A family sends what its own share does to whatever enters it, once, and
every rank follows all shares from the first to the last: so each knows what enters its own, and what leaves the last.
All ranks have to issue the same collectives in the same order, in the backward pass too. So nothing here branches on
the rank, and what is gathered stays in the history of the outputs, even of none.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mambakit.ops.causal_conv import last_inputs
from mambakit.ops.segments import segment_starts
from mambakit.ops.shapes import full_precision

Carried = tuple[Tensor, ...]

_running = threading.local()
_running.boundary = None


class Facts(NamedTuple):
    """Of every rank's share of each row."""

    length_jb: Tensor
    """Tokens that are there."""
    since_jb: Tensor
    """Tokens from the last reset inside of the share on; all where there is none."""
    fresh_jb: Tensor | None = None
    """A reset comes before the first token. None where no call may have any."""
    ends_jb: Tensor | None = None
    """A reset comes after the last token."""

    @property
    def is_cut_jb(self) -> Tensor:
        """A reset comes between two tokens: what enters does not leave."""
        return self.since_jb < self.length_jb


class Boundary:
    """One call of a model on shares: who takes part, and where their sequences start."""

    def __init__(self, group: Any):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._facts: Facts | None = None

    @property
    def facts(self) -> Facts:
        assert self._facts is not None, "a block tells them before it runs"
        return self._facts

    def learn(
        self, length_b: Tensor, segments_bs: Tensor | None, fresh_b: Tensor | None = None, ends_b: Tensor | None = None
    ) -> None:
        """This rank's facts, for everyone. The same for all blocks of a call, so only the first one's are sent."""
        if self._facts is not None:
            return
        start_b = torch.zeros_like(length_b)
        if segments_bs is not None and segments_bs.shape[1] > 1:
            # Padding belongs to the segment of the last token.
            start_b = segment_starts(segments_bs)[:, -1]
        flags = [torch.zeros_like(length_b) if flag_b is None else flag_b.long() for flag_b in (fresh_b, ends_b)]
        own_4b = torch.stack([length_b, length_b - start_b, *flags])
        length_jb, since_jb, fresh_jb, ends_jb = all_gather(own_4b, self.group).unbind(1)
        resets = () if segments_bs is None else (fresh_jb.bool(), ends_jb.bool())
        self._facts = Facts(length_jb, since_jb, *resets)

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """What all ranks have, in at least float32, with an axis `j` before the others: one collective for all."""
        wide = torch.float32
        for tensor in tensors:
            wide = torch.promote_types(wide, tensor.dtype)
        flat_X = torch.cat([tensor.to(wide).flatten() for tensor in tensors])
        all_jX = Gather.apply(flat_X, self.group)
        parts = all_jX.split([tensor.numel() for tensor in tensors], 1)
        return [part_jX.view(self.size, *tensor.shape) for part_jX, tensor in zip(parts, tensors, strict=True)]

    def follow(
        self, start: Carried, fresh: Callable[[], Carried], through: Callable[[int, Carried], Carried]
    ) -> tuple[Carried, Carried]:
        """What enters this rank's share, and what leaves the last one.

        `start` enters the first share, `through(j, carried)` is what a share makes of what enters it, and resets put
        `fresh` in its place. Axes start with b.
        """
        facts, carried, entering = self.facts, start, start
        resets = facts.fresh_jb is not None
        new = fresh() if resets else ()
        for j in range(self.size):
            if facts.fresh_jb is not None:
                carried = pick(facts.fresh_jb[j], new, carried)
            entering = pick(torch.full_like(facts.length_jb[0], j <= self.rank, dtype=torch.bool), carried, entering)
            carried = through(j, carried)
            if facts.ends_jb is not None:
                carried = pick(facts.ends_jb[j], new, carried)
        # In the history of all ranks alike, the first one's too.
        nowhere_b = torch.zeros_like(facts.length_jb[0], dtype=torch.bool)
        return pick(nowhere_b, carried, entering), carried


def boundary() -> Boundary | None:
    """The one that this thread's model is called across."""
    return getattr(_running, "boundary", None)


class Across:
    """Inside, blocks take what they are given for this rank's share; with None, for whole sequences."""

    def __init__(self, edge: Boundary | None):
        self.edge = edge

    def __enter__(self) -> None:
        self.before, _running.boundary = boundary(), self.edge

    def __exit__(self, *raised: object) -> None:
        _running.boundary = self.before


def all_gather(x: Tensor, group: Any) -> Tensor:
    """Of all ranks, with an axis for them before the others."""
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather(list(out.unbind()), x.contiguous(), group=group)
    return out


class Gather(torch.autograd.Function):
    """`all_gather` whose gradient is the sum of what all ranks have for this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_all: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        d_all = d_all.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(d_all, group=ctx.group)
        return d_all[dist.get_rank(ctx.group)], None


def next_labels(edge: Boundary, labels_bs: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """For each token of this rank's share the label of the next one, the following ranks' first among them.

    And how many labels there are on all ranks, those that are `ignored` left out.
    """
    b, s = labels_bs.shape
    first_b = F.pad(labels_bs, (0, 1), value=ignored)[:, 0]
    told_jX = all_gather(torch.cat([first_b, first_b.new_tensor([s])]), edge.group)
    # Of a rank without tokens the next one's.
    following = [told_X[:b] for told_X in told_jX[edge.rank + 1 :] if int(told_X[b])]
    after_b = following[0] if following else torch.full_like(first_b, ignored)
    next_bs = torch.cat([labels_bs[:, 1:], after_b[:, None]], 1) if s else labels_bs
    return next_bs, all_gather((next_bs != ignored).sum()[None], edge.group).sum()


def pick(flag_b: Tensor, chosen: Carried, others: Carried) -> Carried:
    """The chosen ones in the rows with the flag."""
    return tuple(
        torch.where(flag_b.view(-1, *[1] * (other.dim() - 1)), new.to(other.dtype), other)
        for new, other in zip(chosen, others, strict=True)
    )


def linked(y: Tensor, *others: Tensor) -> Tensor:
    """`y`, with the others in its history even where it is empty and does not depend on any."""
    return y if y.numel() else y + sum(other.sum() for other in others).to(y.dtype)  # type: ignore[union-attr]


def pass_window(
    edge: Boundary, x_bsv: Tensor, window_bvk: Tensor, segments_bs: Tensor | None, lengths_b: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The convolution's window before this rank's first input, and the one after the last rank's last."""
    k, facts = window_bvk.shape[2], edge.facts
    own_bvk = last_inputs(x_bsv, None, k, segments_bs if x_bsv.shape[1] else None, lengths_b)
    (own_jbvk,) = edge.gather(own_bvk)
    # Past a reset nothing is left of what was in the window.
    moves_jb = torch.where(facts.is_cut_jb, k, facts.length_jb.clamp(max=k))

    def through(j: int, carried: Carried) -> Carried:
        index_b1k = (moves_jb[j][:, None] + torch.arange(k, device=moves_jb.device))[:, None]
        older_bvk = F.pad(carried[0], (0, k)).gather(2, index_b1k.expand_as(carried[0]))
        return (older_bvk + own_jbvk[j],)

    start = window_bvk.to(own_jbvk.dtype)
    (entering,), (after,) = edge.follow((start,), lambda: (torch.zeros_like(start[:1]),), through)
    return entering.to(window_bvk.dtype), after.to(window_bvk.dtype)


def own_writes(
    v_bsmhp: Tensor, b_bsmgr: Tensor, da_bsh: Tensor, w_later_bsh: Tensor, segments_bs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What `ssd` leaves of a share that nothing enters, and how much it leaves of what does: `S_bhpr`, `decay_bh`."""
    tensors = (v_bsmhp, b_bsmgr, da_bsh, w_later_bsh, segments_bs)
    # One product over the sequence: computed again rather than kept.
    return checkpoint(_own_writes, *tensors, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]


def _own_writes(
    v_bsmhp: Tensor, b_bsmgr: Tensor, da_bsh: Tensor, w_later_bsh: Tensor, segments_bs: Tensor | None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(v_bsmhp.dtype, torch.float32)
    sum_bsh = da_bsh.cumsum(1, dtype=torch.float32 if da_bsh.device.type == "mps" else torch.float64)
    end_b1h = F.pad(sum_bsh, (0, 0, 1, 0))[:, -1:]
    weight_bsh = (end_b1h - sum_bsh).to(wide).exp() * w_later_bsh
    decay_bh = end_b1h[:, 0].to(wide).exp()
    if segments_bs is not None and segments_bs.shape[1]:
        weight_bsh = weight_bsh * (segments_bs == segments_bs[:, -1:])[..., None]
        decay_bh = decay_bh.masked_fill((segments_bs[:, 0] != segments_bs[:, -1])[:, None], 0)
    v_bsmgqp = (v_bsmhp.to(wide) * weight_bsh[:, :, None, :, None]).unflatten(3, (b_bsmgr.shape[3], -1))
    with full_precision(v_bsmhp.device):
        written_bgqpr = torch.einsum("bsmgqp,bsmgr->bgqpr", v_bsmgqp, b_bsmgr.to(wide))
    return written_bgqpr.flatten(1, 2), decay_bh


def pass_state(
    edge: Boundary, written_bX: Tensor, decay_bX: Tensor, state_bX: Tensor, fresh: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """The state before this rank's first token, and the one after the last rank's last: `decay state + written`."""
    written_jbX, decay_jbX = edge.gather(written_bX, decay_bX)
    decay_jbX = decay_jbX.view(*decay_jbX.shape, *[1] * (written_jbX.dim() - decay_jbX.dim()))
    (entering,), (after,) = edge.follow(
        (state_bX.to(written_jbX.dtype),),
        lambda: (fresh(),),
        lambda j, carried: (decay_jbX[j] * carried[0] + written_jbX[j],),
    )
    return entering, after
