"""The way back through a lean call: rank after rank, each through pieces of tokens from the last to the first.

The block is taken for one whose heads are divided among ranks, as its family's record says. What is projected is
computed again, and its gradient is written over it. Where there are no more tokens than a row of the input projection
has weights, all of that lies in the memory of the weights' gradient, which is needed last.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mambakit.blocks.family import family_of
from mambakit.blocks.lean_plan import BLOCK, Channels, add_to, entries, plan, shares_of, slabs, take, whole
from mambakit.blocks.shares import Part, Shares, Split
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.team import Team


def shell(config: Any) -> Any:
    """A block that takes what is projected and returns what is to be; its parameters are to be put in."""
    made: Any = family_of(config).block(config, device="meta")
    del made.in_proj, made.out_proj
    made.in_proj = made.out_proj = unchanged
    return made


def unchanged(t: Any) -> Any:
    return t


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
        self.given = {"x": x_bsd, **carried, **parameters}
        self.needs = dict(zip(self.given, needs, strict=True))
        self.totals: dict[str, Tensor] = {}
        self.norm, self.dtype, (b, s, _) = call.block.outer_norm, cast or x_bsd.dtype, x_bsd.shape
        weight_Xd, weight_di = (parameters[f"{name}.weight"] for name in ("in_proj", "out_proj"))
        numbers = sum(t.numel() for t in parameters.values()) + 2 * x_bsd.numel()
        # An output's gradient and an input's are there at once, of which one stands for the output.
        room, late = int((call.path.lean or 0) * numbers), x_bsd.numel()
        self.memory_N: Tensor | None = None
        self.inner_bsi: Tensor | None = None
        if self.needs["in_proj.weight"] and b * s * self.dtype.itemsize <= weight_Xd[0].nbytes:
            # Not wide: each row is written once.
            self.totals["in_proj.weight"] = weight_Xd.new_empty(weight_Xd.shape)
            self.memory_N = self.totals["in_proj.weight"].flatten().view(self.dtype)
            rest = self.memory_N[b * s * len(weight_Xd) :]
            if len(rest) >= b * s * weight_di.shape[1]:
                self.inner_bsi = rest[: b * s * weight_di.shape[1]].view(b, s, -1)
                room, late = room + weight_di.numel(), late + weight_di.numel()
        self.slabs = slabs(b, s) if self.memory_N is None else [slice(0, b)]
        work = (self.slabs[0].stop, s, call.is_cut, self.memory_N is not None, room, late)
        self.plan = plan(call.config, self.norm is None, *work)
        self.channels = Channels(call.config, self.plan.size)

    def total(self, name: str) -> Tensor | None:
        """To add up a gradient in, at least float32: there are many to add."""
        if self.needs.get(name) and name not in self.totals:
            like = self.given[name]
            self.totals[name] = torch.zeros_like(like, dtype=wide(like.dtype))
        return self.totals.get(name)

    def go(self, slab: "Slab") -> None:
        """Through some rows of the batch, rank after rank."""
        slab.once = {part: self.project(slab, rows) for part, rows in self.channels.once()}
        slab.d_once = {part: torch.zeros_like(t, dtype=wide(t.dtype)) for part, t in slab.once.items()}
        found, made = [], None
        for rank in range(self.plan.size):
            team = Team(None, rank, self.plan.size)
            share = shares_of(self.call.config, team)
            made = shell(share.config) if made is None or made.config != share.config else made
            own = {part: self.project(slab, rows) for part, rows in self.channels.own(rank)}
            Rank(self, slab, share, team, made, own).go()
            found += [(rows, own.pop(part)) for part, rows in self.channels.own(rank)]
            if self.memory_N is None:
                self.project_back(slab, found)
        for part, rows in self.channels.once():
            found.append((rows, slab.once.pop(part).copy_(slab.d_once.pop(part))))
        self.project_out_back(slab)
        self.project_back(slab, found)

    def slab(self, rows: slice, d_y_bsd: Tensor, d_after: dict[str, Tensor | None], *norms: Tensor | None) -> "Slab":
        # Copies: of what several ranks have of the cache after the call, the first to take it is to have the gradient.
        d_after = {name: None if d is None else d[rows].clone() for name, d in d_after.items()}
        inverse_bs1, products_bs1 = (None if t is None else t[rows] for t in norms)
        x_bsd, d_y_bsd = (t[rows].to(self.dtype) for t in (self.x_bsd, d_y_bsd))
        return Slab(rows, x_bsd, d_y_bsd, d_after, inverse_bs1, products_bs1)

    def project(self, slab: "Slab", rows: slice) -> Tensor:
        """Some of the channels, where their gradient may be written over them."""
        weight, bias = self.parameters["in_proj.weight"][rows].to(self.dtype), self.parameters.get("in_proj.bias")
        x_Nd, size = slab.x_bsd.flatten(0, 1), slab.x_bsd.shape[:2]
        if self.memory_N is None:
            out_NX = x_Nd.new_empty(len(x_Nd), len(weight))
        else:
            out_NX = self.memory_N[rows.start * len(x_Nd) : rows.stop * len(x_Nd)].view(len(x_Nd), len(weight))
        torch.mm(x_Nd, weight.mT, out=out_NX)
        return (out_NX if bias is None else out_NX.add_(bias[rows])).unflatten(0, size)

    def project_back(self, slab: "Slab", found: list[tuple[slice, Tensor]]) -> None:
        """From the gradients of projected channels, which are let go, to those of their weights and of the input."""
        found.sort(key=lambda each: each[0].start)
        x_Nd = slab.x_bsd.flatten(0, 1)
        while found:
            rows, d_bsX = found.pop()
            if self.memory_N is not None:
                # From the last to the first, a copy and then weights in its place: nothing is lost, since a row of
                # weights takes no less than one of tokens.
                taken = [d_bsX]
                while found and found[-1][0].stop == rows.start and rows.stop - found[-1][0].start <= BLOCK:
                    rows = slice(found[-1][0].start, rows.stop)
                    taken.insert(0, found.pop()[1])
                d_bsX = torch.cat(taken, -1)
                self.totals["in_proj.weight"][rows] = 0
            d_weight, d_bias, d_x_bsd = self.total("in_proj.weight"), self.total("in_proj.bias"), self.total("x")
            d_NX = d_bsX.flatten(0, 1)
            if d_weight is not None:
                add_product(d_weight[rows], d_NX.mT, x_Nd)
            if d_bias is not None:
                d_bias[rows] += d_NX.sum(0, dtype=d_bias.dtype)
            if d_x_bsd is not None:
                weight = self.parameters["in_proj.weight"][rows].to(self.dtype)
                add_product(d_x_bsd[slab.rows].flatten(0, 1), d_NX, weight)
            del d_bsX, d_NX

    def project_out_back(self, slab: "Slab") -> None:
        """To the gradients of what remains of the output projection."""
        d_weight, d_bias = self.total("out_proj.weight"), self.total("out_proj.bias")
        if d_weight is not None and self.inner_bsi is not None:
            add_product(d_weight, slab.d_y_bsd.flatten(0, 1).mT, self.inner_bsi.flatten(0, 1))
        if d_bias is not None:
            d_bias += slab.d_y_bsd.sum((0, 1), dtype=d_bias.dtype)

    def gradients(self) -> Iterator[Tensor | None]:
        totals = [self.total(name) for name in self.given]
        return (None if d is None else d.to(t.dtype) for d, t in zip(totals, self.given.values(), strict=True))


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


class Projected:
    """Projected channels in several tensors. Most blocks only split them; what else is asked takes a copy of all."""

    def __init__(self, parts: Sequence[Tensor]):
        self.parts = parts
        self.dtype, self.new_full = parts[0].dtype, parts[0].new_full
        self.shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))

    def whole(self) -> Tensor:
        return torch.cat(list(self.parts), -1)

    def split(self, widths: Sequence[int], dim: int = -1) -> list[Tensor]:
        """As a tensor does; no part is cut."""
        parts, found = list(self.parts), []
        for width in widths:
            taken = [self.parts[0][..., :0]]
            while sum(part.shape[dim] for part in taken) < width:
                taken.append(parts.pop(0))
            found.append(taken[-1] if len(taken) < 3 else torch.cat(taken[1:], dim))
        return found

    def __mul__(self, factors_X: Tensor) -> Tensor:
        return self.whole() * factors_X

    def __getitem__(self, at: Any) -> Tensor:
        return self.whole()[at]


class Leave(torch.autograd.Function):
    """The end of a rank's way: what would be projected out is used at once, and its gradient made when it is wanted."""

    @staticmethod
    def forward(ctx: Any, rank: "Rank", piece: slice, inner_bsi: Tensor) -> Tensor:  # type: ignore[override]
        ctx.rank, ctx.piece = rank, piece
        if rank.back.norm is not None:
            ctx.save_for_backward(inner_bsi)
        rank.project_out_back(piece, inner_bsi)
        return inner_bsi.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:  # type: ignore[override]
        return None, None, ctx.rank.d_inner(ctx.piece, *ctx.saved_tensors)


