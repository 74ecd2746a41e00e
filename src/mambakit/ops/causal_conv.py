"""Short depthwise causal convolution with a carried window."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.arguments import check_flag
from mambakit.ops.operation import Outputs, TorchOperation
from mambakit.ops.shapes import Sizes, bind, cast, check_floats, check_integers, check_lengths, check_segments


def _outputs(x_bsv: Tensor, weight_vk: Tensor, *others: Any) -> Outputs:
    b, s, v = x_bsv.shape
    widths, _ = others[-2:]
    return [*((x_bsv, (b, s, width)) for width in widths), (x_bsv, (b, v, weight_vk.shape[1]))]


def _check(*inputs: Any) -> None:
    *tensors, widths, _ = inputs
    size = check_sizes(*tensors)
    if min(widths, default=0) < 0 or sum(widths) != size.v:
        raise ValueError(f"widths {list(widths)} are not parts of the {size.v} channels of x_bsv")
    for name, tensor in zip(("segments_bs", "lengths_b"), tensors[4:], strict=True):
        if tensor is not None:
            check_integers(name, tensor)


CAUSAL_CONV = TorchOperation(
    "causal_conv",
    "Tensor x_bsv, Tensor weight_vk, Tensor? bias_v, Tensor? window_bvk, Tensor? segments_bs, Tensor? lengths_b, "
    "int[] widths, bool silu",
    _outputs,
    check=_check,
    floats=4,
)
"""The channels come out in `widths`, each part in memory of its own, so that neither they nor their gradients need to
be cut apart or put together; last the window after each row's last token."""


