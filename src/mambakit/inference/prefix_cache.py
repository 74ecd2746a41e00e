"""States of prompts already read, so that prompts with the same beginning need not read it again."""

import heapq
import threading
import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, nn

from mambakit.arguments import shown
from mambakit.blocks.caches import clone
from mambakit.inference.fingerprint import fingerprint
from mambakit.inference.radix import WIDTH, Node, Tree, ancestry, nearest_below, pack


class Prefix(NamedTuple):
    """Where a model stands after the tokens of a prefix."""

    length: int
    x_1d: Tensor
    """The residual stream at its last token: what the next token's logits are made of."""
    cache: Any
    nbytes: int


class Plan(NamedTuple):
    """How to read a prompt: go on from `prefix`, and keep a state at each of `cuts`."""

    prefix: Prefix | None
    cuts: tuple[int, ...]
    """Numbers of tokens in rising order, beyond the prefix: ends of messages, where it leaves known paths, its end."""
    why_not_more: str
    """One clause: why the prefix is not longer."""

    @property
    def reused(self) -> int:
        return 0 if self.prefix is None else self.prefix.length

    def pieces(self, chunk: int) -> list[int]:
        """Where the pieces end that are read at a time: at the cuts, and at the multiples of `chunk` between them."""
        last = self.cuts[-1] if self.cuts else 0
        return sorted({*self.cuts, *range(self.reused - self.reused % chunk + chunk, last, chunk)})


def check_prefix_cache(given: Any) -> None:
    if given is not None and not isinstance(given, PrefixCache):
        raise ValueError(f"prefix_cache is a {type(given).__name__}, expected a PrefixCache or None")


class Rank:
    """What a kept state is worth; see `PrefixCache`."""

    __slots__ = ("clock", "ticket", "touched", "weight")

    def __init__(self, weight: int):
        self.weight = weight
        """One more than its uses, and zero if it was kept in passing."""
        self.clock = 0.0
        self.touched = self.ticket = 0

    @property
    def counts(self) -> bool:
        return self.weight > 0


