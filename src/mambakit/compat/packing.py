"""Packed sequences in the official words: `seq_idx` names each token's, `cu_seqlens` their bounds."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.blocks.block import Layout, check_packing, lay_out
from mambakit.ops.shapes import INTEGERS, check_integers, check_readable, check_tensors


def segments_of(seq_idx: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Ids that never decrease. The official ones may: only where they change counts."""
    if seq_idx is None:
        return None
    check_tensors({"seq_idx": seq_idx})
    if tuple(seq_idx.shape) != (batch, length):
        raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)}, expected {(batch, length)}: one id per token")
    check_integers("seq_idx", seq_idx, "integer ids")
    if length < 2:
        return seq_idx.long()
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0)).cumsum(1)


def hide_padding(y_bsX: Tensor, seq_idx: Tensor | None) -> Tensor:
    """Zero where an id is negative, which officially is no sequence."""
    return y_bsX if seq_idx is None else y_bsX.masked_fill((seq_idx < 0)[..., None], 0)


def end_of(cu_seqlens: Tensor, length: int) -> int:
    """Where the last packed sequence ends: before `length` if padding follows it."""
    check_readable("cu_seqlens", cu_seqlens)
    readable = cu_seqlens.dim() == 1 and len(cu_seqlens) > 1 and cu_seqlens.dtype in INTEGERS
    end = int(cu_seqlens[-1]) if readable else length
    return end if 0 <= end < length else length


def packed(x_bsX: Tensor, cu_seqlens: Tensor, seq_idx: Tensor | None = None) -> Layout:
    """Where the sequences of a batch of one lie in rows of their own; tokens after the last one lie in none.

    `seq_idx`, if given, has to say the same of all tokens before.
    """
    b, s = x_bsX.shape[:2]
    segments_bs = segments_of(seq_idx, b, s)
    s = end_of(cu_seqlens, s)
    rows = check_packing(cu_seqlens, x_bsX[:, :s])
    if segments_bs is not None and s > 1:
        starts_s = torch.zeros(s + 1, dtype=torch.bool, device=x_bsX.device)
        starts_s[cu_seqlens.to(x_bsX.device).long()] = True
        if not torch.equal(segments_bs[0, :s].diff() > 0, starts_s[1:-1]):
            raise ValueError("seq_idx and cu_seqlens disagree about where sequences start")
    return lay_out(None, cu_seqlens, b, s, rows, x_bsX.device)


def to_rows(layout: Layout, x_bsX: Tensor) -> Tensor:
    """A row per sequence, zero beyond its tokens; any axes after batch and time."""
    return layout.gather(x_bsX.flatten(2)).unflatten(2, x_bsX.shape[2:])


def from_rows(layout: Layout, y_rlX: Tensor, length: int) -> Tensor:
    """Back to a batch of one, zero after the last sequence."""
    end = len(layout.back_n)
    y_1sX = layout.scatter(y_rlX.flatten(2), 1, end)
    y_1sX = y_1sX if end == length else F.pad(y_1sX, (0, 0, 0, length - end))
    return y_1sX.unflatten(2, y_rlX.shape[2:])


def last_in_rows(layout: Layout, x_rlX: Tensor) -> Tensor:
    """The entry of each row's last token, zero for a row without any."""
    last_r = (layout.lengths_r - 1).clamp(min=0)
    x_rX = x_rlX[torch.arange(len(last_r), device=last_r.device), last_r]
    return x_rX * (layout.lengths_r > 0).view(-1, *[1] * (x_rX.dim() - 1))
