"""The short convolution: outputs with the leaving window, and all gradients from the inputs alone; `causal_conv.h`."""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.pages import empty
from mambakit.kernels.cpu.structs import Conv, ConvBackward, ConvForward
from mambakit.ops.causal_conv import CAUSAL_CONV


def convolve(*inputs: Any) -> list[Tensor]:
    *tensors, widths, silu = inputs
    given = Inputs(silu, *tensors)
    (b, s, v), k = given.x_bsv.shape, given.weight_vk.shape[1]
    dtype = given.x_bsv.dtype
    parts = [empty(b, s, width, dtype=dtype) for width in widths]
    after_bvk = torch.empty(b, v, k, dtype=dtype)
    start = 0
    for part in parts:
        width = part.shape[2]
        run(
            ConvForward(
                inputs=given.channels(start, width),
                y=pointer(part),
                y_batch=s * width,
                y_token=width,
                after=at(after_bvk, start * k),
                after_batch=v * k,
            )
        )
        start += width
    return [*parts, after_bvk]


def convolve_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor | None]:
    *tensors, _, silu, _ = inputs_and_needs
    x_bsv, weight_vk, bias_v, window_bvk, *_ = tensors
    *d_parts, d_after_bvk = grads
    given = Inputs(silu, *tensors)
    (b, s, v), k = x_bsv.shape, weight_vk.shape[1]
    d_after_bvk = contiguous(d_after_bvk)
    d_x_bsv, d_weight_vk = empty(b, s, v, dtype=x_bsv.dtype), weight_vk.new_empty(v, k)
    d_bias_v = None if bias_v is None else bias_v.new_empty(v)
    d_window_bvk = None if window_bvk is None else window_bvk.new_empty(b, v, k)
    start = 0
    for d_part in map(channels_last, d_parts):
        width = d_part.shape[2]
        run(
            ConvBackward(
                inputs=given.channels(start, width),
                d_y=pointer(d_part),
                d_y_batch=d_part.stride(0),
                d_y_token=d_part.stride(1),
                d_after=at(d_after_bvk, start * k),
                after_batch=v * k,
                d_x=at(d_x_bsv, start),
                d_x_batch=s * v,
                d_x_token=v,
                d_weight=at(d_weight_vk, start * k),
                d_bias=at(d_bias_v, start),
                d_window=at(d_window_bvk, start * k),
                d_window_batch=v * k,
            )
        )
        start += width
    return [d_x_bsv, d_weight_vk, d_bias_v, d_window_bvk]


class Inputs:
    """What both kernels read. Channels do not meet, so a kernel can run on any range of them."""

    def __init__(
        self,
        silu: bool,
        x_bsv: Tensor,
        weight_vk: Tensor,
        bias_v: Tensor | None,
        window_bvk: Tensor | None,
        segments_bs: Tensor | None,
        lengths_b: Tensor | None,
    ) -> None:
        self.x_bsv, self.weight_vk, self.silu = channels_last(x_bsv), weight_vk.contiguous(), silu
        self.bias_v, self.window_bvk = contiguous(bias_v), contiguous(window_bvk)
        self.segments_bs, self.lengths_b = integers(segments_bs), integers(lengths_b)

    def channels(self, start: int, width: int) -> Conv:
        (b, s, v), k = self.x_bsv.shape, self.weight_vk.shape[1]
        return Conv(
            batch=b,
            length=s,
            width=width,
            taps=k,
            x=at(self.x_bsv, start),
            x_batch=self.x_bsv.stride(0),
            x_token=self.x_bsv.stride(1),
            weight=at(self.weight_vk, start * k),
            bias=at(self.bias_v, start),
            window=at(self.window_bvk, start * k),
            window_batch=v * k,
            segments=pointer(self.segments_bs),
            lengths=pointer(self.lengths_b),
            with_silu=self.silu,
            narrow=self.x_bsv.dtype == torch.bfloat16,
        )


def channels_last(x_bsv: Tensor) -> Tensor:
    """`x` itself unless its channels are apart; tokens and rows may lie anywhere."""
    return x_bsv if x_bsv.stride(2) == 1 or x_bsv.shape[2] < 2 else x_bsv.contiguous()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def integers(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.int64).contiguous()


def at(tensor: Tensor | None, element: int) -> int | None:
    return None if tensor is None else tensor.data_ptr() + tensor.itemsize * element


CAUSAL_CONV.implement(CPU, convolve, convolve_backward, casts=True, narrow=(0, 3))