def causal_conv(
    x_bsv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None = None,
    window_bvk: Tensor | None = None,
    *,
    segments_bs: Tensor | None = None,
    lengths_b: Tensor | None = None,
    silu: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`y_t = bias + sum_q weight[q] x_{t-(k-1)+q}` per channel, then SiLU if asked for.

    `window_bvk` holds the `k` inputs before `x`, oldest first (None: zeros). Returns `y_bsv` and the window for the
    next call, so splitting the sequence anywhere gives the same result as one call. `y` has the dtype of `x`; a given
    window keeps its own. Sums are at least float32.

    With `segments_bs` a tap counts only inside the segment of its output; the entering window belongs to the segment of
    the first token, and the returned one is zero before the segment of the last token. `lengths_b` says how many of a
    row's tokens count for the returned window.

    Examples:
        >>> y_bsv, window_bvk = mk.causal_conv(torch.randn(2, 100, 32), torch.randn(32, 4), silu=True)
        >>> y_bsv.shape, window_bvk.shape
        (torch.Size([2, 100, 32]), torch.Size([2, 32, 4]))
    """
    tensors = (x_bsv, weight_vk, bias_v, window_bvk, segments_bs, lengths_b)
    size = check_sizes(*tensors)
    check_floats({"x_bsv": x_bsv}, {"weight_vk": weight_vk, "bias_v": bias_v, "window_bvk": window_bvk})
    check_flag("silu", silu)
    if segments_bs is not None:
        check_segments(segments_bs)
    if lengths_b is not None:
        check_lengths(lengths_b, size.s)
    (y_bsv,), window_bvk = convolve_in_parts(*tensors, [size.v], silu=silu, backend=backend)
    return y_bsv, window_bvk


def check_sizes(
    x_bsv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    window_bvk: Tensor | None,
    segments_bs: Tensor | None,
    lengths_b: Tensor | None,
) -> Sizes:
    required = {"x_bsv": x_bsv, "weight_vk": weight_vk}
    optional = {"bias_v": bias_v, "window_bvk": window_bvk, "segments_bs": segments_bs, "lengths_b": lengths_b}
    size = bind(required, **optional)
    if size.k < 1:
        raise ValueError(f"weight_vk needs at least one tap, got shape {tuple(weight_vk.shape)}")
    return size


def convolve_in_parts(
    x_bsv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    window_bvk: Tensor | None,
    segments_bs: Tensor | None,
    lengths_b: Tensor | None,
    widths: list[int],
    *,
    silu: bool = False,
    backend: str = "auto",
) -> tuple[list[Tensor], Tensor]:
    """`causal_conv` of tensors that are known to fit together, its channels cut into `widths`."""
    s = x_bsv.shape[1]
    if s == 0:
        segments_bs = None
    tensors = (x_bsv, weight_vk, bias_v, window_bvk)
    kernel = CAUSAL_CONV.choose(backend, *tensors, segments_bs, lengths_b)
    if kernel is not None:
        *parts, after_bvk = kernel(*tensors, segments_bs, lengths_b, widths, silu)
        window_dtype = x_bsv.dtype if window_bvk is None else window_bvk.dtype
        return [part.to(x_bsv.dtype) for part in parts], after_bvk.to(window_dtype)
    # Rounded once: what SiLU takes is at least float32.
    wide_bsv = cast(x_bsv, torch.promote_types(x_bsv.dtype, torch.float32)) if silu else x_bsv
    if s == 1 and lengths_b is None:
        window_bvk = x_bsv.new_zeros(len(x_bsv), *weight_vk.shape) if window_bvk is None else window_bvk
        y_bsv, window_bvk = convolve_one_token(wide_bsv, weight_vk, bias_v, window_bvk)
    else:
        y_bsv = convolve(wide_bsv, weight_vk, bias_v, window_bvk, segments_bs)
        window_bvk = last_inputs(x_bsv, window_bvk, weight_vk.shape[1], segments_bs, lengths_b)
    return list(cast(F.silu(y_bsv) if silu else y_bsv, x_bsv.dtype).split(widths, dim=-1)), window_bvk


def convolve_one_token(
    x_b1v: Tensor, weight_vk: Tensor, bias_v: Tensor | None, window_bvk: Tensor
) -> tuple[Tensor, Tensor]:
    # Channels last in memory: numbers that are added up lie apart, which is faster.
    window_bvk = torch.cat((window_bvk.mT[:, 1:], cast(x_b1v, window_bvk.dtype)), 1).mT
    wide = torch.promote_types(x_b1v.dtype, torch.float32)
    y_bv = (cast(window_bvk, wide) * weight_vk).sum(dim=2)
    if bias_v is not None:
        y_bv = y_bv + bias_v
    return cast(y_bv, x_b1v.dtype)[:, None], window_bvk


def convolve(
    x_bsv: Tensor, weight_vk: Tensor, bias_v: Tensor | None, window_bvk: Tensor | None, segments_bs: Tensor | None
) -> Tensor:
    k = weight_vk.shape[1]
    if window_bvk is None:
        return correlate(x_bsv, weight_vk, bias_v, segments_bs, segments_bs, (k - 1, 0))
    x_bSv = torch.cat((window_bvk[:, :, 1:].mT, x_bsv), dim=1)
    segments_bS = None
    if segments_bs is not None:
        segments_bS = torch.cat((segments_bs[:, :1].expand(-1, k - 1), segments_bs), dim=1)
    return correlate(x_bSv, weight_vk, bias_v, segments_bS, segments_bs).to(x_bsv.dtype)


def last_inputs(
    x_bsv: Tensor, window_bvk: Tensor | None, k: int, segments_bs: Tensor | None, lengths_b: Tensor | None = None
) -> Tensor:
    """The last `k` columns of `cat(window, x)`, zero outside the last token's segment; never a view of `x`.

    The last token is the last of the row, or the one `lengths_b` counts up to.
    """
    b, s, v = x_bsv.shape
    dtype = x_bsv.dtype if window_bvk is None else window_bvk.dtype
    older_bkv = x_bsv.new_zeros(b, k, v) if window_bvk is None else window_bvk.mT
    if lengths_b is not None:
        index_bk = lengths_b[:, None] + torch.arange(k, device=x_bsv.device)
        last_bkv = torch.cat((older_bkv, x_bsv), dim=1).gather(1, index_bk[..., None].expand(-1, -1, v))
        if segments_bs is not None:
            ids_bk = torch.cat((segments_bs[:, :1].expand(-1, k), segments_bs), dim=1).gather(1, index_bk)
            last_bkv = last_bkv.masked_fill((ids_bk != ids_bk[:, -1:])[..., None], 0)
        return last_bkv.mT.to(dtype).contiguous()
    last_bkv = x_bsv[:, -k:]
    if s < k:
        last_bkv = torch.cat((older_bkv[:, s:], last_bkv), dim=1)
    if segments_bs is not None:
        same_bk = segments_bs[:, -k:] == segments_bs[:, -1:]
        same_bk = torch.cat((same_bk[:, :1].expand(-1, k - same_bk.shape[1]), same_bk), dim=1)
        last_bkv = last_bkv.masked_fill(~same_bk[:, :, None], 0)
    return last_bkv.mT.to(dtype).clone(memory_format=torch.contiguous_format)


def overlaps(x_len: int, k: int, pad: tuple[int, int]) -> Iterator[tuple[int, slice, slice]]:
    """Per tap: the outputs it adds to and the inputs it reads for them, `pad` zeros before and after `x` left out."""
    for tap in range(k):
        first = max(0, tap - pad[0])
        end = x_len - max(0, k - 1 - tap - pad[1])
        if first < end:
            yield tap, slice(first + pad[0] - tap, end + pad[0] - tap), slice(first, end)


def mirrored(k: int, pad: tuple[int, int]) -> tuple[int, int]:
    """The padding that leads from `y` back to `x`."""
    return k - 1 - pad[0], k - 1 - pad[1]


def read(x_bSv: Tensor, x_ids_bS: Tensor | None, y_ids_bs: Tensor | None, inputs: slice, outputs: slice) -> Tensor:
    """One tap's inputs, zero where the output is in another segment."""
    if x_ids_bS is None or y_ids_bs is None:
        return x_bSv[:, inputs]
    same_bs1 = (x_ids_bS[:, inputs] == y_ids_bs[:, outputs])[:, :, None]
    return torch.where(same_bs1, x_bSv[:, inputs], 0)


def correlate(
    x_bSv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    x_ids_bS: Tensor | None = None,
    y_ids_bs: Tensor | None = None,
    pad: tuple[int, int] = (0, 0),
) -> Tensor:
    """`Correlate`, without its bookkeeping where no gradient is wanted."""
    inputs = (x_bSv, weight_vk, bias_v, x_ids_bS, y_ids_bs, pad)
    return Correlate.apply(*inputs) if torch.is_grad_enabled() else Correlate.forward(*inputs)


class Correlate(torch.autograd.Function):
    """`y_t = bias + sum_q weight[q] x_{t+q-pad[0]}` wherever all taps lie on `x` with `pad` zeros before and after.

    The gradient of `x` is the same operation with reversed taps, that of `weight` is `TapProducts`, and the other way
    round: any order of derivative exists, and only the inputs are kept for it. Both work in the layout of `x`, where
    `conv1d` would transpose.
    """

    @staticmethod
    def forward(
        x_bSv: Tensor,
        weight_vk: Tensor,
        bias_v: Tensor | None,
        x_ids_bS: Tensor | None,
        y_ids_bs: Tensor | None,
        pad: tuple[int, int],
    ) -> Tensor:
        b, x_len, v = x_bSv.shape
        k = weight_vk.shape[1]
        wide = torch.promote_types(x_bSv.dtype, torch.float32)
        weight_kv = weight_vk.to(wide).mT.contiguous()
        y_bsv = torch.zeros(b, x_len + sum(pad) - k + 1, v, dtype=wide, device=x_bSv.device)
        if bias_v is not None:
            y_bsv += bias_v
        for tap, outputs, inputs in overlaps(x_len, k, pad):
            y_bsv[:, outputs].addcmul_(read(x_bSv, x_ids_bS, y_ids_bs, inputs, outputs), weight_kv[tap])
        return y_bsv.to(x_bSv.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_bSv, weight_vk, bias_v, x_ids_bS, y_ids_bs, ctx.pad = inputs
        ctx.bias_dtype = None if bias_v is None else bias_v.dtype
        ctx.save_for_backward(x_bSv, weight_vk, x_ids_bS, y_ids_bs)

    @staticmethod
    def backward(ctx: Any, d_y_bsv: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] - one output
        x_bSv, weight_vk, x_ids_bS, y_ids_bs = ctx.saved_tensors
        k = weight_vk.shape[1]
        d_x_bSv = d_weight_vk = d_bias_v = None
        if ctx.needs_input_grad[0]:
            d_x_bSv = Correlate.apply(d_y_bsv, weight_vk.flip(1), None, y_ids_bs, x_ids_bS, mirrored(k, ctx.pad))
        if ctx.needs_input_grad[1]:
            d_weight_vk = TapProducts.apply(d_y_bsv, x_bSv, y_ids_bs, x_ids_bS, k, ctx.pad).to(weight_vk.dtype)
        if ctx.needs_input_grad[2]:
            wide = torch.promote_types(d_y_bsv.dtype, torch.float32)
            d_bias_v = d_y_bsv.sum(dim=(0, 1), dtype=wide).to(ctx.bias_dtype)
        return d_x_bSv, d_weight_vk, d_bias_v, None, None, None


class TapProducts(torch.autograd.Function):
    """`weight[q] = sum_t y_t x_{t+q-pad[0]}` over batch and time, per channel: the gradient of `Correlate`'s weight."""

    @staticmethod
    def forward(
        y_bsv: Tensor, x_bSv: Tensor, y_ids_bs: Tensor | None, x_ids_bS: Tensor | None, k: int, pad: tuple[int, int]
    ) -> Tensor:
        wide = torch.promote_types(x_bSv.dtype, torch.float32)
        weight_kv = torch.zeros(k, x_bSv.shape[2], dtype=wide, device=x_bSv.device)
        y_bsv = y_bsv.to(wide)
        # One buffer for all taps: fresh pages for every product cost more than the product.
        product_bsv = torch.empty_like(y_bsv)
        for tap, outputs, inputs in overlaps(x_bSv.shape[1], k, pad):
            tap_bsv = read(x_bSv, x_ids_bS, y_ids_bs, inputs, outputs)
            torch.mul(y_bsv[:, outputs], tap_bsv, out=product_bsv[:, outputs])
            weight_kv[tap] = product_bsv[:, outputs].sum(dim=(0, 1))
        return weight_kv.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        y_bsv, x_bSv, y_ids_bs, x_ids_bS, ctx.k, ctx.pad = inputs
        ctx.save_for_backward(y_bsv, x_bSv, y_ids_bs, x_ids_bS)

    @staticmethod
    def backward(ctx: Any, d_weight_vk: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] - one output
        y_bsv, x_bSv, y_ids_bs, x_ids_bS = ctx.saved_tensors
        back = mirrored(ctx.k, ctx.pad)
        d_y_bsv = Correlate.apply(x_bSv, d_weight_vk, None, x_ids_bS, y_ids_bs, ctx.pad)
        d_x_bSv = Correlate.apply(y_bsv, d_weight_vk.flip(1), None, y_ids_bs, x_ids_bS, back)
        return d_y_bsv, d_x_bSv, None, None, None, None
