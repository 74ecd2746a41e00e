# type: ignore  # Triton's language: its compiler checks it
"""The short depthwise convolution over tiles of BT tokens and BV channels.

Inputs are counted from the first token on; those before it, down to -K, are the window `bvk`. x is `bsv` with any
strides but that of channels; `start` is the first channel of this part, which has WIDTH of the V. The stride of rows,
`x_b`, depends on the length: it is given in UNITs, so that places known to be even are read in wide pieces.
"""

import triton
import triton.language as tl

from mambakit.kernels.triton.code.products import narrow


@triton.jit
def inputs_at(x, window, bi, at, end, cols, ok, x_s, V: tl.constexpr, K: tl.constexpr):
    """Inputs `at`, in float32: zero beyond the end, and before the window."""
    here = ok[None, :] & ((at >= 0) & (at < end))[:, None]
    found = tl.load(x + at.to(tl.int64)[:, None] * x_s + cols[None, :], mask=here, other=0.0).to(tl.float32)
    if window is not None:
        older = ok[None, :] & ((at < 0) & (at >= -K))[:, None]
        place = (bi * V + cols)[None, :] * K + (at + K)[:, None]
        found += tl.load(window + place, mask=older, other=0.0).to(tl.float32)
    return found


@triton.jit
def segment_at(seg, at, end):
    """Inputs before the first token are of its segment."""
    return tl.load(seg + tl.minimum(tl.maximum(at, 0), end - 1))


@triton.jit
def sums_at(
    x, weight, bias, window, seg, bi, at, s, cols, ok, x_s, V: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """The convolution at tokens `at`."""
    y = tl.zeros((BT, BV), tl.float32)
    if bias is not None:
        y += tl.load(bias + cols, mask=ok, other=0.0).to(tl.float32)[None, :]
    for q in tl.static_range(K):
        source = at - (K - 1) + q
        tap = inputs_at(x, window, bi, source, s, cols, ok, x_s, V, K)
        if seg is not None:
            tap = tl.where((segment_at(seg, source, s) == segment_at(seg, at, s))[:, None], tap, 0.0)
        y += tap * tl.load(weight + cols * K + q, mask=ok, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["x_b", "s", "tiles"])
def convolve(
    x, weight, bias, window, seg, y, x_b, x_s, s, tiles, start, WIDTH,
    V: tl.constexpr, K: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    columns = tl.cdiv(WIDTH, BV)
    inside = pid % columns * BV + tl.arange(0, BV)
    at = (pid // columns) % tiles * BT + tl.arange(0, BT)
    bi = (pid // columns // tiles).to(tl.int64)
    ok = inside < WIDTH
    if seg is not None:
        seg += bi * s
    out = sums_at(x + bi * x_b * UNIT, weight, bias, window, seg, bi, at, s, start + inside, ok, x_s, V, K, BT, BV)
    if SILU:
        out *= tl.sigmoid(out)
    place = (bi * s + at)[:, None] * WIDTH + inside[None, :]
    tl.store(y + place, narrow(out, y.dtype.element_ty), mask=(at < s)[:, None] & ok[None, :])


@triton.jit(do_not_specialize=["x_b", "s", "tiles"])
def convolve_backward(
    x, weight, bias, window, seg, lengths, d_y, d_after, d_x, d_window, sums, x_b, x_s, s, tiles, start, WIDTH,
    V: tl.constexpr, K: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of inputs, the window's before the tokens'; `sums` per tile: of each tap and of the bias."""
    pid = tl.program_id(0)
    columns = tl.cdiv(WIDTH, BV)
    inside = pid % columns * BV + tl.arange(0, BV)
    tile = (pid // columns).to(tl.int64)
    at = (pid // columns) % tiles * BT + tl.arange(0, BT) - K
    bi = tile // tiles
    ok = inside < WIDTH
    cols = start + inside
    x += bi * x_b * UNIT
    if seg is not None:
        seg += bi * s
    found = tl.zeros((BT, BV), tl.float32)
    for q in tl.static_range(K):
        # Input `at` is tap q of the output at `reader`.
        reader = at + (K - 1) - q
        there = ((reader >= 0) & (reader < s))[:, None] & ok[None, :]
        d = tl.load(d_y + (bi * s + reader)[:, None] * WIDTH + inside[None, :], mask=there, other=0.0).to(tl.float32)
        if SILU:
            pre = sums_at(x, weight, bias, window, seg, bi, reader, s, cols, ok, x_s, V, K, BT, BV)
            gate = tl.sigmoid(pre)
            d *= gate * (1 + pre * (1 - gate))
        if q == K - 1:
            tl.store(sums + (tile * (K + 1) + K) * V + cols, tl.sum(d, 0), mask=ok)
        if seg is not None:
            d = tl.where((segment_at(seg, reader, s) == segment_at(seg, at, s))[:, None], d, 0.0)
        found += d * tl.load(weight + cols * K + q, mask=ok, other=0.0).to(tl.float32)[None, :]
        taps = tl.where(there, inputs_at(x, window, bi, at, s, cols, ok, x_s, V, K), 0.0)
        tl.store(sums + (tile * (K + 1) + q) * V + cols, tl.sum(d * taps, 0), mask=ok)
    # The window that is returned: inputs from `length - K` on, of the last token's segment.
    length = s
    if lengths is not None:
        length = tl.load(lengths + bi).to(tl.int32)
    column = at - length + K
    kept = (column >= 0) & (column < K)
    if seg is not None:
        kept = kept & (segment_at(seg, at, s) == segment_at(seg, length - 1, s))
    place = (bi * V + cols)[None, :] * K + column[:, None]
    found += tl.load(d_after + place, mask=kept[:, None] & ok[None, :], other=0.0).to(tl.float32)
    mask = ((at >= 0) & (at < s))[:, None] & ok[None, :]
    tl.store(d_x + (bi * s + at)[:, None] * V + cols[None, :], narrow(found, d_x.dtype.element_ty), mask=mask)
    if d_window is not None:
        place = (bi * V + cols)[None, :] * K + (at + K)[:, None]
        tl.store(d_window + place, narrow(found, d_window.dtype.element_ty), mask=(at < 0)[:, None] & ok[None, :])
