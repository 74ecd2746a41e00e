"""What a decoded model carries for its rows, in memory that kernels change in place.

Every row has a *place* for what is small, and is a *text* for what is large: the states of heads, tokens that are kept.
A token that may be taken back gets a place of its own: for small states, and for a note of what it writes into large
ones, where kernels write it only when it counts. Rows are taken back by going back to a place, and nothing is copied.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from mambakit.blocks.block import Block
from mambakit.blocks.family import FusedStep, family_of

ROOM = 256
"""Tokens for which there is room, at least, when tokens that are kept are copied."""
LARGE, PAGE = 4 << 20, 2 << 20
"""Bytes: of a state that is worth it to begin where a large page does, and of such a page."""


class States:
    def __init__(self, blocks: Sequence[Block], dtype: torch.dtype = torch.float32):
        self._blocks, self._dtype = blocks, dtype
        self._caches: list[Any] = []
        """Of each block, by text or by place, with tokens in order."""
        self._notes: list[Tensor | None] = []
        """Of each block, by place."""
        self._firsts: list[Tensor | None] = []
        """The position of each text's first token that is kept."""
        self.places: list[int] = []
        self.texts: list[int] = []
        self.left = math.inf
        """Tokens for which every text has room."""
        self._count = 0
        """Of places."""

    def load(self, caches: Sequence[Any]) -> None:
        """Of all rows, which are copied."""
        self._caches = [self._narrowed(*both) for both in zip(self._blocks, map(copied, caches), strict=True)]
        self.places = [*range(next(len(t) for cache in self._caches for t in cache if isinstance(t, Tensor)))]
        self.texts = [*self.places]
        self._notes = [
            None if (notes := step_of(block).notes) is None else torch.zeros(len(self.places), notes[1](block))
            for block in self._blocks
        ]
        self._count_places()
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
        for q, block in enumerate(self._blocks):
            self._caches[q] = with_row(self._caches[q], added[q], place, text, by_text(block))
        self._make_notes()
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
        if places <= self._count:
            return False
        places = max(places, 2 * self._count)
        for q, block in enumerate(self._blocks):
            small = self._caches[q]._asdict().items()
            longer = {
                name: with_places(t, places)
                for name, t in small
                if isinstance(t, Tensor) and name not in by_text(block)
            }
            self._caches[q] = self._caches[q]._replace(**longer)
        self._make_notes()
        return True

    def of_kernels(self) -> list[dict[str, Tensor | int | None]]:
        """In the words of the kernels, block by block."""
        states: list[dict[str, Tensor | int | None]] = []
        for q, block in enumerate(self._blocks):
            cache, first, notes = self._caches[q], self._firsts[q], self._notes[q]
            own = {called: getattr(cache, name) for name, called in step_of(block).places.items()}
            if is_narrow(block, self._dtype):
                step: Any = step_of(block)
                large = step.places[step.notes[0]]
                own |= {step.narrow: own[large], large: None}
            if first is not None:
                own |= {"first": first, "slots": longest(cache)}
            states.append(own if notes is None else {**own, "notes": notes})
        return states

    def _narrowed(self, block: Block, cache: Any) -> Any:
        notes = step_of(block).notes
        if notes is None or not is_narrow(block, self._dtype):
            return cache
        return cache._replace(**{notes[0]: getattr(cache, notes[0]).to(self._dtype)})

    def _keep(self, caches: Sequence[tuple[int, Any]], tokens: int) -> None:
        """The tokens of all rows, of blocks' caches as these return them, with room for more."""
        self._firsts.clear()
        self._firsts.extend(None for _ in self._blocks)
        self.left = math.inf
        for q, cache in caches:
            # Twice as much every time, so that all the copying takes as long as the last.
            room = max(tokens, ROOM, longest(cache))
            ordered, first_b = self._slots(q).in_order(self._blocks[q], cache, room)
            kept = {name: self._by_text(getattr(ordered, name)) for name in cache.grows}
            self._caches[q], self._firsts[q] = self._caches[q]._replace(**kept), self._by_text(first_b)
            self.left = min(self.left, room)

    def _by_text(self, of_rows: Tensor) -> Tensor:
        if self.texts == [*range(len(of_rows))]:
            return of_rows
        moved = of_rows.new_zeros(max(self.texts) + 1, *of_rows.shape[1:])
        moved[self.texts] = of_rows
        return moved

    def _make_notes(self) -> None:
        """For all places. What was noted stays."""
        self._count_places()
        self._notes = [None if note is None else with_places(note, self._count) for note in self._notes]

    def _count_places(self) -> None:
        small = zip(self._blocks, self._caches, strict=True)
        self._count = next(
            len(t)
            for block, cache in small
            for name, t in cache._asdict().items()
            if isinstance(t, Tensor) and name not in by_text(block)
        )

    def _rows(self, q: int, rows: Sequence[int]) -> Any:
        cache, large = self._caches[q], by_text(self._blocks[q])
        places, texts = (torch.tensor([of[row] for row in rows], dtype=torch.int64) for of in (self.places, self.texts))
        named = zip(cache._fields, cache, strict=True)
        own = type(cache)(*(t[texts if name in large else places] if isinstance(t, Tensor) else t for name, t in named))
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


def is_narrow(block: Block, dtype: torch.dtype) -> bool:
    """Whether a block's large states are in bfloat16."""
    return dtype == torch.bfloat16 and step_of(block).narrow is not None


def take_out(rows: list[Any], row: int) -> None:
    """The last row takes the place of this one."""
    last = rows.pop()
    if row < len(rows):
        rows[row] = last


def by_text(block: Block) -> set[str]:
    """What of a block's cache is large."""
    notes = step_of(block).notes
    return {*getattr(block.cache_class, "grows", {}), *([] if notes is None else [notes[0]])}


def with_row(cache: Any, new: Any, place: int, text: int, by_text: Collection[str]) -> Any:
    """`cache` with the only row of `new`; with twice as much memory where there is none left for it."""
    grows, changed = getattr(cache, "grows", {}), []
    for name, tensor, added in zip(cache._fields, cache, new, strict=True):
        if not isinstance(tensor, Tensor):
            changed.append(tensor)
            continue
        at = text if name in by_text else place
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
    had = tensor.shape[axis]
    if length <= had:
        return tensor
    longer = empty(tensor, *tensor.shape[:axis], length, *tensor.shape[axis + 1 :])
    longer.narrow(axis, 0, had).copy_(tensor)
    longer.narrow(axis, had, length - had).zero_()
    return longer


def with_places(tensor: Tensor, places: int) -> Tensor:
    """With room at the end, which is written before it is read, and takes no memory until then."""
    if places <= len(tensor):
        return tensor
    longer = empty(tensor, places, *tensor.shape[1:])
    longer[: len(tensor)] = tensor
    return longer


def empty(like: Tensor, *shape: int) -> Tensor:
    """Not filled. What is large begins where a large page does: states that do not are passed over a sixth slower."""
    size, bytes_each = math.prod(shape), like.element_size()
    if size * bytes_each < LARGE or like.device.type != "cpu":
        return like.new_empty(shape)
    room = like.new_empty(size + PAGE // bytes_each)
    start = -room.data_ptr() % PAGE // bytes_each
    return room[start : start + size].view(shape)


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
        return empty(cache, *cache.shape).copy_(cache.detach())
    if not isinstance(cache, tuple):
        return cache
    parts = [copied(part) for part in cache]
    return type(cache)(*parts) if hasattr(cache, "_fields") else tuple(parts)
