"""The short convolution as two operators: outputs with the leaving window, and all gradients from the inputs alone.

The channels come out in `widths`, each part in memory of its own, so that neither they nor their gradients need to be
cut apart or put together. Everything is float32; see `causal_conv.h`.
"""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.library import kernel, pointer
from mambakit.kernels.cpu.pages import empty

# batch, length, width, taps; x and its strides; weight, bias; window and its stride; segments, lengths; silu.
INPUTS = "iiii" + "pii" + "pp" + "pi" + "pp" + "i"


@torch.library.custom_op("mambakit::causal_conv_cpu", mutates_args=())
def causal_conv_cpu(
    x_bsv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    window_bvk: Tensor | None,
    segments_bs: Tensor | None,
    lengths_b: Tensor | None,
    widths: list[int],
    silu: bool,
) -> list[Tensor]:
    """The parts of `y_bsv`, then the window after each row's last token."""
    return convolve(x_bsv, weight_vk, bias_v, window_bvk, segments_bs, lengths_b, widths, silu)


def convolve(
    x_bsv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    window_bvk: Tensor | None,
    segments_bs: Tensor | None,
    lengths_b: Tensor | None,
    widths: list[int],
    silu: bool,
) -> list[Tensor]:
    (b, s, v), k = x_bsv.shape, weight_vk.shape[1]
    inputs = Inputs(x_bsv, weight_vk, bias_v, window_bvk, segments_bs, lengths_b, silu)
    parts = [empty(b, s, width) for width in widths]
    after_bvk = x_bsv.new_empty(b, v, k)
    start = 0
    for part in parts:
        width = part.shape[2]
        out = (pointer(part), s * width, width, at(after_bvk, start * k), v * k)
        kernel("causal_conv", INPUTS + "pii" + "pi")(*inputs.channels(start, width), *out)
        start += width
    return [*parts, after_bvk]


@torch.library.custom_op("mambakit::causal_conv_backward_cpu", mutates_args=())
def causal_conv_backward_cpu(
    d_parts: list[Tensor],
    d_after_bvk: Tensor | None,
    x_bsv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    window_bvk: Tensor | None,
    segments_bs: Tensor | None,
    lengths_b: Tensor | None,
    silu: bool,
) -> list[Tensor]:
    """Gradients of x, weight and, where given, bias and window."""
    (b, s, v), k = x_bsv.shape, weight_vk.shape[1]
    inputs = Inputs(x_bsv, weight_vk, bias_v, window_bvk, segments_bs, lengths_b, silu)
    d_after_bvk = contiguous(d_after_bvk)
    d_x_bsv, d_weight_vk = empty(b, s, v), weight_vk.new_empty(v, k)
    d_bias_v = None if bias_v is None else bias_v.new_empty(v)
    d_window_bvk = None if window_bvk is None else window_bvk.new_empty(b, v, k)
    start = 0
    for d_part in map(channels_last, d_parts):
        width = d_part.shape[2]
        grads = (
            *(pointer(d_part), *d_part.stride()[:2]),
            *(at(d_after_bvk, start * k), v * k),
            *(at(d_x_bsv, start), s * v, v),
            *(at(d_weight_vk, start * k), at(d_bias_v, start)),
            *(at(d_window_bvk, start * k), v * k),
        )
        signature = INPUTS + "pii" + "pi" + "pii" + "pp" + "pi"
        kernel("causal_conv_backward", signature)(*inputs.channels(start, width), *grads)
        start += width
    return [d for d in (d_x_bsv, d_weight_vk, d_bias_v, d_window_bvk) if d is not None]


class Inputs:
    """What both kernels read. Channels do not meet, so a kernel can run on any range of them."""

    def __init__(
        self,
        x_bsv: Tensor,
        weight_vk: Tensor,
        bias_v: Tensor | None,
        window_bvk: Tensor | None,
        segments_bs: Tensor | None,
        lengths_b: Tensor | None,
        silu: bool,
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


@causal_conv_cpu.register_fake
def _(x_bsv, weight_vk, bias_v, window_bvk, segments_bs, lengths_b, widths, silu):
    b, s, v = x_bsv.shape
    return [*(x_bsv.new_empty(b, s, width) for width in widths), x_bsv.new_empty(b, v, weight_vk.shape[1])]


@causal_conv_backward_cpu.register_fake
def _(d_parts, d_after_bvk, x_bsv, weight_vk, bias_v, window_bvk, segments_bs, lengths_b, silu):
    inputs = (x_bsv, weight_vk, bias_v, window_bvk)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs if t is not None]


def _keep_inputs(ctx, inputs, output):
    *tensors, _, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grads):
    inputs = ctx.saved_tensors
    *d_parts, d_after_bvk = grads
    found = iter(causal_conv_backward_cpu(d_parts, d_after_bvk, *inputs, ctx.silu))
    every = [None if tensor is None else next(found) for tensor in inputs[:4]]
    wanted = [d if needed else None for d, needed in zip(every, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None, None, None


causal_conv_cpu.register_autograd(_backward, setup_context=_keep_inputs)
