"""How a lean call divides its work: heads among ranks, as the family's record says, and tokens into pieces."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.blocks.family import family_of
from mambakit.blocks.shares import Part, Shares, Split
from mambakit.ops.team import Team

ROWS = 512
"""Tokens that a part of the batch should have at least."""
FEW = 16
"""Projected channels of a rank that are computed with those of all others."""
HARDLY = 1.05
"""So much more memory is worth fewer steps where what was asked for cannot be had."""
BLOCK = 256
"""Rows of the input projection that are worth a product of their own."""


class Plan(NamedTuple):
    size: int
    """How many ranks there are."""
    piece: int
    """Tokens of a piece."""


@lru_cache(maxsize=256)
def plan(config: Any, is_all: bool, rows: int, length: int, is_cut: bool, is_held: bool, room: int, late: int) -> Plan:
    """The fewest steps whose work, in numbers, has room; where none has, whose work is hardly more than the smallest.

    `is_all` says that all norms are inside of ranks, which then need all that one of them is over. `is_held` says that
    what is projected has its room elsewhere; then the room for `late` is free until the end.
    """
    per_head, found = family_of(config).block.lines_per_head, []
    sizes = [length] if not is_cut else sorted({-(-length // n) for n in range(1, -(-length // 32) + 1)})
    for n in range(1, config.nheads + 1):
        if config.nheads % n:
            continue
        try:
            share = shares_of(config, Team(None, 0, n))
        except ValueError:
            continue
        if n > 1 and is_all and share.modules and getattr(config, "rmsnorm", True):
            continue
        channels = Channels(config, n)
        own, once = (sum(at.stop - at.start for _, at in places) for places in (channels.own(0), channels.once()))
        given, ranks = len(channels.split.own(Team(None, 0, n))), config.ranks if per_head else 1
        inner, lines = (config.nheads // n * width for width in (config.per_head_dim, 2 * ranks * config.state_rank))
        # What is alive at once in the backward between the projections, as it was counted.
        alive = (4 * ranks + 1) * inner + 2 * lines if per_head else inner + 3 * given
        widest = max(at.stop - at.start for _, at in (*channels.own(0), *channels.once()))
        for piece in sizes:
            steps = -(-length // piece)
            kept = steps * inner * config.state_rank + length * once
            # The last token's lines have a gradient of their own where there is a next piece.
            more = lines // 2 + inner if per_head and steps > 1 else 0
            work = rows * (piece * (alive + more) + kept)
            if is_held:
                work = max(work, late + rows * length * max(widest, BLOCK))
            else:
                work += late + rows * length * (once + own)
            # All pieces but the last are gone through once more.
            found.append((n * (2 * steps - 1), n, piece, work))
    most = max(room, HARDLY * min(work for *_, work in found))
    _, n, piece, _ = min(each for each in found if each[-1] <= most)
    return Plan(n, piece)


def slabs(batch: int, length: int) -> list[slice]:
    """Rows of the batch that are gone through together."""
    rows = max(ROWS // max(length, 1), 1)
    return [slice(start, min(start + rows, batch)) for start in range(0, batch, rows)]


class Channels:
    """Which rows of the input projection each of so many ranks has, and which are for all of them."""

    def __init__(self, config: Any, size: int):
        self.split = shares_of(config, Team(None, 0, size)).parameters["in_proj.weight"]
        self.size, self.places, start = size, [], 0
        for part in self.split.parts:
            self.places.append((part, start))
            start += part.size

    def is_own(self, part: Part) -> bool:
        return part.taken is None and part.size // self.size >= FEW

    def once(self) -> Iterator[tuple[Part, slice]]:
        return ((whole(part), slice(at, at + part.size)) for part, at in self.places if not self.is_own(part))

    def own(self, rank: int) -> Iterator[tuple[Part, slice]]:
        for part, at in self.places:
            if self.is_own(part):
                count = part.size // self.size
                yield part, slice(at + rank * count, at + (rank + 1) * count)


@lru_cache(maxsize=256)
def shares_of(config: Any, team: Team) -> Shares:
    shares = family_of(config).shares
    assert shares is not None, "families whose blocks lean have shares"
    return shares(config, team)


def whole(part: Part) -> Part:
    """The part, whoever takes what of it."""
    return part._replace(taken=None)


@lru_cache(maxsize=1024)
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
