"""The way back through a lean call: rank after rank, each through pieces of tokens from the last to the first.

The block is taken for one whose heads are divided among ranks, as its family's record says. What a rank projects is
computed again; what it finds goes into its rows of the gradients at once.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.blocks.family import family_of
from mambakit.blocks.lean_plan import Columns, add_to, entries, plan, shares_of, take, whole
from mambakit.blocks.shares import Part, Shares, Split
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.team import Team

GRAIN = 0.02
"""The share of memory that is not worth more steps where what was asked for cannot be had."""


def shell(config: Any) -> Any:
    """A block that takes what is projected and returns what is to be; its parameters are to be put in."""
    made = family_of(config).block(config, device="meta")
    made.in_proj, made.out_proj = nn.Identity(), nn.Identity()
    return made


class Call(NamedTuple):
    """All of a call but its tensors."""

    block: Any
    cache: Any
    path: SsdPath
    segments_bs: Tensor | None
    lengths_b: Tensor | None
    names: tuple[str, ...]
    carried: tuple[str, ...]

    @property
    def config(self) -> Any:
        """Of the block without its norm, where that is computed here."""
        config = self.block.config
        return config if self.block.outer_norm is None else replace(config, rmsnorm=False)

    def caches(self, tensors: dict[str, Tensor]) -> Any:
        return self.cache._replace(**tensors)

    @property
    def is_cut(self) -> bool:
        """Whether sequences are. Not where resets and padding would have to be cut too."""
        return self.segments_bs is None and self.lengths_b is None

    def pieces(self, length: int, piece: int) -> list[slice]:
        piece = piece if self.is_cut else max(length, 1)
        return [slice(start, min(start + piece, length)) for start in range(0, length, piece)]

    def of_rows(self, rows: slice) -> tuple[Tensor | None, Tensor | None]:
        segments_bs, lengths_b = self.segments_bs, self.lengths_b
        return None if segments_bs is None else segments_bs[rows], None if lengths_b is None else lengths_b[rows]


class Backward:
    """The gradients of a call as they are found."""

    def __init__(
        self,
        call: Call,
        x_bsd: Tensor,
        carried: dict[str, Tensor],
        parameters: dict[str, Tensor],
        needs: tuple[bool, ...],
        cast: torch.dtype | None,
    ):
        self.call, self.x_bsd, self.carried, self.parameters, self.cast = call, x_bsd, carried, parameters, cast
        self.needs = dict(zip(("x", *carried, *parameters), needs, strict=True))
        self.norm = call.block.outer_norm
        self.d_x_bsd = self.zeros("x", x_bsd)
        self.of_cache = {name: self.zeros(name, t) for name, t in carried.items()}
        self.of_parameters = {name: self.zeros(name, t) for name, t in parameters.items()}
        numbers = sum(t.numel() for t in parameters.values()) + 2 * x_bsd.numel()
        # An output's gradient and an input's are there at once, of which one stands for the output.
        room = int((call.path.lean or 0) * numbers) - x_bsd.numel()
        self.plan = plan(call.config, self.norm is None, *x_bsd.shape[:2], call.is_cut, room, int(GRAIN * numbers) + 1)
        self.splits = shares_of(call.config, Team(None, 0, self.plan.size)).parameters

    def zeros(self, name: str, like: Tensor) -> Tensor | None:
        """To add up a gradient in, at least float32: there are many to add."""
        return torch.zeros_like(like, dtype=wide(like.dtype)) if self.needs[name] else None

    def go(self, slab: "Slab") -> None:
        """Through some rows of the batch, rank after rank."""
        columns = Columns(self.splits["in_proj.weight"], self.plan.size, self.plan.least)
        slab.once = {part: self.project(slab.x_bsd, place) for part, place in columns.once()}
        slab.d_once = {part: torch.zeros_like(t, dtype=wide(t.dtype)) for part, t in slab.once.items()}
        d_bias_out = self.of_parameters.get("out_proj.bias")
        if d_bias_out is not None:
            d_bias_out += slab.d_y_bsd.sum((0, 1), dtype=d_bias_out.dtype)
        made = None
        for rank in range(self.plan.size):
            team = Team(None, rank, self.plan.size)
            share = shares_of(self.call.config, team)
            made = shell(share.config) if made is None or made.config != share.config else made
            Rank(self, slab, share, team, made, columns.own(rank)).go()
        everything = slice(0, slab.x_bsd.shape[1])
        for part, place in columns.once():
            self.project_back(slab, everything, place, slab.d_once.pop(part).to(slab.x_bsd.dtype))

    def slab(self, rows: slice, d_y_bsd: Tensor, d_after: dict[str, Tensor | None], *norms: Tensor | None) -> "Slab":
        dtype = self.cast or self.x_bsd.dtype
        # Copies: of what several ranks have of the cache after the call, the first to take it is to have the gradient.
        d_after = {name: None if d is None else d[rows].clone() for name, d in d_after.items()}
        inverse_bs1, products_bs1 = (None if t is None else t[rows] for t in norms)
        return Slab(rows, self.x_bsd[rows].to(dtype), d_y_bsd[rows].to(dtype), d_after, inverse_bs1, products_bs1)

    def project(self, x_bsd: Tensor, place: slice) -> Tensor:
        weight, bias = self.parameters["in_proj.weight"], self.parameters.get("in_proj.bias")
        return F.linear(x_bsd, weight[place].to(x_bsd.dtype), None if bias is None else bias[place].to(x_bsd.dtype))

    def project_back(self, slab: "Slab", piece: slice, place: slice, d_bsX: Tensor) -> None:
        """From the gradient of some projected channels to those of their weights and of the input."""
        d_NX, x_Nd = d_bsX.flatten(0, 1), slab.x_bsd[:, piece].flatten(0, 1)
        weight = self.parameters["in_proj.weight"]
        d_weight, d_bias = self.of_parameters["in_proj.weight"], self.of_parameters.get("in_proj.bias")
        if d_weight is not None:
            add_product(d_weight[place], d_NX.mT, x_Nd)
        if d_bias is not None:
            d_bias[place] += d_NX.sum(0, dtype=d_bias.dtype)
        if self.d_x_bsd is not None:
            d_x_bsd = self.d_x_bsd[slab.rows, piece]
            if d_x_bsd.is_contiguous():
                add_product(d_x_bsd.flatten(0, 1), d_NX, weight[place].to(d_NX.dtype))
            else:
                d_x_bsd += d_bsX @ weight[place].to(d_NX.dtype)

    def gradients(self) -> Iterator[Tensor | None]:
        totals = (self.d_x_bsd, *self.of_cache.values(), *self.of_parameters.values())
        given = (self.x_bsd, *self.carried.values(), *self.parameters.values())
        return (None if total is None else total.to(t.dtype) for total, t in zip(totals, given, strict=True))


@dataclass
class Slab:
    """Some rows of the batch, and what all ranks share."""

    rows: slice
    x_bsd: Tensor
    d_y_bsd: Tensor
    d_after: dict[str, Tensor | None]
    """Gradients of the cache after the call."""
    inverse_bs1: Tensor | None
    """Inverse root mean squares, where the norm is outside of ranks."""
    products_bs1: Tensor | None
    """Outputs times their gradients, for the same norm."""
    once: dict[Part, Tensor] = field(default_factory=dict)
    """What is projected once for all ranks."""
    d_once: dict[Part, Tensor] = field(default_factory=dict)


class Rank:
    """One of the ranks that the heads are divided among, and its turn."""

    def __init__(self, back: Backward, slab: Slab, share: Shares, team: Team, made: Any, own: dict[Part, slice]):
        self.back, self.slab, self.share, self.team, self.made, self.own = back, slab, share, team, made, own
        self.parts = {part: entries(Split(0, (part,)), team) for part in share.parameters["in_proj.weight"].parts}
        leaves = {
            name: take(t, share.parameters.get(name), team).detach().requires_grad_(back.needs[name])
            for name, t in back.parameters.items()
            if not is_outside(name, back.norm)
        }
        put_in(made, leaves)
        self.leaves = {name: t for name, t in leaves.items() if t.requires_grad}
        self.d_leaves: dict[str, Tensor] = {}
        self.kept = {part: back.project(slab.x_bsd, at) for part, at in own.items()} if back.plan.keeps else {}
        self.place = entries(share.parameters["out_proj.weight"], team)

    def go(self) -> None:
        """From the last piece of tokens to the first, after a look at what enters each."""
        back, slab, share, team = self.back, self.slab, self.share, self.team
        pieces = back.call.pieces(slab.x_bsd.shape[1], back.plan.piece)
        first = {name: take(t[slab.rows], share.cache.get(name), team) for name, t in back.carried.items()}
        entering = [back.call.caches(first)]
        for piece in pieces[:-1]:
            entering.append(self.run(self.projected(piece), entering[-1])[1])
        d_carried = self.take_d_after()
        for piece in reversed(pieces):
            d_carried = self.go_back(piece, entering.pop(), d_carried)
        for name, d_leaf in self.d_leaves.items():
            total = back.of_parameters[name]
            assert total is not None, "a leaf has a gradient where its parameter has one"
            add_to(total, d_leaf, share.parameters.get(name), team)
        for name, total in back.of_cache.items():
            d = d_carried.get(name)
            if total is not None and d is not None:
                add_to(total[slab.rows], d, share.cache.get(name), team)

    def take_d_after(self) -> dict[str, Tensor | None]:
        found, team = {}, self.team
        for name, d in self.slab.d_after.items():
            split = self.share.cache.get(name)
            found[name] = None if d is None else take(d, split, team)
            if d is None or split is None or team.size == 1 or all(part.taken is None for part in split.parts):
                continue
            own = torch.tensor(split.own(team), device=d.device)
            found[name] = d.index_select(split.axis, own)
            d.index_fill_(split.axis, own, 0)
        return found

    def projected(self, piece: slice) -> Tensor:
        """All that this rank projects, in its order."""
        found = []
        for part, at in self.parts.items():
            if part in self.kept:
                found.append(self.kept[part][:, piece])
            elif part in self.own:
                found.append(self.back.project(self.slab.x_bsd[:, piece], self.own[part]))
            else:
                found.append(self.slab.once[whole(part)][:, piece][..., at])
        return torch.cat(found, -1)

    def run(self, projected_bsX: Tensor, cache: Any) -> tuple[Tensor, Any]:
        call, dtype = self.back.call, self.back.cast
        with contextlib.nullcontext() if dtype is None else torch.autocast(projected_bsX.device.type, dtype=dtype):
            return self.made.run(projected_bsX, cache, call.path, *call.of_rows(self.slab.rows))

    def go_back(self, piece: slice, cache: Any, d_after: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Through one piece; returns the gradients of the cache that enters it."""
        back, slab = self.back, self.slab
        held = {name: getattr(cache, name).detach() for name in back.call.carried}
        wanted = {name: t.requires_grad_() for name, t in held.items() if piece.start or back.needs[name]}
        given = self.projected(piece).requires_grad_()
        with torch.enable_grad():
            inner, after = self.run(given, back.call.caches(held))
        weight, d_weight = back.parameters["out_proj.weight"], back.of_parameters["out_proj.weight"]
        d_y = slab.d_y_bsd[:, piece]
        value, d_inner = inner.detach(), d_y @ weight[:, self.place].to(d_y.dtype)
        if slab.inverse_bs1 is not None and slab.products_bs1 is not None:
            value, d_inner = self.through_norm(value, d_inner, slab.inverse_bs1[:, piece], slab.products_bs1[:, piece])
        if d_weight is not None:
            factors = (d_y.flatten(0, 1).mT, value.flatten(0, 1))
            if isinstance(self.place, slice):
                add_product(d_weight[:, self.place], *factors)
            else:
                d_weight.index_add_(1, self.place, (factors[0] @ factors[1]).to(d_weight.dtype))
        ends = [(inner, d_inner)]
        ends += [(t, d) for name, d in d_after.items() if d is not None and (t := getattr(after, name)).requires_grad]
        inputs = [given, *wanted.values(), *self.leaves.values()]
        y, d = ([end[i] for end in ends] for i in range(2))
        # The graph keeps what it needs, and lets it go as it goes back.
        del value, inner, after, ends, d_inner, given
        d_given, *found = torch.autograd.grad(y, inputs, d, allow_unused=True)
        del y, d, inputs
        for name, d_leaf in zip(self.leaves, found[len(wanted) :], strict=True):
            if d_leaf is not None:
                self.d_leaves[name] = d_leaf if name not in self.d_leaves else self.d_leaves[name] + d_leaf
        start = 0
        for part, at in self.parts.items():
            width = len(part.own(self.team))
            d_part = d_given[..., start : start + width]
            start += width
            if part in self.own:
                back.project_back(slab, piece, self.own[part], d_part)
            elif isinstance(at, slice):
                slab.d_once[whole(part)][:, piece, at] += d_part
            else:
                total = slab.d_once[whole(part)][:, piece]
                total.index_add_(-1, at, d_part.to(total.dtype))
        return dict(zip(wanted, found, strict=False))

    def through_norm(
        self, u_bsi: Tensor, d_inner_bsi: Tensor, inverse_bs1: Tensor, products_bs1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the norm makes of this rank's channels, and their gradient.

        `products_bs1` are those of all channels with their gradients, and so of the output with its own.
        """
        norm, back, dtype = self.back.norm, self.back, u_bsi.dtype
        weight_i = take(norm.weight.detach(), self.share.parameters["norm.weight"], self.team)
        d_normed_bsi = d_inner_bsi * inverse_bs1
        d_weight_i = back.of_parameters["norm.weight"]
        if d_weight_i is not None:
            found = (d_normed_bsi * u_bsi).sum((0, 1)).to(d_weight_i.dtype)
            add_to(d_weight_i, found, self.share.parameters["norm.weight"], self.team)
        shared_bs1 = products_bs1 * inverse_bs1.square() / norm.weight.shape[0]
        d_u_bsi = (d_normed_bsi.mul_(weight_i)).addcmul_(u_bsi.to(d_normed_bsi.dtype), shared_bs1, value=-1)
        return (u_bsi * inverse_bs1).mul_(weight_i).to(dtype), d_u_bsi.to(dtype)


def is_outside(name: str, norm: nn.Module | None) -> bool:
    """Whether a parameter is not one of what lies between the projections."""
    return name.startswith(("in_proj.", "out_proj.")) or (norm is not None and name == "norm.weight")


def put_in(made: nn.Module, parameters: dict[str, Tensor]) -> None:
    for name, tensor in parameters.items():
        module, _, leaf = name.rpartition(".")
        made.get_submodule(module)._parameters[leaf] = tensor  # type: ignore[assignment]  # a leaf, as good as one


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
