"""States of prompts already read, so that prompts with the same beginning need not read it again."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from mambakit.blocks.caches import clone
from mambakit.inference.fingerprint import fingerprint


class Prefix(NamedTuple):
    """Where a model stands after the tokens of a prefix."""

    length: int
    x_1d: Tensor
    """The residual stream at its last token: what the next token's logits are made of."""
    cache: Any
    nbytes: int


class PrefixCache:
    """The states after the most recently used prefixes, found by the token ids themselves.

    `max_entries` and `max_bytes` (None: no limit) bound what is kept; the least recently used go first. It serves one
    model, and forgets everything when that model changes. `hits` and `misses` count prompts that did and did not
    continue from a kept prefix, `reused_tokens` the tokens that were therefore not read again.

    Threads may share it: every method takes effect as a whole. The model may change between generations, not while one
    reads its prompts.
    """

    def __init__(self, max_entries: int | None = 64, max_bytes: int | None = 1 << 30):
        for name, value in (("max_entries", max_entries), ("max_bytes", max_bytes)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}, expected a positive whole number, or None for no limit")
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.hits = self.misses = self.reused_tokens = self.nbytes = 0
        # Held for looking up and counting only, never while tensors are read, copied or freed.
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._model: weakref.ref[nn.Module] | None = None
        self._fingerprint: Any = None
        self._changes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forget every prefix; the counts go on."""
        with self._lock:
            dropped = self._forget()
        del dropped

    def serve(self, model: nn.Module) -> int:
        """Keep prefixes of `model` from now on, and only those it makes as it is; `longest` and `keep` take the result.

        A change is seen however it was made: by an optimizer, `.data`, numpy, a hook, another epsilon; `fingerprint`
        lists what counts. Every weight is read for that, which takes as long as reading a prompt of some 40 tokens.
        A change of a single tensor goes unseen with a probability of 2**-32.
        """
        present = fingerprint(model)
        with self._lock:
            before = None if self._model is None else self._model()
            if before is not None and before is not model:
                raise ValueError("this PrefixCache holds states of another model; make one for each model")
            dropped = None
            if before is None or present != self._fingerprint:
                self._model, self._fingerprint, self._changes = weakref.ref(model), present, self._changes + 1
                dropped = self._forget()
            served = self._changes
        del dropped
        return served

    def longest(self, served: int, ids: Sequence[int]) -> Prefix | None:
        """The longest kept prefix of `ids`, which may be all of them; none once the model is not what `serve` saw."""
        ids = tuple(ids)
        with self._lock:
            keys = list(self._kept)
        fitting = sorted((key for key in keys if ids[: len(key)] == key), key=len, reverse=True)
        with self._lock:
            # Others may have dropped some meanwhile.
            kept = self._kept if served == self._changes else {}
            found = next((key for key in fitting if key in kept), None)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self.reused_tokens += len(found)
            self._kept.move_to_end(found)
            return self._kept[found]

    def keep(self, served: int, ids: Sequence[int], x_1d: Tensor, cache: Any) -> None:
        """Remember the state after `ids`, if it fits at all and the model is what `serve` saw."""
        # Cloned: parts of a cache may be views that hold on to a whole piece of the prompt.
        x_1d, cache = x_1d.clone(), clone(cache)
        prefix = Prefix(len(ids), x_1d, cache, x_1d.nbytes + _nbytes(cache))
        if self.max_bytes is not None and prefix.nbytes > self.max_bytes:
            return
        key, dropped = tuple(ids), []
        with self._lock:
            if served != self._changes:
                return
            if key in self._kept:
                dropped.append(self._drop(key))
            self._kept[key] = prefix
            self.nbytes += prefix.nbytes
            while self._is_over():
                dropped.append(self._drop(next(iter(self._kept))))

    def _forget(self) -> OrderedDict[tuple[int, ...], Prefix]:
        """What is dropped is returned, to be freed without the lock; so in `_drop`."""
        dropped, self._kept, self.nbytes = self._kept, OrderedDict(), 0
        return dropped

    def _drop(self, key: tuple[int, ...]) -> Prefix:
        prefix = self._kept.pop(key)
        self.nbytes -= prefix.nbytes
        return prefix

    def _is_over(self) -> bool:
        too_many = self.max_entries is not None and len(self._kept) > self.max_entries
        return too_many or (self.max_bytes is not None and self.nbytes > self.max_bytes)


def _nbytes(node: Any) -> int:
    if isinstance(node, Tensor):
        return node.nbytes
    return sum(_nbytes(part) for part in node) if isinstance(node, list | tuple) else 0
