# type: ignore  # Triton's language: its compiler checks it
"""Mamba-3's B or C, normed, biased and turned, in tiles of BN tokens and a whole state axis.

A turned entry needs its partner in the pair, which another thread holds: it is read, and made, a second time. x is
`Nmgr`, out `Nmhr`, the angles `Nha`; N counts tokens of all rows.
"""

import triton
import triton.language as tl

from mambakit.kernels.triton.code.products import narrow, scale_of, sine_and_cosine


@triton.jit
def pairs_of(cr, R: tl.constexpr, A: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Each entry's partner, its angle, whether it turns, and the sign of the sine before its partner."""
    if NEIGHBOURS:
        pair, second = cr // 2, cr % 2
        partner = cr + 1 - 2 * second
    else:
        # A state of one entry has no halves, and a compiler may do anything with what divides by none.
        HALF: tl.constexpr = 1 if R == 1 else R // 2
        pair, second = cr % HALF, cr // HALF
        partner = tl.where(second == 0, cr + HALF, cr - HALF)
    turns = (pair < A) & (cr < R)
    return tl.where(turns, partner, cr), pair, turns, tl.where(second == 0, -1.0, 1.0)


@triton.jit
def vectors(x, token, ok, m, gi, cr, M: tl.constexpr, G: tl.constexpr, R: tl.constexpr):
    place = ((token * M + m) * G + gi)[:, None] * R + cr[None, :]
    return tl.load(x + place, mask=ok[:, None] & (cr < R)[None, :], other=0.0).to(tl.float32)


@triton.jit
def row_of(pointer, at, cr, R: tl.constexpr):
    return tl.load(pointer + at + cr, mask=cr < R, other=0.0).to(tl.float32)[None, :]


@triton.jit
def inverse_rms(x, eps, R: tl.constexpr):
    scale = scale_of(tl.max(tl.abs(x), 1))[:, None]
    small = x / scale
    return (1 / tl.sqrt(tl.sum(small * small, 1)[:, None] / R + eps / scale / scale)) / scale


@triton.jit
def turn_of(angle, token, ok, hi, pair, turns, sign, H: tl.constexpr, A: tl.constexpr):
    """The cosine for each entry and the signed sine for its partner."""
    place = (token * H + hi)[:, None] * A + pair[None, :]
    theta = tl.load(angle + place, mask=ok[:, None] & turns[None, :], other=0.0).to(tl.float32)
    sin, cos = sine_and_cosine(theta)
    return cos, sin * sign[None, :]


@triton.jit(do_not_specialize=["N"])
def prepare(
    x, weight, bias, angle, out, N, eps,
    M: tl.constexpr, G: tl.constexpr, H: tl.constexpr, R: tl.constexpr, A: tl.constexpr, NEIGHBOURS: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    gi = pid % G
    m = (pid // G) % M
    token = (pid // G // M).to(tl.int64) * BN + tl.arange(0, BN)
    ok = token < N
    cr = tl.arange(0, BR)
    partner, pair, turns, sign = pairs_of(cr, R, A, NEIGHBOURS)
    own = vectors(x, token, ok, m, gi, cr, M, G, R)
    other = vectors(x, token, ok, m, gi, partner, M, G, R)
    inverse = inverse_rms(own, eps, R)
    own *= inverse * row_of(weight, 0, cr, R)
    other *= inverse * row_of(weight, 0, partner, R)
    for hi in range(gi * (H // G), (gi + 1) * (H // G)):
        cos, sin = turn_of(angle, token, ok, hi, pair, turns, sign, H, A)
        at = (hi * M + m) * R
        y = (own + row_of(bias, at, cr, R)) * cos + (other + row_of(bias, at, partner, R)) * sin
        place = ((token * M + m) * H + hi)[:, None] * R + cr[None, :]
        tl.store(out + place, narrow(y, out.dtype.element_ty), mask=ok[:, None] & (cr < R)[None, :])


@triton.jit(do_not_specialize=["N"])
def grad_vectors(
    x, weight, angle, d_out, d_x, d_bias, d_weight, N, eps,
    M: tl.constexpr, G: tl.constexpr, H: tl.constexpr, R: tl.constexpr, A: tl.constexpr, NEIGHBOURS: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Gradients of one rank and group; of bias `[tile, h, m, r]` and weight `[tile, m, g, r]` the tile's share."""
    pid = tl.program_id(0)
    gi = pid % G
    m = (pid // G) % M
    tile = (pid // G // M).to(tl.int64)
    token = tile * BN + tl.arange(0, BN)
    ok = token < N
    cr = tl.arange(0, BR)
    partner, pair, turns, sign = pairs_of(cr, R, A, NEIGHBOURS)
    d = tl.zeros((BN, BR), tl.float32)
    for hi in range(gi * (H // G), (gi + 1) * (H // G)):
        cos, sin = turn_of(angle, token, ok, hi, pair, turns, sign, H, A)
        # Turned back: the sine changes its sign.
        back = vectors(d_out, token, ok, m, hi, cr, M, H, R) * cos
        back -= vectors(d_out, token, ok, m, hi, partner, M, H, R) * sin
        tl.store(d_bias + ((tile * H + hi) * M + m) * R + cr, tl.sum(back, 0), mask=cr < R)
        d += back
    own = vectors(x, token, ok, m, gi, cr, M, G, R)
    inverse = inverse_rms(own, eps, R)
    normed = own * inverse
    tl.store(d_weight + ((tile * M + m) * G + gi) * R + cr, tl.sum(d * normed, 0), mask=cr < R)
    d *= row_of(weight, 0, cr, R)
    d = (d - normed * (tl.sum(d * normed, 1)[:, None] / R)) * inverse
    place = ((token * M + m) * G + gi)[:, None] * R + cr[None, :]
    tl.store(d_x + place, narrow(d, d_x.dtype.element_ty), mask=ok[:, None] & (cr < R)[None, :])


@triton.jit
def turning(
    x, weight, bias, d_out, token, ok, gi, hi, m, first, second, eps,
    M: tl.constexpr, G: tl.constexpr, H: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """For each pair, what turning it further changes, before the turn: the cosine's and the sine's share."""
    cr = tl.arange(0, BR)
    inverse = inverse_rms(vectors(x, token, ok, m, gi, cr, M, G, R), eps, R)
    at = (hi * M + m) * R
    a = vectors(x, token, ok, m, gi, first, M, G, R) * inverse * row_of(weight, 0, first, R) + row_of(
        bias, at, first, R
    )
    b = vectors(x, token, ok, m, gi, second, M, G, R) * inverse * row_of(weight, 0, second, R)
    b += row_of(bias, at, second, R)
    d_a = vectors(d_out, token, ok, m, hi, first, M, H, R)
    d_b = vectors(d_out, token, ok, m, hi, second, M, H, R)
    return d_b * a - d_a * b, d_a * a + d_b * b


@triton.jit(do_not_specialize=["N"])
def grad_angles(
    b, c, b_weight, c_weight, b_bias, c_bias, angle, d_b, d_c, d_angle, N, eps,
    M: tl.constexpr, G: tl.constexpr, H: tl.constexpr, R: tl.constexpr, A: tl.constexpr, NEIGHBOURS: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, BA: tl.constexpr,
):  # fmt: skip
    """The gradient of one head's angles: of both sides and all ranks."""
    pid = tl.program_id(0)
    hi = pid % H
    gi = hi // (H // G)
    token = (pid // H).to(tl.int64) * BN + tl.arange(0, BN)
    ok = token < N
    pair = tl.arange(0, BA)
    there = pair < A
    # A pair that is none reads beyond the state axis, where nothing is.
    if NEIGHBOURS:
        first, second = tl.where(there, 2 * pair, R), tl.where(there, 2 * pair + 1, R)
    else:
        first, second = tl.where(there, pair, R), tl.where(there, pair + R // 2, R)
    place = (token * H + hi)[:, None] * A + pair[None, :]
    mask = ok[:, None] & there[None, :]
    theta = tl.load(angle + place, mask=mask, other=0.0).to(tl.float32)
    cos_share = tl.zeros((BN, BA), tl.float32)
    sin_share = tl.zeros((BN, BA), tl.float32)
    for m in range(M):
        u, v = turning(b, b_weight, b_bias, d_b, token, ok, gi, hi, m, first, second, eps, M, G, H, R, BR)
        cos_share += u
        sin_share += v
        u, v = turning(c, c_weight, c_bias, d_c, token, ok, gi, hi, m, first, second, eps, M, G, H, R, BR)
        cos_share += u
        sin_share += v
    sin, cos = sine_and_cosine(theta)
    tl.store(d_angle + place, cos * cos_share - sin * sin_share, mask=mask)
