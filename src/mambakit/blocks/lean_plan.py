"""How a lean call divides its work: heads among ranks, as the family's record says, and tokens into pieces."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.blocks.family import family_of
from mambakit.blocks.shares import Part, Shares, Split
from mambakit.ops.team import Team

ROWS = 512
"""Tokens that a part of the batch should have at least."""
FEW = 16
"""Projected channels of a rank that are computed faster with those of all others."""


class Plan(NamedTuple):
    size: int
    """How many ranks there are."""
    piece: int
    """Tokens of a piece."""
    keeps: bool
    """Whether a rank keeps what it projects for its way back."""
    least: int
    """Fewer projected channels of a rank are computed once for all of them."""


@lru_cache(maxsize=256)
def plan(config: Any, is_all: bool, batch: int, length: int, is_cut: bool, room: int, grain: int = 1) -> Plan:
    """The fewest steps whose work, in numbers, has room, else the smallest work.

    Where room is missed, a `grain` more or less does not count. `is_all` says that all norms are inside of ranks, which
    then need all that one of them is over.
    """
    family, found = family_of(config), []
    rows = min(batch, max(ROWS // max(length, 1), 1))
    sizes = [length] if not is_cut else sorted({min(length, 32 << i) for i in range(12)})
    for n in range(1, config.nheads + 1):
        if config.nheads % n:
            continue
        try:
            share = shares_of(config, Team(None, 0, n))
        except ValueError:
            continue
        if n > 1 and is_all and share.modules and getattr(config, "rmsnorm", True):
            continue
        split, heads = share.parameters["in_proj.weight"], config.nheads // n
        lines = 2 * heads * config.ranks * config.state_rank if family.block.lines_per_head else 0
        state = heads * config.per_head_dim * config.state_rank
        for piece, least in product(sizes, (FEW, 1)):
            columns, steps = Columns(split, n, least), -(-length // piece)
            once = sum(part.size for part, _ in columns.once())
            own = sum(at.stop - at.start for at in columns.own(0).values())
            used = len(split.own(Team(None, 0, n))) - own
            # What is alive at once in the backward between the projections, as it was counted.
            alive = 7 * own + (2 * used + 3.5 * lines if lines else 3 * used)
            for keeps in (True, False) if steps > 1 else (True,):
                work = rows * (length * (2 * once + keeps * own) + piece * alive + steps * state)
                time = n * steps * (1.0 if keeps else 1.3) * (1.0 if least > 1 else 1.1)
                found.append((-(-max(work - room, 0) // grain), time, -piece, n, keeps, least))
    _, _, piece, n, keeps, least = min(found)
    return Plan(n, -piece, keeps, least)


def slabs(batch: int, length: int) -> Iterator[slice]:
    """Rows of the batch that are gone through together."""
    rows = max(ROWS // max(length, 1), 1)
    return (slice(start, min(start + rows, batch)) for start in range(0, batch, rows))


class Columns:
    """Which projected channels are computed once for all ranks, and which for each alone."""

    def __init__(self, split: Split, size: int, least: int):
        self.places, self.size, self.least, start = [], size, least, 0
        for part in split.parts:
            self.places.append((part, start))
            start += part.size

    def is_own(self, part: Part) -> bool:
        return part.taken is None and part.size // self.size >= self.least

    def once(self) -> Iterator[tuple[Part, slice]]:
        return ((whole(part), slice(at, at + part.size)) for part, at in self.places if not self.is_own(part))

    def own(self, rank: int) -> dict[Part, slice]:
        found = {}
        for part, at in self.places:
            if self.is_own(part):
                count = part.size // self.size
                found[part] = slice(at + rank * count, at + (rank + 1) * count)
        return found


def shares_of(config: Any, team: Team) -> Shares:
    shares = family_of(config).shares
    assert shares is not None, "families whose blocks lean have shares"
    return shares(config, team)


def whole(part: Part) -> Part:
    """The part, whoever takes what of it."""
    return part._replace(taken=None)


def entries(split: Split, team: Team) -> Any:
    """Of an axis, those that a rank computes with: a slice, or their indices."""
    own = split.own(team)
    if own == list(range(own[0], own[0] + len(own))):
        return slice(own[0], own[0] + len(own))
    return torch.tensor(own)


def take(tensor: Tensor, split: Split | None, team: Team) -> Tensor:
    """A rank's share of a tensor, contiguous."""
    if split is None or team.size == 1:
        return tensor
    own = entries(split, team)
    if isinstance(own, slice):
        return tensor.narrow(split.axis, own.start, own.stop - own.start).contiguous()
    return tensor.index_select(split.axis, own.to(tensor.device))


def add_to(total: Tensor, share: Tensor, split: Split | None, team: Team) -> None:
    if split is None or team.size == 1:
        total += share
        return
    own = entries(split, team)
    if isinstance(own, slice):
        total.narrow(split.axis, own.start, own.stop - own.start).add_(share)
    else:
        total.index_add_(split.axis, own.to(total.device), share.to(total.dtype))
