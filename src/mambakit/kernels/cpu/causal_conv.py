"""The short convolution: outputs with the leaving window, and all gradients from the inputs alone; `causal_conv.h`."""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import kernel, pointer
from mambakit.kernels.cpu.pages import empty
from mambakit.ops.causal_conv import CAUSAL_CONV

# batch, length, width, taps; x and its strides; weight, bias; window and its stride; segments, lengths; silu.
INPUTS = "iiii" + "pii" + "pp" + "pi" + "pp" + "i"


def convolve(*inputs: Any) -> list[Tensor]:
    *tensors, widths, silu = inputs
    given = Inputs(silu, *tensors)
    (b, s, v), k = given.x_bsv.shape, given.weight_vk.shape[1]
    parts = [empty(b, s, width) for width in widths]
    after_bvk = torch.empty(b, v, k)
    start = 0
    for part in parts:
        width = part.shape[2]
        out = (pointer(part), s * width, width, at(after_bvk, start * k), v * k)
        kernel("causal_conv", INPUTS + "pii" + "pi")(*given.channels(start, width), *out)
        start += width
    return [*parts, after_bvk]


def convolve_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor | None]:
    *tensors, _, silu, _ = inputs_and_needs
    x_bsv, weight_vk, bias_v, window_bvk, *_ = tensors
    *d_parts, d_after_bvk = grads
    given = Inputs(silu, *tensors)
    (b, s, v), k = x_bsv.shape, weight_vk.shape[1]
    d_after_bvk = contiguous(d_after_bvk)
    d_x_bsv, d_weight_vk = empty(b, s, v), weight_vk.new_empty(v, k)
    d_bias_v = None if bias_v is None else bias_v.new_empty(v)
    d_window_bvk = None if window_bvk is None else window_bvk.new_empty(b, v, k)
    start = 0
    for d_part in map(channels_last, d_parts):
        width = d_part.shape[2]
        out = (
            *(pointer(d_part), *d_part.stride()[:2]),
            *(at(d_after_bvk, start * k), v * k),
            *(at(d_x_bsv, start), s * v, v),
            *(at(d_weight_vk, start * k), at(d_bias_v, start)),
            *(at(d_window_bvk, start * k), v * k),
        )
        signature = INPUTS + "pii" + "pi" + "pii" + "pp" + "pi"
        kernel("causal_conv_backward", signature)(*given.channels(start, width), *out)
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
        self.ids = [None if t is None else t.to(torch.int64).contiguous() for t in (segments_bs, lengths_b)]

    def channels(self, start: int, width: int) -> tuple[Any, ...]:
        (b, s, v), k = self.x_bsv.shape, self.weight_vk.shape[1]
        return (
            *(b, s, width, k),
            *(at(self.x_bsv, start), *self.x_bsv.stride()[:2]),
            *(at(self.weight_vk, start * k), at(self.bias_v, start)),
            *(at(self.window_bvk, start * k), v * k),
            *map(pointer, self.ids),
            self.silu,
        )


def channels_last(x_bsv: Tensor) -> Tensor:
    """`x` itself unless its channels are apart; tokens and rows may lie anywhere."""
    return x_bsv if x_bsv.stride(2) == 1 or x_bsv.shape[2] < 2 else x_bsv.contiguous()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def at(tensor: Tensor | None, element: int) -> int | None:
    return None if tensor is None else tensor.data_ptr() + 4 * element


CAUSAL_CONV.implement(CPU, convolve, convolve_backward, casts=True)
