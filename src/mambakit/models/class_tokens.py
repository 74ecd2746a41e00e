"""Learned rows that are inserted into a sequence for good, at places named by markers.

A marker is `"start"`, `"middle"`, `"end"` or a number: before the first token, before token `length // 2`, after the
last, or before that token. Where a sequence comes in parts, a cursor says how far it has come.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mambakit.blocks.caches import register

Marker = str | int
NAMED = ("start", "middle", "end")


@register
class Cursor(NamedTuple):
    """How far a level of class rows has come."""

    offset: int
    """Tokens and rows it has let through."""
    full_len: int | None
    """Tokens it will have received at the end; None where nobody knows."""


@register
class ClassCache(NamedTuple):
    """A cache together with where in the sequence it stands."""

    inner: Any
    cursors: tuple[Cursor, ...]
    """One per level, in the order in which tokens pass them."""


class ClassTokens(nn.Module):
    """One level: a learned row per marker."""

    def __init__(self, markers: Sequence[Marker], width: int, *, device: Any = None, dtype: Any = None):
        super().__init__()
        self.markers = check_markers("markers", markers)
        self.weight = nn.Parameter(torch.empty(len(self.markers), width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def check_markers(name: str, markers: Sequence[Marker]) -> tuple[Marker, ...]:
    for marker in markers:
        if marker not in NAMED if isinstance(marker, str) else type(marker) is not int or marker < 0:
            raise ValueError(f'{name} has {marker!r}, expected "start", "middle", "end" or a position from 0 on')
    return tuple(markers)


def needs_length(markers: Sequence[Marker]) -> bool:
    return "middle" in markers or "end" in markers


def length_after(markers: Sequence[Marker], full_len: int | None) -> int | None:
    """The length of the whole sequence with this level's rows; a number beyond the end never gets its place."""
    return None if full_len is None else len(plan(markers, Cursor(0, full_len), full_len)[0])


def fresh_cursors(levels: Sequence[tuple[int, ClassTokens]], full_len: int | None) -> tuple[Cursor, ...]:
    """Cursors at the beginning of a sequence of `full_len` tokens that passes one level after the other."""
    cursors = []
    for _, level in levels:
        cursors.append(Cursor(0, full_len))
        full_len = length_after(level.markers, full_len)
    return tuple(cursors)


def check_step_without_cursors(*levels: ClassTokens) -> None:
    """A step that knows no place in the sequence leaves rows out, unless that cannot be meant."""
    for level in levels:
        if needs_length(level.markers):
            raise ValueError(
                f"step with markers {level.markers} needs a cache with cursors: fresh_cache(batch, length)"
            )


def check_one_sequence(options: Mapping[str, Any]) -> None:
    if options.get("reset_bs") is not None or options.get("cu_seqlens") is not None:
        raise ValueError("class tokens and latents know one sequence per row: give each sequence a row of its own")


def batch_with_cursors(cache: Any) -> int:
    """The number of rows of a cache that has to have cursors."""
    if not isinstance(cache, ClassCache):
        raise ValueError("prime needs a cache with cursors; fresh_cache(batch, length) makes one")
    while not isinstance(cache, Tensor):
        cache = cache[0]
    return len(cache)


def output_places(markers: Sequence[Marker], full_len: int | None) -> list[tuple[int, int]]:
    """Where each marker's row comes in the whole sequence with rows, and its index in `markers`, from left to right."""
    if full_len is None:
        if needs_length(markers):
            raise ValueError(
                f"markers {markers} need the length of the whole sequence; give it as fresh_cache(batch, length)"
            )
        known = {"start": 0}
    else:
        known = {"start": 0, "middle": full_len // 2, "end": full_len}

    def key(i: int) -> tuple[int, int, int]:
        marker = markers[i]
        return (known[marker], NAMED.index(marker), i) if isinstance(marker, str) else (marker, len(NAMED), i)

    places, passed = [], 0
    for rank, i in enumerate(sorted(range(len(markers)), key=key)):
        position = key(i)[0] if full_len is None else min(key(i)[0], full_len)
        passed = max(passed, position)
        places.append((passed + rank, i))
    return places


def plan(markers: Sequence[Marker], cursor: Cursor, q: int, prime: bool = False) -> tuple[list[int], Cursor]:
    """What this level lets through when the next `q` tokens come, and where it then stands.

    The list has `i < q` for token `i` and `q + i` for the row of marker `i`. A row waits for the token it precedes,
    unless `prime` asks for what comes before the next token; `"end"` waits for the last token.
    """
    places, (start, full_len) = output_places(markers, cursor.full_len), cursor
    consumed = start - sum(place < start for place, _ in places) + q
    if full_len is not None and consumed > full_len:
        raise ValueError(f"the sequence was said to have {full_len} tokens here, but {consumed} have come")
    index: list[int] = []
    at, out = 0, start
    for place, i in places:
        if place < start:
            continue
        need = place - out
        if at + need > q:
            break
        if at + need == q:
            # Nothing of this call follows: only the end of the sequence, or a wish to see ahead, lets a row through.
            closes, ahead = not prime and full_len == consumed, prime and full_len != consumed
            if not (closes if markers[i] == "end" else ahead):
                break
        index += [*range(at, at + need), q + i]
        at, out = at + need, place + 1
    index += range(at, q)
    return index, Cursor(start + len(index), full_len)


def splice(x_bsXX: Tensor, rows_nXX: Tensor, index: Sequence[int]) -> Tensor:
    """Tokens and rows in the order of `index`, as `plan` gives it; the rows are the same for the whole batch."""
    if len(index) == x_bsXX.shape[1]:
        return x_bsXX
    rows_bnXX = rows_nXX.to(x_bsXX.dtype).expand(len(x_bsXX), *rows_nXX.shape)
    return torch.cat([x_bsXX, rows_bnXX], 1)[:, torch.tensor(index, dtype=torch.int64, device=x_bsXX.device)]


def splice_flags(flags_bs: Tensor | None, index: Sequence[int]) -> Tensor | None:
    """A mask in the order of `index`; rows are always there."""
    if flags_bs is None:
        return None
    count = max([flags_bs.shape[1], *(i + 1 for i in index)]) - flags_bs.shape[1]
    return splice(flags_bs, torch.ones(count, dtype=torch.bool, device=flags_bs.device), index)


class Splice(NamedTuple):
    """A level's rows, and the order that `plan` gives tokens and rows."""

    rows_nd: Tensor
    places: tuple[int, ...]


def plan_levels(
    levels: Sequence[tuple[int, ClassTokens]], cache: Any, q: int, prime: bool
) -> tuple[Any, dict[int, list[Splice]], tuple[Cursor, ...] | None]:
    """The cache inside `cache`; what each level inserts, by the number that comes with it, when `q` tokens reach the
    first; and the cursors then. Where the cache has none, the tokens are the whole sequence."""
    has_cursors = isinstance(cache, ClassCache)
    inner, cursors = cache if has_cursors else (cache, fresh_cursors(levels, q))
    if len(cursors) != len(levels):
        raise ValueError(
            f"the cache has {len(cursors)} cursors, expected one for each of {len(levels)} levels of class latents; "
            "fresh_cache makes them"
        )
    splices: dict[int, list[Splice]] = {}
    after = []
    for (number, level), cursor in zip(levels, cursors, strict=True):
        places, cursor = plan(level.markers, cursor, q, prime)
        splices.setdefault(number, []).append(Splice(level.weight, tuple(places)))
        after.append(cursor)
        q = len(places)
    return inner, splices, tuple(after) if has_cursors else None
