"""States of prompts already read, so that prompts with the same beginning need not read it again."""

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from mambakit.blocks.caches import clone


class Prefix(NamedTuple):
    """Where a model stands after the tokens of a prefix."""

    length: int
    x_1d: Tensor
    """The residual stream at its last token: what the next token's logits are made of."""
    cache: Any


class PrefixCache:
    """The states after the most recently used prefixes, found by the token ids themselves.

    `max_entries` and `max_bytes` (None: no limit) bound what is kept; the least recently used go first. It serves one
    model, and forgets everything when that model's weights change. `hits` and `misses` count prompts that did and did
    not continue from a kept prefix, `reused_tokens` the tokens that were therefore not read again.
    """

    def __init__(self, max_entries: int | None = 64, max_bytes: int | None = 1 << 30):
        for name, value in (("max_entries", max_entries), ("max_bytes", max_bytes)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}, expected a positive whole number, or None for no limit")
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.hits = self.misses = self.reused_tokens = self.nbytes = 0
        self._kept: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._model: weakref.ref[nn.Module] | None = None
        self._weights: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forget every prefix; the counts go on."""
        self._kept.clear()
        self.nbytes = 0

    def serve(self, model: nn.Module) -> None:
        """Keep prefixes of `model` from now on, and only those its present weights made."""
        if self._model is not None and self._model() not in (None, model):
            raise ValueError("this PrefixCache holds states of another model; make one for each model")
        weights = [(tensor.data_ptr(), tensor._version) for tensor in _tensors_of(model)]
        if self._model is None or self._model() is None or weights != self._weights:
            self.clear()
        self._model, self._weights = weakref.ref(model), weights

    def longest(self, ids: Sequence[int]) -> Prefix | None:
        """The longest kept prefix of `ids`, which may be all of them."""
        ids = tuple(ids)
        found = max((key for key in self._kept if ids[: len(key)] == key), key=len, default=None)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self.reused_tokens += len(found)
        self._kept.move_to_end(found)
        return self._kept[found]

    def keep(self, ids: Sequence[int], x_1d: Tensor, cache: Any) -> None:
        """Remember the state after `ids`, if it fits at all."""
        # Cloned: parts of a cache may be views that hold on to a whole piece of the prompt.
        prefix = Prefix(len(ids), x_1d.clone(), clone(cache))
        size = _nbytes(prefix)
        if self.max_bytes is not None and size > self.max_bytes:
            return
        self._drop(tuple(ids))
        self._kept[tuple(ids)] = prefix
        self.nbytes += size
        while self._is_over():
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[int, ...]) -> None:
        if key in self._kept:
            self.nbytes -= _nbytes(self._kept.pop(key))

    def _is_over(self) -> bool:
        too_many = self.max_entries is not None and len(self._kept) > self.max_entries
        return too_many or (self.max_bytes is not None and self.nbytes > self.max_bytes)


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _nbytes(node: Any) -> int:
    if isinstance(node, Tensor):
        return node.nbytes
    return sum(_nbytes(part) for part in node) if isinstance(node, list | tuple) else 0
