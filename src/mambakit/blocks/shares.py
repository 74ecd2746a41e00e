"""How a block's width is divided among ranks: what its family's record says, and the modules that sum across them.

Heads, or channels where there are none, are cut into equal runs, one for each rank. A rank's share is a block of the
same family with fewer heads. What heads have in common is whole on every rank.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.blocks.modules import GatedRMSNorm, Linear
from mambakit.ops.shapes import cast
from mambakit.ops.team import Team, sum_both


class Part(NamedTuple):
    """Consecutive entries along an axis that mean one thing."""

    name: str
    size: int
    """In the whole block."""
    taken: tuple[int, ...] | None = None
    """Every rank has all of them, and computes with these; None: every rank has an equal run, and no more."""

    def own(self, team: Team) -> range | tuple[int, ...]:
        """Which entries this rank computes with."""
        if self.taken is not None:
            return self.taken
        count = self.size // team.size
        return range(team.rank * count, (team.rank + 1) * count)


class Split(NamedTuple):
    """The parts that a tensor consists of along an axis."""

    axis: int
    parts: tuple[Part, ...]

    def own(self, team: Team) -> list[int]:
        """Which entries of the whole tensor this rank computes with, in the order in which it has them."""
        found, start = [], 0
        for part in self.parts:
            found += [start + i for i in part.own(team)]
            start += part.size
        return found


@dataclass(frozen=True, kw_only=True)
class Shares:
    """A rank's share of a block. Parameters that are not named are whole on every rank."""

    config: Any
    """Of a block with this rank's heads alone."""
    parameters: Mapping[str, Split]
    cache: Mapping[str, Split] = field(default_factory=dict)
    """The cache's tensors, each with what its axis is divided into."""
    once: tuple[str, ...] = ()
    """Parameters that are added to the sum over the ranks, so that one rank adds them."""
    modules: Mapping[str, Callable[[Any], nn.Module]] = field(default_factory=dict)
    """What takes the place of modules that have to know of the other ranks."""
    inside: Mapping[str, Any] = field(default_factory=dict)
    """Configs of the blocks inside of it."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Of the block."""


def along(axis: int, *parts: Part) -> Split:
    return Split(axis, tuple(part for part in parts if part.size))


def run(size: int, axis: int = 0) -> Split:
    """One part, of which each rank has an equal run."""
    return Split(axis, (Part("", size),))


def shared(config: Any, name: str, size: int, team: Team) -> int:
    """A rank's number of so many; ValueError if they cannot be divided equally."""
    if size % team.size:
        able = [str(n) for n in range(1, size + 1) if size % n == 0]
        able = able if len(able) < 9 else [*able[:8], "..."]
        raise ValueError(
            f"{name} = {size} in {type(config).__name__} cannot be divided among {team.size} tensor-parallel ranks; "
            f"take {', '.join(able)} of them, or another {name}"
        )
    return size // team.size


def groups_of(heads: int, groups: int, team: Team) -> tuple[int, ...]:
    """The groups that a rank's heads belong to, in equal runs: each as often as there are runs of heads in it."""
    own = heads // team.size
    length = math.gcd(own, heads // groups)
    return tuple((team.rank * own + at) // (heads // groups) for at in range(0, own, length))


def grouped(name: str, groups: int, width: int, taken: tuple[int, ...], team: Team, ranks: int = 1) -> Part:
    """`ranks` times `groups` runs of `width` entries, of which this rank needs those of some groups."""
    size = ranks * groups * width
    if groups % team.size == 0 and ranks == 1:
        return Part(name, size)
    rows = ((m * groups + group) * width + i for m in range(ranks) for group in taken for i in range(width))
    return Part(name, size, tuple(rows))


def whole(name: str, size: int) -> Part:
    return Part(name, size, tuple(range(size)))


def expand_for(width: int, d_model: int) -> float:
    """An `expand` of which a config makes just this inner width."""
    expand = width / d_model
    while int(expand * d_model) < width:
        expand = math.nextafter(expand, math.inf)
    return expand


def check_whole(what: str, model: nn.Module) -> None:
    """ValueError if a rank has shares of parameters only."""
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ValueError(
            f"{what} takes whole models, and parameters of this one are shares; load a whole copy, one per process"
        )


class SummedLinear(Linear):
    """A projection of which each rank has some inputs; every rank goes on with the sum in its own way."""

    def __init__(self, of: nn.Linear, team: Team):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.team = of.in_features, of.out_features, team
        self.weight, self.bias = of.weight, of.bias
        if of.bias is not None:
            raise ValueError("a projection that is summed over ranks has no bias")

    def forward(self, input: Tensor) -> Tensor:
        return sum_both(super().forward(input), self.team)


class SummedGatedRMSNorm(GatedRMSNorm):
    """A gated norm over groups of channels that lie on several ranks: they add up their squares."""

    def __init__(self, of: GatedRMSNorm, width: int, team: Team):
        """`width` is that of all ranks' channels."""
        nn.Module.__init__(self)
        self.eps, self.norm_before_gate, self.team = of.eps, of.norm_before_gate, team
        self.weight, size = of.weight, of.group_size or width
        self.size, self.groups, own = size, width // size, width // team.size
        # Runs of channels that lie in one group and on one rank.
        self.group_size = math.gcd(size, own)
        self.group_of = [(team.rank * own + at) // size for at in range(0, own, self.group_size)]

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        gate = None if z is None else F.silu(cast(z, wide))
        y = cast(x, wide) if gate is None or self.norm_before_gate else x * gate
        squares = y.unflatten(-1, (-1, self.group_size)).square().sum(-1)
        group_of = torch.tensor(self.group_of, device=x.device)
        sums = sum_both(squares.new_zeros(*squares.shape[:-1], self.groups).index_add(-1, group_of, squares), self.team)
        inverse = torch.rsqrt(sums / self.size + self.eps).index_select(-1, group_of)
        y = y * inverse.repeat_interleave(self.group_size, -1) * cast(self.weight, wide)
        return cast(y if gate is None or not self.norm_before_gate else y * gate, x.dtype)


class Parts(nn.Module):
    """In the place of a parameter between calls: its parts, each a parameter by its name.

    A part that is divided is a DTensor, this rank's run of a whole part; others are the same on every rank.
    """

    def __init__(self, split: Split, parameters: Mapping[str, nn.Parameter]):
        super().__init__()
        self.split = split
        self.is_stacked = False
        """Whether each is a stack of matrices."""
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    @property
    def first(self) -> nn.Parameter:
        return next(self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def device(self) -> torch.device:
        return self.first.device
