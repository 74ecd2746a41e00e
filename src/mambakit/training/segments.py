"""Back-propagation through time over sequences too long to keep every activation of.

A block, or any module with the same contract, runs over the sequence segment by segment and passes its cache on.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mambakit.arguments import check_flag
from mambakit.blocks.caches import clone, detach
from mambakit.ops.shapes import check_tensors
from mambakit.parallel.context import splits_sequences


def run_in_segments(
    block: nn.Module,
    x_bsd: Tensor,
    cache: Any = None,
    *,
    segment_len: int,
    truncated: bool = False,
    mask_bs: Tensor | None = None,
    reset_bs: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """`block(x_bsd, cache, ...)` with the activations of one segment at a time; values and gradients are the same.

    Between forward and backward only the inputs and the caches between segments are kept; the backward computes each
    segment again, from the last to the first. `truncated=True` stops gradients between segments: each output then
    reaches back to the start of its segment, the first segment's also to `cache`. `options` reach the block unchanged.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> y_bsd, cache = mk.run_in_segments(block, torch.randn(1, 1000, 64), segment_len=250)
        >>> y_bsd.square().mean().backward()
    """
    check_whole(block)
    check_flag("truncated", truncated)
    outputs = []
    for piece in _cut(x_bsd, segment_len, mask_bs, reset_bs, options):
        if truncated and outputs:
            cache = detach(cache)
        y_bsd, cache = checkpoint(_run, block, piece, cache, use_reentrant=False)
        outputs.append(y_bsd)
    return torch.cat(outputs, 1), cache


def segments(
    block: nn.Module,
    x_bsd: Tensor,
    cache: Any = None,
    *,
    segment_len: int,
    mask_bs: Tensor | None = None,
    reset_bs: Tensor | None = None,
    **options: Any,
) -> Iterator[tuple[slice, Tensor, Any]]:
    """Run the block a segment at a time, for losses that are computed and gone back through one by one.

    Yields which tokens these are, their outputs, and the cache after them. The cache is detached, so gradients reach
    back to the start of the segment only and nothing of an earlier one is kept. An `x_bsd` that was itself computed
    with gradients would be gone back through once per segment; let the block compute it instead.
    """
    check_whole(block)
    pieces = _cut(x_bsd, segment_len, mask_bs, reset_bs, options)

    def run(cache: Any) -> Iterator[tuple[slice, Tensor, Any]]:
        for piece in pieces:
            y_bsd, cache = _run(block, piece, cache)
            cache = detach(cache)
            yield piece.where, y_bsd, cache
            del y_bsd  # and its graph, before the next one is made

    return run(cache)


def check_whole(block: nn.Module) -> None:
    """ValueError for a model whose ranks have other shares of a sequence: segments of each are not its next tokens."""
    if splits_sequences(block):
        raise ValueError(
            "segments are parts of whole sequences, and this model is context parallel; call it with a part after the "
            "other and the cache, every rank with its share of each part"
        )


class _Piece(NamedTuple):
    """What a block is called with for one segment."""

    where: slice
    x_bsd: Tensor
    options: dict[str, Any]


def _cut(
    x_bsd: Tensor, segment_len: int, mask_bs: Tensor | None, reset_bs: Tensor | None, options: dict[str, Any]
) -> list[_Piece]:
    if type(segment_len) is not int or segment_len < 1:
        raise ValueError(f"segment_len is {segment_len!r}, expected a positive integer")
    if options.get("cu_seqlens") is not None:
        raise ValueError("packed sequences (cu_seqlens) cannot be cut into segments; name their starts in reset_bs")
    check_tensors({"x_bsd": x_bsd})
    if x_bsd.dim() < 2:
        raise ValueError(f"x_bsd needs a batch and a sequence, got shape {tuple(x_bsd.shape)}")
    flags = {name: t for name, t in {"mask_bs": mask_bs, "reset_bs": reset_bs}.items() if t is not None}
    check_tensors(flags)
    for name, flags_bs in flags.items():
        if flags_bs.shape != x_bsd.shape[:2]:
            raise ValueError(
                f"{name} has shape {tuple(flags_bs.shape)}, expected {tuple(x_bsd.shape[:2])} as x_bsd has"
            )
    pieces, start = [], 0
    # `split`, not slices: its backward joins the gradients of all pieces once instead of padding each to full length.
    for x_bld in x_bsd.split(segment_len, 1) if x_bsd.shape[1] > segment_len else (x_bsd,):
        where = slice(start, start + x_bld.shape[1])
        pieces.append(_Piece(where, x_bld, {name: t[:, where] for name, t in flags.items()} | options))
        start = where.stop
    return pieces


def _run(block: nn.Module, piece: _Piece, cache: Any) -> tuple[Tensor, Any]:
    y_bsd, cache = block(piece.x_bsd, cache, **piece.options)
    # A carried tensor may be a view of a whole segment's activations, such as their last token, and keep all of them.
    return y_bsd, clone(cache)
