"""Muon over ranks that have parts of matrices: momenta stay parts, and each matrix is made orthogonal by one rank."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mambakit.parallel.pieces import Box, put_together

EPSILON = 1e-7


class Map(NamedTuple):
    shape: tuple[int, int]
    parts: list[Tensor]
    """What this rank has of the matrix."""
    boxes: list[tuple[Box, ...]]
    """Where the parts of every rank lie in it."""

    def sender(self, box: Box, owner: int) -> int:
        """Who sends a part to the rank that wants the whole: itself, if it has it."""
        return owner if box in self.boxes[owner] else next(r for r, has in enumerate(self.boxes) if box in has)


class Muon(torch.optim.Optimizer):
    """The steps of `torch.optim.Muon`, bit for bit below float64, on parts of matrices.

    In float64 matrices are made orthogonal in float64 as well, where torch rounds them to bfloat16. As many matrices as
    there are ranks are under way at a time: each rank gets the parts of one and sends back what becomes of them.
    """

    def __init__(self, maps: Sequence[Map], options: dict[str, Any], lr: float, rank: int = 0, world: int = 1):
        super().__init__([{**options, "params": [part for one in maps for part in one.parts]}], {"lr": lr})
        self._rank, self._world = rank, world
        # Those of one round should take about as long.
        self._maps = sorted(maps, key=lambda one: -math.prod(one.shape))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        [group] = self.param_groups
        for first in range(0, len(self._maps), self._world):
            round_ = self._maps[first : first + self._world]
            updates = [[self._update(part, group) for part in one.parts] for one in round_]
            for one, directions in zip(round_, self._directions(round_, updates, group), strict=True):
                lr = group["lr"] * 0.2 * math.sqrt(max(one.shape))
                for part, direction in zip(one.parts, directions, strict=True):
                    part.mul_(1 - group["lr"] * group["weight_decay"])
                    part.add_(direction, alpha=-lr)

    def _update(self, part: Tensor, group: dict[str, Any]) -> Tensor:
        assert part.grad is not None, "a part of a matrix has no gradient"
        momentum = self.state[part].setdefault("momentum_buffer", torch.zeros_like(part.grad))
        momentum.lerp_(part.grad, 1 - group["momentum"])
        return part.grad.lerp(momentum, group["momentum"])

    def _directions(self, round_: list[Map], updates: list[list[Tensor]], group: dict[str, Any]) -> list[list[Tensor]]:
        """Where to go, for each part of this round's matrices. Every rank has to ask."""
        if self._world == 1:
            return [[orthogonal(updates[0][0], group["ns_coefficients"], group["ns_steps"])]]
        me, ranks = self._rank, range(self._world)
        mine = round_[me] if me < len(round_) else None
        some = next(part for one in self._maps for part in one.parts)
        there: list[list[Tensor]] = [[] for _ in ranks]
        for owner, (one, own) in enumerate(zip(round_, updates, strict=True)):
            there[owner] = [part for box, part in zip(one.boxes[me], own, strict=True) if one.sender(box, owner) == me]
        sent = [[box for box in mine.boxes[r] if mine.sender(box, me) == r] if mine else [] for r in ranks]
        got = exchange(there, sent, some)
        back: list[list[Tensor]] = [[] for _ in ranks]
        if mine is not None:
            parts = [pair for r in ranks for pair in zip(sent[r], got[r], strict=True)]
            whole = orthogonal(put_together(mine.shape, parts), group["ns_coefficients"], group["ns_steps"])
            back = [[box.of(whole) for box in mine.boxes[r]] for r in ranks]
        wanted = [list(round_[r].boxes[me]) if r < len(round_) else [] for r in ranks]
        return exchange(back, wanted, some.new_empty(0, dtype=precision(some)))[: len(round_)]


def precision(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.bfloat16


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """About the nearest orthogonal matrix, by Newton and Schulz: X <- a X + (b G + c G G) X with G = X X^T."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(precision(matrix))
    x = x.T if tall else x
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def exchange(parts: list[list[Tensor]], coming: list[list[Box]], like: Tensor) -> list[list[Tensor]]:
    """Send parts to each rank, and get those that lie in the boxes that are known to come from each."""
    out = torch.cat([like.new_empty(0), *(part.reshape(-1) for to in parts for part in to)])
    sizes = [[math.prod(box.shape) for box in boxes] for boxes in coming]
    into = like.new_empty(sum(map(sum, sizes)))
    # As bytes: not all groups know all dtypes.
    item = like.element_size()
    dist.all_to_all_single(
        into.view(torch.uint8),
        out.view(torch.uint8),
        [item * sum(size) for size in sizes],
        [item * sum(part.numel() for part in to) for to in parts],
    )
    found = iter(into.split([size for group in sizes for size in group]))
    return [[next(found).view(box.shape) for box in boxes] for boxes in coming]
