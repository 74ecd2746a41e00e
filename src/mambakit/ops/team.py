"""Ranks that have a share of the width each: sums over them, with gradients; see docs/parallel.md.

All of them see the same tokens. What every rank has whole goes into a part of the arithmetic on each, so its gradient
is the sum of theirs; what each computes a part of is summed on the way out, and every rank has that sum's gradient.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Team(NamedTuple):
    group: Any
    rank: int
    size: int

    def __deepcopy__(self, memo: dict[int, Any]) -> "Team":
        # A copy of a model is on the same ranks.
        return self


class SumOut(torch.autograd.Function):
    """The sum of what all ranks have. Each rank's part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:  # type: ignore[override]
        return total(x, team)

    @staticmethod
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return d_sum, None


class SumBoth(torch.autograd.Function):
    """The same, for a sum that every rank goes on with in its own way: the gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:  # type: ignore[override]
        ctx.team = team
        return total(x, team)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return total(d_sum, ctx.team), None


class JoinLast(torch.autograd.Function):
    """What all ranks have, one after the other along the last axis, for all to go on with alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:  # type: ignore[override]
        ctx.team, ctx.width = team, x.shape[-1]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(team.size)]
        dist.all_gather(parts, x.contiguous(), group=team.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, d_all: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return d_all.narrow(-1, ctx.team.rank * ctx.width, ctx.width), None


def total(x: Tensor, team: Team, op: Any = dist.ReduceOp.SUM) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op, group=team.group)
    return out


def sum_out(x: Tensor, team: Team) -> Tensor:
    return SumOut.apply(x, team)  # type: ignore[return-value]


def sum_both(x: Tensor, team: Team) -> Tensor:
    return SumBoth.apply(x, team)  # type: ignore[return-value]


def join_last(x: Tensor, team: Team) -> Tensor:
    return JoinLast.apply(x, team)  # type: ignore[return-value]
