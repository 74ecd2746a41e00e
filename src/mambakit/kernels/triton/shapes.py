"""What the compile gate compiles: the launches of every operation for the sizes of public models."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.kernels.triton import causal_conv, fused_step, mamba3_prepare, norm, selective_scan, ssd
from mambakit.kernels.triton.backend import EXACT
from mambakit.kernels.triton.launch import Launch, recording
from mambakit.ops.norm import GATE_FIRST, NORM_FIRST

HEADS = tuple((p, r, m) for m in (1, 4) for p in (64, 128) for r in (128, 64, 16))
"""Channels, state and ranks of a head: Mamba-2 and Mamba-3 as published, and what lies around them."""
WIDTH, TOKENS = 1536, 256


class Shape(NamedTuple):
    name: str
    """Operation and sizes."""
    dtype: torch.dtype
    launches: list[Launch]


def recorded(call: Callable[..., Any], *inputs: Any) -> list[Launch]:
    with recording() as log:
        call(*inputs)
    return log


def shapes(dtype: torch.dtype) -> Iterator[Shape]:
    """Tensors without numbers; with all that is optional, which takes most room."""

    def data(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    def wide(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device="meta")

    segments, needs = torch.empty((2, TOKENS), dtype=torch.int64, device="meta"), [True] * 9

    def core(p: int, r: int, m: int) -> Iterator[Shape]:
        h = WIDTH // p
        v, b = data(2, TOKENS, m, h, p), data(2, TOKENS, m, 1, r)
        inputs = (v, b, b, *(wide(2, TOKENS, h) for _ in range(3)), wide(2, h, p, r), segments, 0)
        yield Shape(f"ssd {p}x{r}, ranks {m}", dtype, recorded(ssd.forward, EXACT, *inputs))
        grads = [v, wide(2, h, p, r)]
        backward = recorded(ssd.backward, EXACT, grads, *inputs, needs)
        yield Shape(f"ssd {p}x{r}, ranks {m}, backward", dtype, backward)

    x = data(2, TOKENS, WIDTH)
    conv = (x, data(WIDTH, 4), data(WIDTH), data(2, WIDTH, 4), segments, None, [WIDTH], True)
    yield Shape("causal_conv", dtype, recorded(causal_conv.convolve, *conv))
    yield Shape("causal_conv, backward", dtype, recorded(causal_conv.convolve_backward, [x, conv[3]], *conv, needs))
    for group, m in norm.GATED:
        width, order = (group, GATE_FIRST) if m == 1 else (WIDTH, NORM_FIRST)
        rows, ranks = data(TOKENS, width), data(m, width) if m > 1 else None
        finish = (data(TOKENS, m, width), rows, data(width), rows, ranks, ranks, ranks, data(width), group, order, 1e-5)
        yield Shape(f"finish {group}, ranks {m}", dtype, recorded(norm.finish, *finish))
        yield Shape(
            f"finish {group}, ranks {m}, backward", dtype, recorded(norm.finish_backward, [rows], *finish, needs)
        )
    for r, m in dict.fromkeys((r, m) for _, r, m in HEADS):
        b, h = data(2, TOKENS, m, 1, r), 24
        angles = (data(2, TOKENS, r // 4), wide(2, TOKENS, h), wide(2, h, r // 4), segments, 1e-5, 1.0, True)
        prepare = (b, b, data(r), data(r), data(h, m, r), data(h, m, r), *angles)
        out = data(2, TOKENS, m, h, r)
        yield Shape(f"mamba3_prepare {r}, ranks {m}", dtype, recorded(mamba3_prepare.prepare, *prepare))
        backward = recorded(mamba3_prepare.prepare_backward, [out, out, angles[2]], *prepare, needs)
        yield Shape(f"mamba3_prepare {r}, ranks {m}, backward", dtype, backward)
    fresh = torch.empty((2, TOKENS), dtype=torch.bool, device="meta")
    bc = data(2, TOKENS, 1, 16)
    scan = (x, x, wide(WIDTH, 16), bc, bc, wide(2, WIDTH, 16), wide(WIDTH), x, wide(WIDTH), fresh, True)
    yield Shape("selective_scan 16", dtype, recorded(selective_scan.scan, *scan))
    backward = recorded(selective_scan.scan_backward, [x, wide(2, WIDTH, 16)], *scan, needs)
    yield Shape("selective_scan 16, backward", dtype, backward)
    if dtype == torch.float32:
        yield from steps(wide)
    for head in HEADS:
        yield from core(*head)


def steps(wide: Callable[..., Tensor]) -> Iterator[Shape]:
    """Which are for float32 only."""
    dtype = torch.float32
    conv_step = (wide(2, 2 * WIDTH), wide(2, WIDTH, 4), wide(WIDTH, 4), wide(WIDTH), None)
    yield Shape("mamba1_step_conv", dtype, recorded(fused_step.mamba1_step_conv, *conv_step))
    row = wide(2, WIDTH)
    step = (wide(2, 2 * WIDTH), row, row, wide(2, 48 + 32), wide(2, WIDTH, 16), wide(WIDTH, 16), wide(WIDTH), None)
    yield Shape("mamba1_step 16", dtype, recorded(fused_step.mamba1_step, *step))
    for p, r, m in HEADS:
        h, kept = WIDTH // p, r // 4
        v = WIDTH + 2 * r
        step = (wide(2, WIDTH + v + h), wide(2, v, 4), wide(2, h, p, r), wide(v, 4), wide(v), wide(h), wide(h), wide(h))
        if m == 1:
            step = (*step, wide(WIDTH), None, None, WIDTH, 1e-5, 0.0, 1.0, False)
            yield Shape(f"mamba2_step {p}x{r}", dtype, recorded(fused_step.mamba2_step, *step))
        projected = wide(2, 2 * WIDTH + 2 * m * r + 3 * h + kept)
        carried = (wide(2, h, p, r), wide(2, m, h, r), wide(2, h, p), wide(2, h, kept))
        mimo = [wide(h, m, p) if m > 1 else None] * 3
        rest = (wide(h), wide(r), wide(r), wide(h, m, r), wide(h, m, r), *mimo, wide(h), wide(WIDTH), None, None)
        numbers = (kept, False, False, True, 1e-5, 0.0, 1.0, 1e-4, 1.0)
        step = recorded(fused_step.mamba3_step, projected, *carried, *rest, *numbers)
        yield Shape(f"mamba3_step {p}x{r}, ranks {m}", dtype, step)
