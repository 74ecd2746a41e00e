"""Whole caches as values: copied, moved, cut along the batch, stored, taken back.

A cache is what a block or a model carries between calls: a `NamedTuple` of tensors and settings such as `pathway`, or
any nesting of lists, tuples and `NamedTuple`s of these, with None for nothing. The first axis of every tensor is the
batch; a `NamedTuple` whose tensors grow has a `grows` that says along which axis, by field. Caches are replaced, never
written into, so a new cache may share tensors with the one it was made from.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor
from torch.nn.functional import pad

from mambakit.arguments import find_device, find_path, shown
from mambakit.blocks.family import FAMILIES
from mambakit.ops.shapes import FLOATS, check_beside, check_readable, check_tensors

Cache = TypeVar("Cache")
Kind = TypeVar("Kind", bound=type)

KINDS: dict[str, type] = {}
"""What `save` and `load` know beside the families' caches."""
SETTINGS = (str, bool, int, float, type(None))
FORMAT = "1"


def register(kind: Kind) -> Kind:
    """Let `save` and `load` know a `NamedTuple` by its name; usable as a decorator.

    Examples:
        >>> from typing import NamedTuple
        >>> class MyCache(NamedTuple):
        ...     sum_bd: torch.Tensor
        >>> _ = mk.caches.register(MyCache)
    """
    if _kinds().get(kind.__name__, kind) is not kind:
        raise ValueError(f"a kind of cache named {kind.__name__} is already known; choose another name")
    KINDS[kind.__name__] = kind
    return kind


def rows(cache: Any) -> int:
    """The number of its batch rows.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> _, cache = block(torch.randn(3, 10, 64))
        >>> mk.caches.rows(cache)
        3
    """
    found: list[Tensor] = []
    _change(cache, lambda where, tensor: found.append(_with_rows(where, tensor)) or tensor)
    if not found:
        raise ValueError("a cache without a tensor does not say how many rows it has")
    return len(found[0])


def clone(cache: Cache) -> Cache:
    """A copy with memory of its own. Gradients flow through it; `detach` stops them.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> _, cache = block(torch.randn(3, 10, 64))
        >>> copy = mk.caches.clone(cache)
        >>> copy.ssm_bhpr is cache.ssm_bhpr
        False
    """
    return _change(cache, lambda _, tensor: tensor.clone())


def detach(cache: Cache) -> Cache:
    """The same values, cut off from what computed them.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> _, cache = block(torch.randn(3, 10, 64))
        >>> mk.caches.detach(cache).ssm_bhpr.requires_grad
        False
    """
    return _change(cache, lambda _, tensor: tensor.detach())


