"""Token ids as callers may give them, checked and brought into one form."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mambakit.arguments import shown
from mambakit.ops.shapes import INTEGERS, check_boolean, check_readable

Ids = Tensor | Sequence[int] | Sequence[Tensor | Sequence[int]]
"""Token ids of one prompt, or of a batch of them."""
Stop = int | Sequence[int | Sequence[int]]
"""An id, or a list of ids and of sequences of ids."""


def read_prompts(ids: Ids, mask_bs: Tensor | None, vocab_size: int) -> list[list[int]]:
    """The prompts of a call; ValueError where there is none, or one that a model of `vocab_size` cannot read."""
    if isinstance(ids, str | bytes):
        raise ValueError("ids is text, expected token ids, which a tokenizer makes of it")
    if isinstance(ids, Tensor):
        check_readable("ids", ids)
    given = one_by_one(ids) if mask_bs is None else without_padding(ids, mask_bs)
    if not given:
        raise ValueError("ids holds no prompts")
    return [read_ids(f"prompt {row}", prompt, vocab_size).tolist() for row, prompt in enumerate(given)]


def one_by_one(ids: Ids) -> Sequence[Any]:
    if isinstance(ids, Tensor):
        if ids.dim() not in (1, 2):
            raise ValueError(f"ids has {ids.dim()} axes, expected [batch, s], [s] or a list of prompts")
        return [ids] if ids.dim() == 1 else list(ids)
    if not isinstance(ids, Sequence):
        raise ValueError(f"ids is a {type(ids).__name__}, expected a tensor, a list of token ids or a list of prompts")
    return [ids] if ids and not isinstance(ids[0], Tensor | Sequence) else ids


def without_padding(ids_bs: Ids, mask_bs: Tensor) -> list[Tensor]:
    check_readable("mask_bs", mask_bs)
    if not isinstance(ids_bs, Tensor) or ids_bs.dim() != 2 or mask_bs.shape != ids_bs.shape:
        given = f"of shape {tuple(ids_bs.shape)}" if isinstance(ids_bs, Tensor) else "in a list"
        raise ValueError(f"mask_bs of shape {tuple(mask_bs.shape)} needs ids of the same two axes, got ids {given}")
    check_boolean("mask_bs", mask_bs)
    return [row_s[mask_s.to(row_s.device)] for row_s, mask_s in zip(ids_bs, mask_bs.bool(), strict=True)]


def read_stops(stop: Stop | None, vocab_size: int) -> list[list[int]]:
    """Every stop as a sequence of ids."""
    if stop is not None and not isinstance(stop, int | Sequence):
        raise ValueError(f"stop is a {type(stop).__name__}, expected an id, or a list of ids and of sequences of ids")
    entries = [] if stop is None else [stop] if isinstance(stop, int) else stop
    sequences = [[entry] if isinstance(entry, int) else entry for entry in entries]
    return [read_ids(f"stop {place}", entry, vocab_size).tolist() for place, entry in enumerate(sequences)]


def read_ids(name: str, ids: Tensor | Sequence[int], vocab_size: int) -> Tensor:
    try:
        ids_s = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is {shown(ids)}, expected integer token ids: {error}") from error
    check_readable(name, ids_s)  # that of a list too: in a fake mode it is fake
    if ids_s.dim() != 1 or len(ids_s) == 0:
        raise ValueError(f"{name} has shape {tuple(ids_s.shape)}, expected a sequence of at least one token id")
    if ids_s.dtype not in INTEGERS:
        raise ValueError(f"{name} is of {ids_s.dtype}, expected integer token ids")
    low, high = int(ids_s.min()), int(ids_s.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} has ids from {low} to {high}, but this model's are 0 to {vocab_size - 1}")
    return ids_s.long()
