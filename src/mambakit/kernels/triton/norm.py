"""Gated RMSNorm with skip and ranks, `FINISH`: outputs, and all gradients from the inputs alone."""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.triton.backend import implement
from mambakit.kernels.triton.launch import launch, parts, power_of_two
from mambakit.kernels.triton.tiles import why_refused
from mambakit.ops.norm import FINISH

WIDEST = 16_384
"""Most channels of a group: a program holds one."""
WIDE = 1536
ROWS = 32
"""Rows whose shares of the parameters' gradients one program adds up."""


class Inputs:
    """What both kernels read, laid out as they read it."""

    def __init__(self, y_Nmi: Tensor, *others: Any):
        *tensors, group, order, eps = others
        x_Ni, skip_i, z_Ni, *rest = tensors
        self.y, self.x, self.z = in_rows(y_Nmi), *(None if t is None else in_rows(t) for t in (x_Ni, z_Ni))
        skip, *rest = (None if t is None else t.contiguous() for t in (skip_i, *rest))
        self.tensors = (self.y, self.x, skip, self.z, *rest)
        self.strides = [0 if t is None else t.stride(0) for t in (self.y, self.x, self.z)]
        self.n, self.m, self.i = y_Nmi.shape
        self.eps, self.groups = eps, self.i // group
        block = power_of_two(group)
        self.sizes = {"WIDTH": self.i, "GROUP": group, "M": self.m, "ORDER": order, "BLOCK": block}
        self.warps = 8 if block > 4096 else 4


def in_rows(x: Tensor) -> Tensor:
    """`x` itself if each of its rows lies in one piece; the rows may lie anywhere."""
    in_pieces = x.stride(-1) == 1 and (x.dim() == 2 or x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if in_pieces else x.contiguous()


def finish(*inputs: Any) -> list[Tensor]:
    given = Inputs(*inputs)
    out_Ni = given.y.new_empty(given.n, given.i)
    numbers = (*given.strides, given.eps)
    launch("norm.finish", given.n * given.groups, *given.tensors, out_Ni, *numbers, warps=given.warps, **given.sizes)
    return [out_Ni]


def finish_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor | None]:
    *inputs, _ = inputs_and_needs
    given, (n, m, i) = Inputs(*inputs), inputs[0].shape
    blocks = parts(n, ROWS)
    d_y_Nmi = inputs[0].new_empty(n, m, i)
    # Each rank has its own share of what they read in common.
    shares = [
        None if t is None else t.new_empty(n, m, i, dtype=t.dtype if m == 1 else torch.float32)
        for t in (given.x, given.z)
    ]
    sums = d_y_Nmi.new_empty(blocks, 5, m, i, dtype=torch.float32)
    written = (grads[0].contiguous(), d_y_Nmi, *shares, sums)
    numbers = (*given.strides, n, blocks, given.eps)
    programs = blocks * given.groups * m
    sizes = {**given.sizes, "ROWS": ROWS}
    launch("norm.finish_backward", programs, *given.tensors, *written, *numbers, warps=given.warps, **sizes)
    d_x_Ni, d_z_Ni = (None if t is None else t[:, 0] if m == 1 else t.sum(1) for t in shares)
    d_skip, d_weight, *d_mimo = sums.sum(0).unbind(0)
    # Copies, because an operator may not return views of one tensor.
    found = (d_y_Nmi, d_x_Ni, d_skip.sum(0), d_z_Ni, *(d.clone() for d in d_mimo), d_weight.sum(0))
    return [None if d is None or t is None else d.to(t.dtype) for d, t in zip(found, inputs, strict=False)]


def why_not(*tensors: Any) -> str | None:
    x = tensors[0]
    width = x.shape[-1] if x.dim() else 0
    if width > WIDEST:
        return f"it got {width} channels, at most {WIDEST} fit"
    # The gate's group of 1536 channels stands for all wide ones.
    if width < WIDE or not torch.is_grad_enabled():
        return None
    return why_refused(f"finish {WIDE}, ranks 1, backward", x.dtype, x.device)


implement(FINISH, finish, finish_backward, why_not)
