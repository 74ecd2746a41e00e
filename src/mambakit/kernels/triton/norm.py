"""Gated RMSNorm with skip and ranks, `FINISH`: outputs, and all gradients from the inputs alone."""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.triton.backend import implement
from mambakit.kernels.triton.launch import launch, most_programs, parts, power_of_two
from mambakit.kernels.triton.tiles import why_refused
from mambakit.ops.norm import FINISH, NO_NORM

BLOCK = 2048
"""Most channels at a time: a wider group is gone through in parts."""
ROWS = 32
"""Rows whose shares of the parameters' gradients one program adds up."""
GATED = ((1536, 1), (5120, 1), (64, 4))
"""Groups and ranks that the compile gate takes for all: in one part, in several, and of one head."""


class Inputs:
    """What the kernels read, laid out as they read it."""

    def __init__(self, y_Nmi: Tensor, *others: Any):
        *tensors, group, order, eps = others
        x_Ni, skip_i, z_Ni, *rest = tensors
        self.y, self.x, self.z = in_rows(y_Nmi), *(None if t is None else in_rows(t) for t in (x_Ni, z_Ni))
        self.skip, *self.rest = (None if t is None else t.contiguous() for t in (skip_i, *rest))
        self.tensors = (self.y, self.x, self.skip, self.z, *self.rest)
        self.strides = [0 if t is None else t.stride(0) for t in (self.y, self.x, self.z)]
        self.n, self.m, self.i = y_Nmi.shape
        self.eps, self.groups = eps, self.i // group
        block = min(power_of_two(group), BLOCK)
        self.parts = parts(group, block)
        self.sizes = {"WIDTH": self.i, "GROUP": group, "M": self.m, "ORDER": order, "BLOCK": block}
        self.warps = min(max(block // 128, 1), 8)


def in_rows(x: Tensor) -> Tensor:
    """`x` itself if each of its rows lies in one piece; the rows may lie anywhere."""
    in_pieces = x.stride(-1) == 1 and (x.dim() == 2 or x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if in_pieces else x.contiguous()


def finish(*inputs: Any) -> list[Tensor]:
    given = Inputs(*inputs)
    out_Ni = given.y.new_empty(given.n, given.i)
    numbers, sizes = (*given.strides, given.eps), given.sizes | {"MP": power_of_two(given.m)}
    # Small groups are many: more of them than a device takes at once are several launches.
    rows = max(most_programs(given.warps) // max(given.groups, 1), 1)
    for n in range(0, given.n, rows):
        y, x, z, out = (None if t is None else t[n : n + rows] for t in (given.y, given.x, given.z, out_Ni))
        programs = min(rows, given.n - n) * given.groups
        tensors = (y, x, given.skip, z, *given.rest, out)
        launch("norm.finish", programs, *tensors, *numbers, warps=given.warps, **sizes)
    return [out_Ni]


def finish_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor | None]:
    *inputs, _ = inputs_and_needs
    given, (n, m, i) = Inputs(*inputs), inputs[0].shape
    blocks, d_out, options = parts(n, ROWS), grads[0].contiguous(), given.sizes | {"warps": given.warps}
    means = None
    if given.parts > 1 and given.sizes["ORDER"] != NO_NORM:
        means = d_out.new_empty(n, m, given.groups, 2, dtype=torch.float32)
        numbers = (*given.strides, given.eps)
        launch("norm.finish_means", n * m * given.groups, *given.tensors, d_out, means, *numbers, **options)
    d_y_Nmi = inputs[0].new_empty(n, m, i)
    # Each rank has its own share of what they read in common.
    shares = [
        None if t is None else t.new_empty(n, m, i, dtype=t.dtype if m == 1 else torch.float32)
        for t in (given.x, given.z)
    ]
    sums = d_y_Nmi.new_empty(blocks, 5, m, i, dtype=torch.float32)
    written, numbers = (d_out, means, d_y_Nmi, *shares, sums), (*given.strides, n, given.eps)
    programs = blocks * given.groups * given.parts * m
    launch("norm.finish_backward", programs, *given.tensors, *written, *numbers, ROWS=ROWS, **options)
    d_x_Ni, d_z_Ni = (None if t is None else t[:, 0] if m == 1 else t.sum(1) for t in shares)
    d_skip, d_weight, *d_mimo = sums.sum(0).unbind(0)
    # Copies, because an operator may not return views of one tensor.
    found = (d_y_Nmi, d_x_Ni, d_skip.sum(0), d_z_Ni, *(d.clone() for d in d_mimo), d_weight.sum(0))
    return [None if d is None or t is None else d.to(t.dtype) for d, t in zip(found, inputs, strict=False)]


def why_not(y_Nmi: Tensor, *_: Any) -> str | None:
    shapes = [f"finish {group}, ranks {ranks}" for group, ranks in GATED]
    return next(filter(None, (why_refused(shape, y_Nmi.dtype, y_Nmi.device) for shape in shapes)), None)


implement(FINISH, finish, finish_backward, why_not)
