# type: ignore  # Triton's language: its compiler checks it
"""Matrix products on bfloat16 units with as many digits as asked for, running sums of log-decays, sine and cosine,
and the scale of what is squared."""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
# The interpreter takes products of parts one by one only if asked to: they are many, and it is slow.
IN_PARTS = tl.constexpr(os.environ.get("MAMBAKIT_TRITON_PARTS", "0") == "1")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """`x` in another dtype, rounded to the nearest: the interpreter would cut a bfloat16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def mm(x, y, acc, X: tl.constexpr, Y: tl.constexpr):
    """`acc + x @ y` with `x` and `y` as sums of X and Y bfloat16 numbers and float32 sums.

    One part holds a bfloat16 exactly, two a float16, three a float32. Products of parts that float32 would not see
    beside the first are left out.
    """
    if INTERPRETED and not IN_PARTS:
        if X == 1:
            x = narrow(x, tl.bfloat16)
        if Y == 1:
            y = narrow(y, tl.bfloat16)
        return tl.dot(x.to(tl.float32), y.to(tl.float32), acc)
    for i in tl.static_range(X):
        first = narrow(x, tl.bfloat16)
        if i + 1 < X:
            x = x.to(tl.float32) - first.to(tl.float32)
        rest = y
        for j in tl.static_range(Y):
            second = narrow(rest, tl.bfloat16)
            if j + 1 < Y:
                rest = rest.to(tl.float32) - second.to(tl.float32)
            if i + j < 3:
                if INTERPRETED:  # it has no bfloat16 and would multiply bit patterns
                    acc = tl.dot(first.to(tl.float32), second.to(tl.float32), acc)
                else:
                    acc = tl.dot(first, second, acc)
    return acc


@triton.jit
def decays(da, token, rank, s, H: tl.constexpr):
    """Inclusive sums of a chunk's log-decays as two float32 each, what is left to its end, and the whole.

    Summed in float64, and no decay is stronger than what is zero in float32 already: a strong one does not drown the
    weak ones after it, and rounding leaves no gap above zero whose exp would count.
    """
    x = tl.load(da + token * H, mask=(token < s) & (rank == 0), other=0.0).to(tl.float64)
    x = tl.where(x < -200.0, -200.0, x)
    a = tl.cumsum(x, 0)
    end = tl.sum(x, 0)
    high = a.to(tl.float32)
    low = (a - high.to(tl.float64)).to(tl.float32)
    return high, low, (end - a).to(tl.float32), end.to(tl.float32)


@triton.jit
def scale_of(largest):
    """What numbers up to `largest` are divided by before they are squared, so that squares fit. An infinity is no
    divisor: over a number its square is infinite, the numbers beside it are zero once normed, and it alone is NaN."""
    return tl.minimum(tl.maximum(largest, 1.0), 3.4028234663852886e38)


@triton.jit
def sine_and_cosine(x):
    """For |x| up to a few turns, to float32's last digits: the library's own keep a table on the stack for large x."""
    quarter = tl.floor(x * 0.6366197723675814 + 0.5)
    # pi / 2 in three parts, of which the first two have few digits: their products are exact.
    y = ((x - quarter * 1.5703125) - quarter * 4.837512969970703e-4) - quarter * 7.549789948768648e-8
    z = y * y
    sin = y + y * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4))
    cos = 1 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    turn = quarter.to(tl.int32) & 3
    swap = (turn & 1) == 1
    first, second = tl.where(swap, cos, sin), tl.where(swap, sin, cos)
    return tl.where(turn >= 2, -first, first), tl.where((turn == 1) | (turn == 2), -second, second)
