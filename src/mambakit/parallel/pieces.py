"""What a rank has of a tensor: views of its own memory, and where each lies in the whole."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mambakit.blocks.shares import Parts


class Box(NamedTuple):
    """A part of a tensor; those of two ranks are the same part or have nothing in common."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        for axis, (start, length) in enumerate(zip(self.start, self.shape, strict=True)):
            whole = whole.narrow(axis, start, length)
        return whole


class Pieces(NamedTuple):
    shape: tuple[int, ...]
    """Of the whole."""
    boxes: tuple[Box, ...]
    """Empty ones are left out, so a rank may have none."""
    own: tuple[Tensor, ...]
    """What lies there, as views of this rank's memory."""

    def rows(self, first: int, count: int) -> "Pieces":
        """Of so many rows, which are the whole then."""
        boxes, own = [], []
        for box, tensor in zip(self.boxes, self.own, strict=True):
            start, end = max(box.start[0], first), min(box.start[0] + box.shape[0], first + count)
            if start < end:
                boxes.append(Box((start - first, *box.start[1:]), (end - start, *box.shape[1:])))
                own.append(tensor[start - box.start[0] : end - box.start[0]])
        return Pieces((count, *self.shape[1:]), tuple(boxes), tuple(own))

    def moved(self, axis: int, by: int, shape: tuple[int, ...]) -> "Pieces":
        """As a part of something larger, `by` entries from its start."""
        ahead = [by if at == axis else 0 for at in range(len(shape))]
        boxes = (Box(tuple(map(sum, zip(box.start, ahead, strict=True))), box.shape) for box in self.boxes)
        return Pieces(shape, tuple(boxes), self.own)


class Layout:
    """Which tensors are parts of one, in a model that `tensor_parallel` has divided."""

    def __init__(self, model: nn.Module):
        self._parts = [
            (path, parts.split.axis, [(f"{path}.{part.name}", part.size) for part in parts.split.parts])
            for path, parts in model.named_modules()
            if isinstance(parts, Parts)
        ]

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, Pieces]:
        """By the names that parameters have in a whole model, what this rank has of tensors by their names now."""
        found = {name: pieces_of(tensor) for name, tensor in tensors.items()}
        for path, axis, parts in self._parts:
            own = [(found.pop(name), size) for name, size in parts if name in found]
            if not own:
                continue
            shape = list(own[0][0].shape)
            shape[axis] = sum(size for _, size in own)
            boxes, tensors_of, start = (), (), 0
            for pieces, size in own:
                moved = pieces.moved(axis, start, tuple(shape))
                boxes, tensors_of, start = (*boxes, *moved.boxes), (*tensors_of, *moved.own), start + size
            found[path] = Pieces(tuple(shape), boxes, tensors_of)
        return found


def pieces_of(tensor: Tensor) -> Pieces:
    """All of an ordinary tensor, and what a DTensor has on this rank."""
    shape, start = tuple(tensor.shape), (0,) * tensor.dim()
    own = tensor.detach()
    if isinstance(own, DTensor):
        [chunk] = own.__create_chunk_list__()  # what torch's own checkpoints go by
        start, own = tuple(chunk.offsets), own.to_local()
    if not own.numel():
        return Pieces(shape, (), ())
    return Pieces(shape, (Box(start, tuple(own.shape)),), (own,))


def put_together(shape: Sequence[int], parts: Sequence[tuple[Box, Tensor]]) -> Tensor:
    """The whole of what ranks have."""
    whole = torch.empty(tuple(shape), dtype=parts[0][1].dtype, device=parts[0][1].device)
    for box, tensor in parts:
        box.of(whole).copy_(tensor)
    return whole