class PrefixCache:
    """The states after prefixes that are worth the most, found by the token ids themselves.

    `max_entries` and `max_bytes` (None: no limit) bound what is kept. It serves one model, and forgets everything when
    that model changes. `hits` and `misses` count prompts that did and did not continue from a kept prefix,
    `reused_tokens` the tokens that were therefore not read again.

    What goes first: a state is worth the tokens between it and the nearest kept one before it, which would have to be
    read again without it, times one more than the times it was used, divided by its bytes. Added to that is the worth
    of what was evicted last when the state was kept or last used, so that what is not used falls behind, the sooner the
    less it is worth. The least sum goes, and of equal ones that which was used longest ago. A state kept in `passing`
    is itself worth nothing, and takes nothing from those after it: once it is of use, a better place is known.

    A prompt that was looked up is known from then on, read or not, and so is the place where a later one leaves it: ids
    of at most `max_path_tokens` tokens, 4 bytes each, beside those that lead to kept states.

    Threads may share it: every method takes effect as a whole. The model may change between generations, not while one
    reads its prompts.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> known = mk.PrefixCache()
        >>> for question in ([7, 8], [9], [10, 11]):
        ...     tokens = mk.generate(model, [*range(100), *question], max_new_tokens=1, prefix_cache=known)
        >>> known.reused_tokens
        100
    """

    def __init__(
        self, max_entries: int | None = 64, max_bytes: int | None = 1 << 30, *, max_path_tokens: int = 1 << 20
    ):
        for name, value in (("max_entries", max_entries), ("max_bytes", max_bytes)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {shown(value)}, expected a positive whole number, or None for no limit")
        if type(max_path_tokens) is not int or max_path_tokens < 0:
            raise ValueError(f"max_path_tokens is {shown(max_path_tokens)}, expected a whole number of at least 0")
        self.max_entries, self.max_bytes, self.max_path_tokens = max_entries, max_bytes, max_path_tokens
        self.hits = self.misses = self.reused_tokens = self.nbytes = 0
        # Held for looking up and counting only, never while tensors are read, copied or freed.
        self._lock = threading.Lock()
        self._model: weakref.ref[nn.Module] | None = None
        self._fingerprint: Any = None
        self._changes = 0
        self._numbers = count(1)
        self._clock = 0.0
        self._kept: dict[Node, Prefix] = {}
        self._forget()

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forget every prefix; the counts go on."""
        with self._lock:
            dropped = self._forget()
        del dropped

    def serve(self, model: nn.Module) -> int:
        """Keep prefixes of `model` from now on, and only those it makes as it is; `plan` and `keep` take the result.

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
        return self.plan(served, ids).prefix

    def plan(self, served: int, ids: Sequence[int], ends: Sequence[int] = ()) -> Plan:
        """The longest kept prefix of `ids`, and where to keep states while reading the rest.

        That is where messages end (`ends`, numbers of tokens), where `ids` leaves what was looked up before, and its
        own end. So a beginning that prompts share is reused by the third of them, and one that ends with a message by
        the second.
        """
        packed = pack(ids)
        wrong = [end for end in ends if type(end) is not int or not 0 <= end <= len(ids)]
        if wrong:
            raise ValueError(f"ends has {wrong}, expected numbers of tokens from 0 to the prompt's {len(ids)}")
        with self._lock:
            is_current = served == self._changes
            nodes, known = self._tree.walk(packed) if is_current else ([], 0)
            found = next((node for node in reversed(nodes) if node.value is not None), None)
            if found is None:
                self.misses += 1
            else:
                self.hits += 1
                self.reused_tokens += found.length
                found.value.weight += found.value.counts
                self._touch(found)
            prefix = None if found is None else self._kept[found]
            why_not_more = _why_not_more(nodes, known, len(packed), found) if is_current else "the model has changed"
            if is_current:
                self._tree.learn(packed)
        reused = 0 if prefix is None else prefix.length
        # One token alone, with which all prompts may begin, is read faster than a state is copied.
        branch = known // WIDTH if known > WIDTH else 0
        cuts = sorted(cut for cut in {*ends, branch, len(ids)} if cut > reused)
        return Plan(prefix, tuple(cuts), why_not_more)

    def keep(self, served: int, ids: Sequence[int], x_1d: Tensor, cache: Any, *, passing: bool = False) -> None:
        """Remember the state after `ids`, if it fits at all and the model is what `serve` saw.

        With `passing` the place has no meaning of its own, and the state is kept as long as there is room.
        """
        packed, weight = pack(ids), 0 if passing else 1
        with self._lock:
            if served != self._changes or self._is_kept(packed, weight):
                return
        # Cloned: parts of a cache may be views that hold on to a whole piece of the prompt.
        x_1d, cache = x_1d.clone(), clone(cache)
        prefix = Prefix(len(ids), x_1d, cache, x_1d.nbytes + _nbytes(cache))
        if self.max_bytes is not None and prefix.nbytes > self.max_bytes:
            return
        dropped = []
        with self._lock:
            # Others may have kept it meanwhile, or seen another model.
            if served != self._changes or self._is_kept(packed, weight):
                return
            node = self._tree.put(packed, Rank(weight))
            self._kept[node] = prefix
            self.nbytes += prefix.nbytes
            self._touch(node)
            self._enqueue(node)
            self._lower_those_after(node)
            while self._is_over():
                dropped.append(self._evict())

    def _is_kept(self, packed: bytes, weight: int) -> bool:
        node = self._tree.walk(packed)[0][-1]
        if node.end < len(packed) or node.value is None:
            return False
        self._touch(node)
        if weight > node.value.weight:
            node.value.weight = weight
            self._lower_those_after(node)
        return True

    def _forget(self) -> dict[Node, Prefix]:
        """What is dropped is returned, to be freed without the lock; so in `_evict`."""
        dropped, self._kept, self.nbytes = self._kept, {}, 0
        self._tree = Tree(self.max_path_tokens)
        self._queue: list[tuple[float, int, int, Node]] = []
        return dropped

    def _evict(self) -> Prefix:
        while True:
            *queued, ticket, node = heapq.heappop(self._queue)
            if node.value is None or node.value.ticket != ticket:
                continue
            if self._worth(node) > tuple(queued):
                self._enqueue(node)
                continue
            self._clock = max(self._clock, queued[0])
            self._tree.evict(node)
            prefix = self._kept.pop(node)
            self.nbytes -= prefix.nbytes
            return prefix

    def _touch(self, node: Node) -> None:
        node.value.clock, node.value.touched = self._clock, next(self._numbers)

    def _worth(self, node: Node) -> tuple[float, int]:
        before = next((above.length for above in ancestry(node.parent) if above.value and above.value.counts), 0)
        rank = node.value
        return rank.clock + rank.weight * (node.length - before) / max(self._kept[node].nbytes, 1), rank.touched

    def _lower_those_after(self, node: Node) -> None:
        """They have fewer tokens to lose now that a state is kept at `node`."""
        if node.value.counts:
            for below in nearest_below(node, lambda rank: rank.counts):
                self._enqueue(below)

    def _enqueue(self, node: Node) -> None:
        """By its worth of now. More of it is noticed when its turn comes; who makes it less enqueues again."""
        node.value.ticket = next(self._numbers)
        heapq.heappush(self._queue, (*self._worth(node), node.value.ticket, node))
        if len(self._queue) > 2 * len(self._kept) + 64:
            self._queue = [e for e in self._queue if e[3].value is not None and e[3].value.ticket == e[2]]
            heapq.heapify(self._queue)

    def _is_over(self) -> bool:
        too_many = self.max_entries is not None and len(self._kept) > self.max_entries
        return too_many or (self.max_bytes is not None and self.nbytes > self.max_bytes)


def _why_not_more(nodes: list[Node], known: int, end: int, found: Node | None) -> str:
    """For a prompt of `end` bytes, of which a path has `known` with `nodes` along it, and `found` is reused."""
    reused = 0 if found is None else found.end
    if reused == end:
        return "all of it was reused"
    if known == 0:
        return "nothing like it was read before"
    if reused == known:
        return f"no prompt before shares more than {reused // WIDTH} tokens with it"
    evicted = next((node for node in reversed(nodes) if node.was_evicted and node.end > reused), None)
    if evicted is not None:
        return f"the state after token {evicted.length} was evicted"
    start = f"between token {reused // WIDTH} and" if reused else "before"
    where = "where this prompt leaves the ones before" if known < end else "its end"
    return f"no state is kept {start} token {known // WIDTH}, {where}"


def _nbytes(node: Any) -> int:
    if isinstance(node, Tensor):
        return node.nbytes
    return sum(_nbytes(part) for part in node) if isinstance(node, list | tuple) else 0
