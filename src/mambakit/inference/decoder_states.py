"""What a decoded model carries for its rows, in memory that kernels change in place.

Every row has a *place* in the states of each block, and a number by which blocks that keep tokens know its *text*.
Places that no row has are for states that may be taken back: a row goes back to an earlier state by going back to its
place, and nothing is copied.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.blocks.block import Block
from mambakit.blocks.family import FusedStep, family_of

ROOM = 256
"""Tokens for which there is room, at least, when tokens that are kept are copied."""


class States:
    def __init__(self, blocks: Sequence[Block]):
        self._blocks = blocks
        self._caches: list[Any] = []
        """Of each block: what its `grows` names by text, with tokens in order, everything else by place."""
        self._firsts: list[Tensor | None] = []
        """The position of each text's first token that is kept."""
        self.places: list[int] = []
        self.texts: list[int] = []
        self.left = math.inf
        """Tokens for which every text has room."""

    def load(self, caches: Sequence[Any]) -> None:
        """Of all rows, which are copied."""
        self._caches = [copied(cache) for cache in caches]
        self.places = [*range(next(len(t) for cache in self._caches for t in cache if isinstance(t, Tensor)))]
        self._keep([(q, self._caches[q]) for q in self._with_slots()], ROOM)

    def join(self, caches: Sequence[Any], taken: Collection[int]) -> None:
        """One more row, the last, that `caches` are of; at a place that is not among the `taken`."""
        place = next(n for n in count() if n not in taken)
        text = next(n for n in count() if n not in self.texts)
        added = list(caches)
        for q in self._with_slots():
            added[q], first_1 = self._slots(q).in_order(self._blocks[q], caches[q], int(self.left))
            first = with_length(self._first(q), 0, text + 1)
            first[text] = first_1[0]
            self._firsts[q] = first
        self._caches = [with_row(own, new, place, text) for own, new in zip(self._caches, added, strict=True)]
        self.places.append(place)
        self.texts.append(text)

    def leave(self, row: int) -> None:
        """The last row becomes this one."""
        for numbers in (self.places, self.texts):
            take_out(numbers, row)

    def rows(self, rows: Sequence[int]) -> list[Any]:
        """Copies of what these rows carry, block by block, in the form in which blocks return it."""
        return [self._rows(q, rows) for q in range(len(self._blocks))]

    def make_room(self, tokens: int) -> bool:
        """For so many more tokens of every text; whether memory lies elsewhere from now on."""
        if tokens <= self.left:
            return False
        rows = range(len(self.places))
        self._keep([(q, self._rows(q, rows)) for q in self._with_slots()], tokens)
        return True

    def make_places(self, places: int) -> bool:
        """At least so many; whether memory lies elsewhere from now on."""
        there = next(len(t) for cache in self._caches for t in by_place(cache).values())
        if places <= there:
            return False
        places = max(places, 2 * there)
        for q, cache in enumerate(self._caches):
            longer = {name: with_length(t, 0, places) for name, t in by_place(cache).items()}
            self._caches[q] = cache._replace(**longer)
        return True

    def of_kernels(self) -> list[dict[str, Tensor | int]]:
        """In the words of the kernels, block by block."""
        states: list[dict[str, Tensor | int]] = []
        for block, cache, first in zip(self._blocks, self._caches, self._firsts, strict=True):
            own = {called: getattr(cache, name) for name, called in step_of(block).places.items()}
            states.append(own if first is None else {**own, "first": first, "slots": longest(cache)})
        return states

    def _keep(self, caches: Sequence[tuple[int, Any]], tokens: int) -> None:
        """The tokens of all rows, of blocks' caches as these return them, with room for more."""
        self.texts, self._firsts = [*range(len(self.places))], [None] * len(self._blocks)
        self.left = math.inf
        for q, cache in caches:
            # Twice as much every time, so that all the copying takes as long as the last.
            room = max(tokens, ROOM, longest(cache))
            ordered, self._firsts[q] = self._slots(q).in_order(self._blocks[q], cache, room)
            self._caches[q] = self._caches[q]._replace(**{name: getattr(ordered, name) for name in cache.grows})
            self.left = min(self.left, room)

    def _rows(self, q: int, rows: Sequence[int]) -> Any:
        cache, grows = self._caches[q], getattr(self._caches[q], "grows", {})
        places, texts = (torch.tensor([of[row] for row in rows], dtype=torch.int64) for of in (self.places, self.texts))
        named = zip(cache._fields, cache, strict=True)
        own = type(cache)(*(t[texts if name in grows else places] if isinstance(t, Tensor) else t for name, t in named))
        first = self._firsts[q]
        return own if first is None else self._slots(q).in_slots(self._blocks[q], own, first[texts])

    def _with_slots(self) -> Iterator[int]:
        return (q for q, block in enumerate(self._blocks) if step_of(block).slots is not None)

    def _slots(self, q: int) -> Any:
        return step_of(self._blocks[q]).slots

    def _first(self, q: int) -> Tensor:
        first = self._firsts[q]
        assert first is not None, "it keeps tokens"
        return first


def take_out(rows: list[Any], row: int) -> None:
    """The last row takes the place of this one."""
    last = rows.pop()
    if row < len(rows):
        rows[row] = last


def by_place(cache: Any) -> dict[str, Tensor]:
    grows = getattr(cache, "grows", {})
    named = zip(cache._fields, cache, strict=True)
    return {name: t for name, t in named if isinstance(t, Tensor) and name not in grows}


def with_row(cache: Any, new: Any, place: int, text: int) -> Any:
    """`cache` with the only row of `new`; with twice as much memory where there is none left for it."""
    grows, changed = getattr(cache, "grows", {}), []
    for name, tensor, added in zip(cache._fields, cache, new, strict=True):
        if not isinstance(tensor, Tensor):
            changed.append(tensor)
            continue
        at = text if name in grows else place
        if at >= len(tensor):
            tensor = with_length(tensor, 0, max(at + 1, 2 * len(tensor)))
        if name in grows:
            axis = grows[name]
            tensor = with_length(tensor, axis, added.shape[axis])
            added = with_length(added, axis, tensor.shape[axis])
        tensor[at].copy_(added[0])
        changed.append(tensor)
    return type(cache)(*changed)


def with_length(tensor: Tensor, axis: int, length: int) -> Tensor:
    """With zeros at the end of an axis that is shorter."""
    missing = length - tensor.shape[axis]
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - axis) + [0, missing]) if missing > 0 else tensor


def longest(cache: Any) -> int:
    """How many tokens it has room for."""
    return max(getattr(cache, name).shape[axis] for name, axis in cache.grows.items())


def step_of(block: Block) -> FusedStep:
    step = family_of(block).step
    assert step is not None, "the kernel knows families that have one"
    return step


def copied(cache: Any) -> Any:
    """In contiguous memory of its own, cut off from what computed it."""
    if isinstance(cache, Tensor):
        return torch.clone(cache, memory_format=torch.contiguous_format).detach()
    if not isinstance(cache, tuple):
        return cache
    parts = [copied(part) for part in cache]
    return type(cache)(*parts) if hasattr(cache, "_fields") else tuple(parts)
