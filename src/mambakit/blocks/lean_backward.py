"""The way back through a lean call: rank after rank, each through pieces of tokens from the last to the first.

The block is taken for one whose heads are divided among ranks, as its family's record says. What is projected is
computed again, and its gradient is written over it. Where there are fewer tokens than a row of the input projection has
weights, all of that lies in the memory of the weights' gradient, which is needed last.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mambakit.blocks.family import family_of
from mambakit.blocks.lean_plan import Channels, add_to, entries, plan, shares_of, slabs, take, whole
from mambakit.blocks.shares import Part, Shares, Split
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.team import Team

BLOCK = 256
"""Rows of the input projection that are multiplied at once."""


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
        self.given = {"x": x_bsd, **carried, **parameters}
        self.needs = dict(zip(self.given, needs, strict=True))
        self.norm, self.dtype = call.block.outer_norm, cast or x_bsd.dtype
        self.totals: dict[str, Tensor] = {}
        weight_Xd, (b, s, _) = parameters["in_proj.weight"], x_bsd.shape
        self.is_held = (
            self.needs["in_proj.weight"]
            and b * s * self.dtype.itemsize <= weight_Xd.shape[1] * weight_Xd.dtype.itemsize
        )
        self.slabs = [slice(0, b)] if self.is_held else slabs(b, s)
        numbers = sum(t.numel() for t in parameters.values()) + 2 * x_bsd.numel()
        # An output's gradient and an input's are there at once, of which one stands for the output.
        room = int((call.path.lean or 0) * numbers) - (0 if self.is_held else x_bsd.numel())
        if self.is_held:
            # Each row is written once.
            self.totals["in_proj.weight"] = torch.empty_like(weight_Xd, memory_format=torch.contiguous_format)
            if self.inner_room() is not None:
                room += parameters["out_proj.weight"].numel()
        rows = self.slabs[0].stop
        self.plan = plan(call.config, self.norm is None, rows, s, call.is_cut, self.is_held, room)
        self.channels = Channels(call.config, self.plan.size)

    def memory(self) -> tuple[Tensor, Tensor]:
        """Of the weights' gradient: all that is projected, a channel's tokens side by side, and what room is left."""
        X, N = len(self.parameters["in_proj.weight"]), self.x_bsd.shape[0] * self.x_bsd.shape[1]
        flat = self.totals["in_proj.weight"].flatten().view(self.dtype)
        return flat[: X * N].view(X, N), flat[X * N :]

    def inner_room(self) -> Tensor | None:
        """For all that is projected out, if there is any."""
        (b, s, _), I, rest = self.x_bsd.shape, self.parameters["out_proj.weight"].shape[1], self.memory()[1]
        return rest[: b * s * I].view(b, s, I) if len(rest) >= b * s * I else None

    def total(self, name: str) -> Tensor | None:
        """To add up a gradient in, at least float32: there are many to add."""
        if self.needs.get(name) and name not in self.totals:
            like = self.given[name]
            self.totals[name] = torch.zeros_like(like, dtype=wide(like.dtype))
        return self.totals.get(name)

    def go(self, slab: "Slab") -> None:
        """Through some rows of the batch, rank after rank."""
        if self.is_held:
            slab.held_XN, slab.inner_bsi = self.memory()[0], self.inner_room()
            for rows in blocks(len(slab.held_XN)):
                self.project(slab, rows, slab.held_XN[rows])
        slab.once = {part: self.projected(slab, rows) for part, rows in self.channels.once()}
        slab.d_once = {part: torch.zeros_like(t, dtype=wide(t.dtype)) for part, t in slab.once.items()}
        made = None
        for rank in range(self.plan.size):
            team = Team(None, rank, self.plan.size)
            share = shares_of(self.call.config, team)
            made = shell(share.config) if made is None or made.config != share.config else made
            own = {part: self.projected(slab, rows) for part, rows in self.channels.own(rank)}
            Rank(self, slab, share, team, made, own).go()
            if not self.is_held:
                for part, rows in self.channels.own(rank):
                    self.project_back(slab, rows, own[part])
        self.project_out_back(slab)
        for part, rows in self.channels.once():
            d_XN = slab.d_once.pop(part)
            if self.is_held:
                slab.once[part].copy_(d_XN)
            else:
                self.project_back(slab, rows, d_XN.to(self.dtype))
        if slab.held_XN is not None:
            # A row of weights takes at least as much as one of tokens, so that the last ones overwrite no other.
            for rows in reversed(blocks(len(slab.held_XN))):
                d_XN = slab.held_XN[rows].clone()
                self.totals["in_proj.weight"][rows] = 0
                self.project_back(slab, rows, d_XN)

    def slab(self, rows: slice, d_y_bsd: Tensor, d_after: dict[str, Tensor | None], *norms: Tensor | None) -> "Slab":
        # Copies: of what several ranks have of the cache after the call, the first to take it is to have the gradient.
        d_after = {name: None if d is None else d[rows].clone() for name, d in d_after.items()}
        inverse_bs1, products_bs1 = (None if t is None else t[rows] for t in norms)
        x_bsd, d_y_bsd = (t[rows].to(self.dtype) for t in (self.x_bsd, d_y_bsd))
        return Slab(rows, x_bsd, d_y_bsd, d_after, inverse_bs1, products_bs1)

    def projected(self, slab: "Slab", rows: slice) -> Tensor:
        """Some projected channels, a channel's tokens side by side; their gradients may be written there."""
        if slab.held_XN is not None:
            return slab.held_XN[rows]
        tokens = slab.x_bsd.shape[0] * slab.x_bsd.shape[1]
        return self.project(slab, rows, slab.x_bsd.new_empty(rows.stop - rows.start, tokens))

    def project(self, slab: "Slab", rows: slice, out_XN: Tensor) -> Tensor:
        bias = self.parameters.get("in_proj.bias")
        torch.mm(self.parameters["in_proj.weight"][rows].to(self.dtype), slab.x_bsd.flatten(0, 1).mT, out=out_XN)
        return out_XN if bias is None else out_XN.add_(bias[rows, None])

    def project_back(self, slab: "Slab", rows: slice, d_XN: Tensor) -> None:
        """From the gradient of some projected channels to those of their weights and of the input."""
        d_weight, d_bias, d_x_bsd = self.total("in_proj.weight"), self.total("in_proj.bias"), self.total("x")
        if d_weight is not None:
            add_product(d_weight[rows], d_XN, slab.x_bsd.flatten(0, 1))
        if d_bias is not None:
            d_bias[rows] += d_XN.sum(1, dtype=d_bias.dtype)
        if d_x_bsd is not None:
            weight = self.parameters["in_proj.weight"][rows].to(self.dtype)
            add_product(d_x_bsd[slab.rows].flatten(0, 1), d_XN.mT, weight)

    def project_out_back(self, slab: "Slab") -> None:
        """To the gradients of what remains of the output projection."""
        d_bias = self.total("out_proj.bias")
        if d_bias is not None:
            d_bias += slab.d_y_bsd.sum((0, 1), dtype=d_bias.dtype)
        if slab.inner_bsi is not None:
            d_weight = self.total("out_proj.weight")
            if d_weight is not None:
                add_product(d_weight, slab.d_y_bsd.flatten(0, 1).mT, slab.inner_bsi.flatten(0, 1))

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
    held_XN: Tensor | None = None
    """All that is projected, where it has room; then its gradient."""
    inner_bsi: Tensor | None = None
    """What is projected out, where it has room."""
    once: dict[Part, Tensor] = field(default_factory=dict)
    """What is projected once for all ranks."""
    d_once: dict[Part, Tensor] = field(default_factory=dict)


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
            entering.append(self.run(self.projected(piece), entering[-1])[1])
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

    def of_piece(self, XN: Tensor, piece: slice) -> Tensor:
        """Of a channel's tokens, those of a piece in each row."""
        return XN.unflatten(1, self.slab.x_bsd.shape[:2])[:, :, piece]

    def projected(self, piece: slice) -> Tensor:
        """All that this rank projects, in its order."""
        found = (
            self.own[part] if part in self.own else self.slab.once[whole(part)][at] for part, at in self.parts.items()
        )
        all_Xbs = torch.cat([self.of_piece(XN, piece) for XN in found])
        return all_Xbs.flatten(1).mT.contiguous().unflatten(0, all_Xbs.shape[1:])

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
        d_y = slab.d_y_bsd[:, piece]
        value, d_inner = inner.detach(), d_y @ back.parameters["out_proj.weight"][:, self.place].to(d_y.dtype)
        if slab.inverse_bs1 is not None and slab.products_bs1 is not None:
            value, d_inner = self.through_norm(value, d_inner, slab.inverse_bs1[:, piece], slab.products_bs1[:, piece])
        self.project_out_back(piece, value)
        ends = [(inner, d_inner)]
        ends += [(t, d) for name, d in d_after.items() if d is not None and (t := getattr(after, name)).requires_grad]
        inputs = [given, *wanted.values(), *self.leaves.values()]
        y, d = ([end[i] for end in ends] for i in range(2))
        # The graph keeps what it needs, and lets it go as it goes back.
        del value, inner, after, ends, d_inner, given
        d_given, *found = torch.autograd.grad(y, inputs, d, allow_unused=True)
        del y, d, inputs
        for name, d_leaf in zip(self.leaves, found[len(wanted) :], strict=True):
            total = back.total(name)
            if d_leaf is not None and total is not None:
                add_to(total, d_leaf, self.share.parameters.get(name), self.team)
        d_given_Xbs = d_given.flatten(0, 1).mT.contiguous().unflatten(1, d_given.shape[:2])
        widths = [len(part.own(self.team)) for part in self.parts]
        for part, d_Xbs in zip(self.parts, d_given_Xbs.split(widths), strict=True):
            if part in self.own:
                self.of_piece(self.own[part], piece).copy_(d_Xbs)
            else:
                add_to(self.of_piece(slab.d_once[whole(part)], piece), d_Xbs, Split(0, (part,)), self.team)
        return dict(zip(wanted, found, strict=False))

    def project_out_back(self, piece: slice, value_bsi: Tensor) -> None:
        """To the gradient of this rank's columns of the output projection, or what it needs once all are there."""
        slab = self.slab
        if slab.inner_bsi is not None:
            slab.inner_bsi[:, piece, self.place] = value_bsi.to(slab.inner_bsi.dtype)
            return
        d_weight = self.back.total("out_proj.weight")
        if d_weight is not None:
            factors = (slab.d_y_bsd[:, piece].flatten(0, 1).mT, value_bsi.flatten(0, 1))
            if isinstance(self.place, slice):
                add_product(d_weight[:, self.place], *factors)
            else:
                d_weight.index_add_(1, self.place, (factors[0] @ factors[1]).to(d_weight.dtype))

    def through_norm(
        self, u_bsi: Tensor, d_inner_bsi: Tensor, inverse_bs1: Tensor, products_bs1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the norm makes of this rank's channels, and their gradient.

        `products_bs1` are those of all channels with their gradients, and so of the output with its own.
        """
        norm, back, dtype = self.back.norm, self.back, u_bsi.dtype
        weight_i = take(norm.weight.detach(), self.share.parameters["norm.weight"], self.team)
        d_normed_bsi = d_inner_bsi * inverse_bs1
        d_weight_i = back.total("norm.weight")
        if d_weight_i is not None:
            found = (d_normed_bsi * u_bsi).sum((0, 1)).to(d_weight_i.dtype)
            add_to(d_weight_i, found, self.share.parameters["norm.weight"], self.team)
        shared_bs1 = products_bs1 * inverse_bs1.square() / norm.weight.shape[0]
        d_u_bsi = (d_normed_bsi.mul_(weight_i)).addcmul_(u_bsi.to(d_normed_bsi.dtype), shared_bs1, value=-1)
        return (u_bsi * inverse_bs1).mul_(weight_i).to(dtype), d_u_bsi.to(dtype)


def blocks(rows: int) -> list[slice]:
    return [slice(start, min(start + BLOCK, rows)) for start in range(0, rows, BLOCK)]


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
