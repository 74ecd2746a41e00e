"""The short convolution with SiLU, window and segments: outputs, and all gradients from the inputs alone."""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.triton.backend import implement
from mambakit.kernels.triton.launch import launch, parts, power_of_two
from mambakit.kernels.triton.tiles import why_refused
from mambakit.ops.causal_conv import CAUSAL_CONV, last_inputs

TAPS = 16
"""Most of them: they are unrolled."""
TOKENS, CHANNELS = 32, 32


class Inputs:
    """What both kernels read, laid out as they read it."""

    def __init__(self, *inputs: Any):
        x_bsv, weight_vk, bias_v, window_bvk, segments_bs, lengths_b, self.widths, silu = inputs
        self.x = x_bsv if x_bsv.stride(2) == 1 or x_bsv.shape[2] < 2 else x_bsv.contiguous()
        others = (weight_vk, bias_v, window_bvk, segments_bs if x_bsv.shape[1] else None, lengths_b)
        others = [None if t is None else t.contiguous() for t in others]
        self.weight, self.bias, self.window, self.segments, self.lengths = others
        (self.b, self.s, self.v), self.k = x_bsv.shape, weight_vk.shape[1]
        unit = 1 if self.x.stride(0) % 16 or self.x.stride(1) % 16 else 16
        self.sizes = {"V": self.v, "K": self.k, "SILU": silu, "BV": min(max(power_of_two(self.v), 16), CHANNELS)}
        self.sizes |= {"UNIT": unit}

    def run(self, kernel: str, tiles: int, rows: int, start: int, width: int, *more: Tensor | None) -> None:
        shared = (self.x, self.weight, self.bias, self.window, self.segments, *more)
        numbers = (self.x.stride(0) // self.sizes["UNIT"], self.x.stride(1), self.s, tiles, start, width)
        programs = self.b * tiles * parts(width, self.sizes["BV"])
        warps = 8 if kernel.endswith("backward") else 4
        launch(kernel, programs, *shared, *numbers, BT=rows, **self.sizes, warps=warps)


def convolve(*inputs: Any) -> list[Tensor]:
    given, start, found = Inputs(*inputs), 0, []
    x_bsv, weight_vk, _, window_bvk, segments_bs, lengths_b, widths, _ = inputs
    for width in widths:
        found.append(x_bsv.new_empty(given.b, given.s, width))
        given.run("causal_conv.convolve", parts(given.s, TOKENS), TOKENS, start, width, found[-1])
        start += width
    return [*found, last_inputs(x_bsv, window_bvk, weight_vk.shape[1], segments_bs, lengths_b)]


def convolve_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor | None]:
    *inputs, _ = inputs_and_needs
    x_bsv, weight_vk, bias_v, window_bvk, *_ = inputs
    *d_parts, d_after_bvk = (grad.contiguous() for grad in grads)
    given, start = Inputs(*inputs), 0
    tiles = parts(given.s + given.k, TOKENS)
    d_x_bsv = x_bsv.new_empty(x_bsv.shape)
    d_window_bvk = None if window_bvk is None else window_bvk.new_empty(window_bvk.shape)
    # One sum per tile, added up in their order: the same bits every time.
    sums = x_bsv.new_empty(given.b * tiles, given.k + 1, given.v, dtype=torch.float32)
    for d_part in d_parts:
        width = d_part.shape[2]
        into = (given.lengths, d_part, d_after_bvk, d_x_bsv, d_window_bvk, sums)
        given.run("causal_conv.convolve_backward", tiles, TOKENS, start, width, *into)
        start += width
    whole = sums.sum(0)
    d_bias_v = None if bias_v is None else whole[-1].to(bias_v.dtype, copy=True)
    return [d_x_bsv, whole[:-1].mT.to(weight_vk.dtype).contiguous(), d_bias_v, d_window_bvk]


def why_not(x_bsv: Tensor, weight_vk: Tensor, bias_v: Tensor | None, window_bvk: Tensor | None, *_: Any) -> str | None:
    if weight_vk.shape[1] > TAPS:
        return f"it got {weight_vk.shape[1]} taps, at most {TAPS} are unrolled"
    if window_bvk is not None and window_bvk.dtype != x_bsv.dtype:
        return f"it got a window of {window_bvk.dtype} beside tokens of {x_bsv.dtype}"
    return why_refused("causal_conv", x_bsv.dtype, x_bsv.device)


implement(CAUSAL_CONV, convolve, convolve_backward, why_not)
