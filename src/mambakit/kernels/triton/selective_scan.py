"""Mamba-1's selective scan with what stands around it, and all its gradients from the inputs alone."""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.triton.backend import implement
from mambakit.kernels.triton.launch import launch, parts, power_of_two
from mambakit.kernels.triton.tiles import why_refused
from mambakit.ops.selective_scan import SELECTIVE_SCAN

CHUNK = 32
"""Tokens whose states the backward holds at a time; between chunks it keeps one."""
ELEMENTS = 1024
"""State entries of a program."""
LARGEST = 256
"""Longest state axis."""


class Inputs:
    """What both kernels read, laid out as they read it."""

    def __init__(self, *inputs: Any):
        *tensors, softplus = inputs
        self.before = [t.contiguous() for t in tensors[:5]]
        self.state, *self.after = (None if t is None else t.contiguous() for t in tensors[5:])
        self.x, _, self.a, b_bsgr, _ = self.before
        (self.b, self.s, i), (g, r) = self.x.shape, b_bsgr.shape[2:]
        self.chunks = parts(self.s, CHUNK)
        block = max(power_of_two(r), 16)
        channels = max(min(ELEMENTS // block, power_of_two(i // g)), 4)
        self.parts = parts(i // g, channels)
        self.programs = self.b * g * self.parts
        self.sizes = {"G": g, "CHANNELS": i // g, "R": r, "SOFTPLUS": softplus, "CT": CHUNK, "BI": channels}
        self.sizes |= {"BR": block}

    def scan(self, y: Tensor | None, last: Tensor | None, kept: Tensor | None) -> None:
        tensors = (*self.before, self.state, *self.after, y, last, kept)
        # With four warps the states of chunks spill on sm_100.
        warps = 4 if kept is None else 8
        launch("selective_scan.scan", self.programs, *tensors, self.s, self.chunks, warps=warps, **self.sizes)


def scan(*inputs: Any) -> list[Tensor]:
    given = Inputs(*inputs)
    y_bsi, last_bir = torch.empty_like(given.x), given.a.new_empty(given.b, *given.a.shape)
    given.scan(y_bsi, last_bir, None)
    return [y_bsi, last_bir]


def scan_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor | None]:
    *inputs, _ = inputs_and_needs
    given = Inputs(*inputs)
    x, dt, a, b, _ = given.before
    z = given.after[1]
    dy, d_last = (grad.contiguous() for grad in grads)
    wide = {"dtype": torch.float32, "device": x.device}
    kept = torch.empty(given.b, given.chunks, *a.shape, **wide)
    given.scan(None, None, kept)
    d_x, d_dt, d_z = (None if t is None else torch.empty_like(t) for t in (x, dt, z))
    d_a, d_state = (torch.empty(given.b, *a.shape, **wide) for _ in range(2))
    d_b, d_c = (torch.empty(given.parts, *b.shape, **wide) for _ in range(2))
    d_skip, d_bias = (torch.empty(given.b, x.shape[2], **wide) for _ in range(2))
    scratch = torch.empty(given.programs, CHUNK + 1, given.sizes["BI"], given.sizes["BR"], **wide)
    read = (*given.before, *given.after, kept, dy, d_last, scratch)
    written = (d_x, d_dt, d_a, d_b, d_c, d_state, d_skip, d_z, d_bias)
    lengths = (given.s, given.chunks)
    launch("selective_scan.scan_backward", given.programs, *read, *written, *lengths, warps=8, **given.sizes)
    every = (d_x, d_dt, d_a.sum(0), d_b.sum(0), d_c.sum(0), d_state, d_skip.sum(0), d_z, d_bias.sum(0))
    return [None if d is None or t is None else d.to(t.dtype) for d, t in zip(every, inputs, strict=False)]


def why_not(x_bsi: Tensor, dt_bsi: Tensor, a_ir: Tensor, *_: Any) -> str | None:
    r = a_ir.shape[1]
    if r > LARGEST:
        return f"it got states of {r}, at most {LARGEST} fit"
    return why_refused(f"selective_scan {r}", x_bsi.dtype, x_bsi.device)


implement(SELECTIVE_SCAN, scan, scan_backward, why_not)