class Rank:
    """One of the ranks that the heads are divided among, and its turn."""

    def __init__(self, back: Backward, slab: Slab, share: Shares, team: Team, made: Any, own: dict[Part, Tensor]):
        self.back, self.slab, self.share, self.team, self.made, self.own = back, slab, share, team, made, own
        self.parts = {part: entries(Split(0, (part,)), team) for part in share.parameters["in_proj.weight"].parts}
        leaves = {
            name: take(t, share.parameters.get(name), team).detach().requires_grad_(back.needs[name])
            for name, t in back.parameters.items()
            if not is_outside(name, back.norm)
        }
        put_in(made, leaves)
        self.leaves = {name: t for name, t in leaves.items() if t.requires_grad}
        self.place = entries(share.parameters["out_proj.weight"], team)

    def go(self) -> None:
        """From the last piece of tokens to the first, after a look at what enters each."""
        back, slab, share, team = self.back, self.slab, self.share, self.team
        pieces = back.call.pieces(slab.x_bsd.shape[1], back.plan.piece)
        first = {name: take(t[slab.rows], share.cache.get(name), team) for name, t in back.carried.items()}
        entering = [back.call.caches(first)]
        for piece in pieces[:-1]:
            entering.append(self.run(Projected(self.projected(piece)).whole(), entering[-1])[1])
        d_carried = self.take_d_after()
        for piece in reversed(pieces):
            d_carried = self.go_back(piece, entering.pop(), d_carried)
        for name, d in d_carried.items():
            total = back.total(name)
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

    def projected(self, piece: slice) -> list[Tensor]:
        """All that this rank projects, in its order."""
        return [
            self.own[part][:, piece] if part in self.own else self.slab.once[whole(part)][:, piece, at]
            for part, at in self.parts.items()
        ]

    def run(self, projected_bsX: Any, cache: Any) -> tuple[Tensor, Any]:
        call, dtype = self.back.call, self.back.cast
        with contextlib.nullcontext() if dtype is None else torch.autocast(self.slab.x_bsd.device.type, dtype=dtype):
            return self.made.run(projected_bsX, cache, call.path, *call.of_rows(self.slab.rows))

    def go_back(self, piece: slice, cache: Any, d_after: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Through one piece; returns the gradients of the cache that enters it."""
        back, slab = self.back, self.slab
        held = {name: getattr(cache, name).detach() for name in back.call.carried}
        wanted = {name: t.requires_grad_() for name, t in held.items() if piece.start or back.needs[name]}
        # Not detached: autograd would take what is written elsewhere in the same memory for a change of these.
        given = [t.data.requires_grad_() for t in self.projected(piece)]
        self.made.out_proj = partial(Leave.apply, self, piece)
        with torch.enable_grad():
            left, after = self.run(Projected(given), back.call.caches(held))
        self.made.out_proj = unchanged
        ends = [(left, torch.ones_like(left))]
        ends += [(t, d) for name, d in d_after.items() if d is not None and (t := getattr(after, name)).requires_grad]
        inputs = [*given, *wanted.values(), *self.leaves.values()]
        y, d = ([end[i] for end in ends] for i in range(2))
        # The graph keeps what it needs, and lets it go as it goes back.
        del left, after, ends
        found = torch.autograd.grad(y, inputs, d, allow_unused=True)
        d_given, d_held = found[: len(given)], found[len(given) : len(given) + len(wanted)]
        for name, d_leaf in zip(self.leaves, found[len(given) + len(wanted) :], strict=True):
            total = back.total(name)
            if d_leaf is not None and total is not None:
                add_to(total, d_leaf, self.share.parameters.get(name), self.team)
        for part, d_part in zip(self.parts, d_given, strict=True):
            if part in self.own:
                own = self.own[part][:, piece]
                own.zero_() if d_part is None else own.copy_(d_part)
            elif d_part is not None:
                add_to(slab.d_once[whole(part)][:, piece], d_part, Split(2, (part,)), self.team)
        return dict(zip(wanted, d_held, strict=True))

    def project_out_back(self, piece: slice, inner_bsi: Tensor) -> None:
        """To the gradient of this rank's columns of the output projection, or what it needs once all are there."""
        back, d_y_bsd = self.back, self.slab.d_y_bsd[:, piece]
        if self.slab.inverse_bs1 is not None:
            inner_bsi = (inner_bsi * self.slab.inverse_bs1[:, piece]).mul_(self.norm_weight()).to(inner_bsi.dtype)
        if back.inner_bsi is not None:
            back.inner_bsi[:, piece, self.place] = inner_bsi.to(back.inner_bsi.dtype)
            return
        d_weight = back.total("out_proj.weight")
        if d_weight is not None:
            factors = (d_y_bsd.flatten(0, 1).mT, inner_bsi.flatten(0, 1))
            if isinstance(self.place, slice):
                add_product(d_weight[:, self.place], *factors)
            else:
                add_to(d_weight, factors[0] @ factors[1], self.share.parameters["out_proj.weight"], self.team)

    def d_inner(self, piece: slice, u_bsi: Tensor | None = None) -> Tensor:
        """The gradient of what is to be projected out, or of `u` where there is a norm in between."""
        back, slab, d_y_bsd = self.back, self.slab, self.slab.d_y_bsd[:, piece]
        d_inner_bsi = d_y_bsd @ back.parameters["out_proj.weight"][:, self.place].to(d_y_bsd.dtype)
        if u_bsi is None or slab.inverse_bs1 is None or slab.products_bs1 is None:
            return d_inner_bsi
        inverse_bs1, weight_i = slab.inverse_bs1[:, piece], self.norm_weight()
        d_normed_bsi = d_inner_bsi * inverse_bs1
        d_weight_i = back.total("norm.weight")
        if d_weight_i is not None:
            found = (d_normed_bsi * u_bsi).sum((0, 1)).to(d_weight_i.dtype)
            add_to(d_weight_i, found, self.share.parameters["norm.weight"], self.team)
        # The products are those of all channels with their gradients, and so of the output with its own.
        shared_bs1 = slab.products_bs1[:, piece] * inverse_bs1.square() / len(back.norm.weight)
        d_u_bsi = (d_normed_bsi.mul_(weight_i)).addcmul_(u_bsi.to(d_normed_bsi.dtype), shared_bs1, value=-1)
        return d_u_bsi.to(u_bsi.dtype)

    def norm_weight(self) -> Tensor:
        return take(self.back.norm.weight.detach(), self.share.parameters["norm.weight"], self.team)


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
