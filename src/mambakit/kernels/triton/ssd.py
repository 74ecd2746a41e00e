"""The SSD core: any ranks, groups, weights, states, segments and length; the backward keeps the inputs only."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.triton.backend import MODES, Precision
from mambakit.kernels.triton.launch import launch, parts, power_of_two
from mambakit.kernels.triton.tiles import Tiles, tiles_for, why_refused
from mambakit.ops.ssd import SSD

RANKS = 16
"""Most ranks of a token, which share a tile."""


class Inputs:
    """What all kernels read, laid out as they read it, and the sizes they are compiled for."""

    def __init__(self, pass_: str, precision: Precision, *inputs: Any):
        v_bsmhp, b_bsmgr, c_bsmgr, *weights, state_bhpr, segments_bs, chunk_len = inputs
        self.v, self.b, self.c = (t.contiguous() for t in (v_bsmhp, b_bsmgr, c_bsmgr))
        self.da, self.w_now, self.w_later = (t.to(torch.float32).contiguous() for t in weights)
        self.state = state_bhpr.to(torch.float32).contiguous()
        self.segments = None if segments_bs is None else segments_bs.contiguous()
        b, s, m, h, p = v_bsmhp.shape
        g, r = b_bsmgr.shape[3:]
        wide = max((t.dtype for t in (v_bsmhp, b_bsmgr, c_bsmgr)), key=precision.inputs.__getitem__)
        tiles = tiles_for(pass_, precision.inputs[wide], v_bsmhp, b_bsmgr)
        self.sizes = {"H": h, "G": g, "P": p, "R": r, "M": m, "MP": power_of_two(m)}
        self.sizes |= cut(tiles, self.sizes, chunk_len)
        self.batch, self.length = b, s
        self.chunks = parts(s, self.sizes["BT"] // self.sizes["MP"])
        self.precision = precision
        self.options = {"warps": tiles.warps, "stages": tiles.stages}
        self.sizes |= {"SEGMENTS": segments_bs is not None, "IN": precision.inputs[wide], "MID": precision.computed}

    def walk(self, x: Tensor, k: Tensor, first: Tensor, back: bool) -> tuple[Tensor, Tensor]:
        """The states between chunks and the one at the other end."""
        size = self.sizes
        between = x.new_empty(self.batch, self.chunks, *self.state.shape[1:], dtype=self.precision.states)
        last = torch.empty_like(self.state)
        programs = self.batch * size["H"] * parts(size["P"], size["BP"]) * parts(size["R"], size["BR"])
        tensors = (x, k, self.da, self.w_later, self.segments, first, between, last)
        launch("ssd.walk_states", programs, *tensors, self.length, self.chunks, BACK=back, **size, **self.options)
        return between, last

    def run(self, name: str, programs: int, *more: Tensor) -> None:
        shared = (self.v, self.b, self.c, self.da, self.w_now, self.w_later, self.segments)
        lengths = (self.length, self.chunks)
        launch(name, programs * self.batch * self.chunks, *shared, *more, *lengths, **self.sizes, **self.options)


def cut(tiles: Tiles, size: dict[str, Any], chunk_len: int = 0) -> dict[str, int]:
    """The tiles of a call: no larger than what they are to hold, no smaller than a product's operands may be."""
    ranks = size["MP"]
    rows = min(max(power_of_two(chunk_len * ranks), 16), tiles.BT) if chunk_len else max(tiles.BT, ranks)
    return {"BT": rows} | {
        name: min(max(power_of_two(size[name[1]]), 16), most) for name, most in (("BP", tiles.BP), ("BR", tiles.BR))
    }


def forward(precision: Precision, *inputs: Any) -> list[Tensor]:
    given = Inputs("forward", precision, *inputs)
    entering, last_bhpr = given.walk(given.v, given.b, given.state, back=False)
    y_bsmhp, size = torch.empty_like(given.v), given.sizes
    given.run("ssd.read_chunks", size["H"] * parts(size["P"], size["BP"]), entering, y_bsmhp)
    return [y_bsmhp, last_bhpr]


def backward(precision: Precision, output_grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor]:
    *inputs, _ = inputs_and_needs
    given = Inputs("backward", precision, *inputs)
    size = given.sizes
    d_y, d_last = output_grads[0].contiguous(), output_grads[1].to(torch.float32).contiguous()
    entering, _ = given.walk(given.v, given.b, given.state, back=False)
    leaving, d_state = given.walk(d_y, given.c, d_last, back=True)
    d_v, d_b, d_c, d_da, d_now, d_later = (
        torch.empty_like(t) for t in (given.v, given.b, given.c, given.da, given.w_now, given.w_later)
    )
    between = (d_y, entering, leaving)
    given.run("ssd.grad_values", size["H"], *between, d_v, d_da, d_now, d_later)
    given.run("ssd.grad_keys", size["G"] * parts(size["R"], size["BR"]), *between, d_b, d_c)
    grads = (d_v, d_b, d_c, d_da, d_now, d_later, d_state)
    return [d.to(tensor.dtype) for d, tensor in zip(grads, inputs, strict=False)]


def why_not(v_bsmhp: Tensor, b_bsmgr: Tensor, *others: Tensor | None) -> str | None:
    _, _, m, _, p = v_bsmhp.shape
    if m > RANKS:
        return f"it got {m} ranks, at most {RANKS} share a tile"
    return why_refused(f"ssd {p}x{b_bsmgr.shape[4]}, ranks {m}", v_bsmhp.dtype, v_bsmhp.device)


for backend, mode in MODES:
    SSD.implement(backend, partial(forward, mode), partial(backward, mode), why_not)