def to(cache: Cache, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Cache:
    """The cache on another device, or for a model of another dtype.

    As in the models themselves, states and rotations (`ssm_*`, `rotation`) are float32 at least, whatever `dtype` says.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> _, cache = block(torch.randn(3, 10, 64))
        >>> narrow = mk.caches.to(cache, dtype=torch.bfloat16)
        >>> narrow.conv_bvk.dtype, narrow.ssm_bhpr.dtype
        (torch.bfloat16, torch.float32)
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {shown(dtype)}, expected a torch.dtype")
    device = None if device is None else find_device(device)
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"a cache cannot become {dtype}; choose a floating-point one: {', '.join(map(str, FLOATS))}")

    def move(where: str, tensor: Tensor) -> Tensor:
        if tensor.is_meta and device is not None and device.type != "meta":
            raise ValueError(f"{where} is on the meta device and has no numbers that could be brought to {device}")
        if dtype is None or not tensor.is_floating_point():
            return tensor.to(device=device)
        return tensor.to(device=device, dtype=torch.promote_types(dtype, torch.float32) if _is_wide(where) else dtype)

    return _change(cache, move)


def select(cache: Cache, index_b: Sequence[int] | Tensor) -> Cache:
    """The batch rows `index_b`, in that order; a row may come more than once. A boolean for each row is a choice.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> _, cache = block(torch.randn(3, 10, 64))
        >>> mk.caches.rows(mk.caches.select(cache, [2, 0]))
        2
    """
    wanted = "index_b has to be a list or vector of row numbers, or of a boolean for each row"
    try:
        index_b = index_b if isinstance(index_b, Tensor) else torch.as_tensor(index_b)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{wanted}, got {shown(index_b)}") from error
    check_readable("index_b", index_b)
    if index_b.numel() == 0 and index_b.dtype != torch.bool:
        index_b = index_b.long()
    if index_b.dim() != 1 or index_b.dtype not in (torch.bool, torch.int32, torch.int64):
        raise ValueError(f"{wanted}, got {index_b.dtype} of shape {tuple(index_b.shape)}")
    flags = len(index_b) if index_b.dtype == torch.bool else None
    index_b = index_b if flags is None else index_b.nonzero()[:, 0]
    rows = index_b.tolist()

    def take(where: str, tensor: Tensor) -> Tensor:
        batch = len(_with_rows(where, tensor))
        if flags not in (None, batch):
            raise ValueError(f"index_b has {flags} booleans, but {where} has {batch} rows")
        wrong = [row for row in rows if not 0 <= row < batch]
        if wrong:
            raise ValueError(f"index_b asks for rows {wrong}, but {where} has rows 0 to {batch - 1}")
        index_here_b = index_b.to(tensor.device)
        check_beside(where, tensor, "index_b", index_here_b)
        return tensor.index_select(0, index_here_b)

    return _change(cache, take)


def concat(caches: Sequence[Cache]) -> Cache:
    """One cache with the rows of all, in order. They have to be alike in everything but their number of rows.

    Where tensors grow, the shorter ones are filled up with zeros.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> _, cache = block(torch.randn(3, 10, 64))
        >>> mk.caches.rows(mk.caches.concat([cache, cache]))
        6
    """
    if not caches:
        raise ValueError("concat needs at least one cache")

    def join(where: str, tensors: Sequence[Tensor], grows: int | None) -> Tensor:
        if grows is not None:
            tensors = _of_one_length([_with_rows(where, tensor) for tensor in tensors], grows)
        first = tensors[0]
        for i, other in enumerate(tensors):
            _with_rows(where, other)
            if _but_rows(other) != _but_rows(first):
                raise ValueError(
                    f"{where} is {_but_rows(first)} per row in cache 0 but {_but_rows(other)} in cache {i}; "
                    "concat takes caches of one model, to() gives them one device and dtype"
                )
            check_beside(f"{where} in cache 0", first, f"that of cache {i}", other)
        return torch.cat(list(tensors))

    return _combine(caches, join, "cache")


def save(cache: Any, path: str | os.PathLike[str]) -> None:
    """Write the cache to a safetensors file, values and structure; `load` gives it back.

    The file is replaced at once or not at all: a write that fails leaves what was there. Gradients are not stored.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> _, cache = block(torch.randn(3, 10, 64))
        >>> mk.caches.save(cache, "session.safetensors")
        >>> again = mk.caches.load("session.safetensors")
    """
    tensors: dict[str, Tensor] = {}
    structure = _describe(cache, "cache", tensors)
    metadata = {"mambakit_cache": FORMAT, "structure": json.dumps(structure)}
    # safetensors refuses tensors that overlap, which expanded or shared ones do.
    own = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    _replace_file(find_path("path", path), to_safetensors(own, metadata))


def load(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Any:
    """The cache that `save` wrote to `path`. A file that is anything else, or not all of it, raises ValueError.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> _, cache = block(torch.randn(3, 10, 64))
        >>> mk.caches.save(cache, "parked.safetensors")
        >>> torch.equal(mk.caches.load("parked.safetensors").ssm_bhpr, cache.ssm_bhpr)
        True
    """
    device = None if device is None else find_device(device)
    try:
        with safe_open(find_path("path", path), framework="pt") as file:
            metadata = file.metadata() or {}
            # Cloned: the tensors are parts of the mapped file.
            tensors = {name: file.get_tensor(name).clone().to(device) for name in file.keys()}  # noqa: SIM118  # not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    if metadata.get("mambakit_cache") != FORMAT:
        found = sorted(metadata) or "no metadata"
        raise ValueError(f"{path} holds no cache of mambakit's format {FORMAT}: found {found}")
    try:
        cache = _restore(json.loads(metadata["structure"]), tensors)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds a cache whose structure does not fit its tensors: {error!r}") from error
    if tensors:
        raise ValueError(f"{path} holds tensors its structure does not name: {', '.join(sorted(tensors))}")
    return cache


class History:
    """The last `length` caches, to take back tokens that turn out not to count, as in speculative decoding.

    A cache is one value: convolution window, state and rotation go back together. Nothing is copied, since a step makes
    a new cache and leaves the old one as it was. Caches that carry gradients keep their graphs; `detach` them first.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> _, cache = block(torch.randn(3, 10, 64))
        >>> history = mk.caches.History(4)
        >>> history.push(cache)
        >>> for _ in range(3):
        ...     _, cache = block.step(torch.randn(3, 64), cache)
        ...     history.push(cache)
        >>> before = history.rollback(2)  # takes two steps back
    """

    def __init__(self, length: int):
        if type(length) is not int or not 0 < length < 2**63:
            raise ValueError(f"a history of length {shown(length)} keeps nothing; choose a whole number of 1 or more")
        self._kept: deque[Any] = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._kept)

    def push(self, cache: Any) -> None:
        """Keep the cache that a step has just returned, and forget the oldest if there are too many."""
        self._kept.append(cache)

    def rollback(self, k: int) -> Any:
        """Drop the last `k` pushes and return the cache pushed before them: the newest for `k = 0`."""
        if type(k) is not int or not 0 <= k < len(self._kept):
            kept = len(self._kept)
            raise ValueError(
                f"cannot go back {shown(k)} of {kept} kept caches, at most {max(kept - 1, 0)}; keep a longer history"
            )
        for _ in range(k):
            self._kept.pop()
        return self._kept[-1]


def _with_rows(where: str, tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        raise ValueError(f"{where} has no axes, and the first one of a cache's tensors is the batch")
    return tensor


def _kinds() -> dict[str, type]:
    return {**KINDS, **{family.cache.__name__: family.cache for family in FAMILIES.values()}}


def _change(cache: Cache, change: Callable[[str, Tensor], Tensor]) -> Cache:
    return _combine([cache], lambda where, tensors, _: change(where, tensors[0]), "cache")


def _combine(
    nodes: Sequence[Any],
    join: Callable[[str, Sequence[Tensor], int | None], Tensor],
    where: str,
    grows: int | None = None,
) -> Any:
    """The structure that all `nodes` have, with `join(where, tensors, grows)` in the place of their tensors."""
    first = nodes[0]
    for i, node in enumerate(nodes):
        if _outline(node) != _outline(first):
            raise ValueError(f"{where} is {_outline(first)} in cache 0 but {_outline(node)} in cache {i}")
    if isinstance(first, Tensor):
        for node in nodes:
            check_tensors({where: node})
        return join(where, nodes, grows)
    if isinstance(first, SETTINGS):
        return first
    axes = getattr(first, "grows", {})
    parts = [
        _combine(parts, join, where + label, axes.get(label[1:]))
        for label, *parts in zip(_labels(first, where), *nodes, strict=True)
    ]
    return type(first)(*parts) if _is_named(first) else type(first)(parts)


def _outline(node: Any) -> str:
    """What two nodes have in common if their caches can be combined."""
    if isinstance(node, SETTINGS):
        return repr(node)
    if isinstance(node, list | tuple) and not _is_named(node):
        return f"a {type(node).__name__} of {len(node)}"
    return f"a {type(node).__name__}"


def _labels(node: Any, where: str) -> list[str]:
    if _is_named(node):
        return [f".{field}" for field in node._fields]
    if isinstance(node, list | tuple):
        return [f"[{i}]" for i in range(len(node))]
    raise ValueError(f"{where} is a {type(node).__name__}; a cache is made of lists, tuples, NamedTuples and tensors")


def _is_named(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _is_wide(where: str) -> bool:
    field = where.rpartition(".")[2]
    return field.startswith("ssm_") or field == "rotation"


def _but_rows(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape[1:])} {tensor.dtype} on {tensor.device}"


def _of_one_length(tensors: Sequence[Tensor], axis: int) -> list[Tensor]:
    """All as long as the longest along `axis`, with zeros at the end."""
    longest = max(tensor.shape[axis] for tensor in tensors)
    return [pad(t, (0, 0) * (t.dim() - 1 - axis) + (0, longest - t.shape[axis])) for t in tensors]


def _describe(node: Any, where: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The structure of a cache as JSON values; its tensors go to `tensors` by name."""
    if isinstance(node, Tensor):
        check_readable(where, node)
        tensors[where] = node
        return {"tensor": where}
    if isinstance(node, SETTINGS):
        return {"setting": node}
    parts = [_describe(part, where + label, tensors) for label, part in zip(_labels(node, where), node, strict=True)]
    kind = type(node)
    if kind in (list, tuple):
        return {kind.__name__: parts}
    if _kinds().get(kind.__name__) is not kind:
        raise ValueError(f"{where} is a {kind.__name__}, which load would not know; caches.register({kind.__name__})")
    return {"kind": kind.__name__, "fields": dict(zip(node._fields, parts, strict=True))}


def _restore(structure: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """What `_describe` described, taking its tensors out of `tensors`."""
    if "tensor" in structure:
        return tensors.pop(structure["tensor"])
    if "setting" in structure:
        return structure["setting"]
    if "kind" in structure:
        return _kinds()[structure["kind"]](
            **{name: _restore(part, tensors) for name, part in structure["fields"].items()}
        )
    sequence = list if "list" in structure else tuple
    return sequence(_restore(part, tensors) for part in structure[sequence.__name__])


def _replace_file(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
