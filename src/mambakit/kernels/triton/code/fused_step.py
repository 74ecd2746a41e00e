# type: ignore  # Triton's language: its compiler checks it
"""Decoding steps: everything between a block's two projections for one token of every row, contiguous float32 all."""

import triton
import triton.language as tl

from mambakit.kernels.triton.code.mamba3_prepare import pairs_of
from mambakit.kernels.triton.code.norm import normed, optional
from mambakit.kernels.triton.code.products import sine_and_cosine
from mambakit.kernels.triton.code.selective_scan import softplus


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def clamped(x, low, high):
    """Between the limits. What is no number stays so: `tl.minimum` and `tl.maximum` would make it a limit."""
    x = tl.where(x < low, low, x)
    return tl.where(x > high, high, x)


@triton.jit
def convolve_token(x, window, after, weight, bias, cols, ok, written, K: tl.constexpr):
    """`silu` of the convolution at the newest token, and the window behind it, where `written`."""
    total = optional(bias, cols, ok, 0.0)
    for q in tl.static_range(1, K):
        old = tl.load(window + cols * K + q, mask=ok, other=0.0)
        total += old * tl.load(weight + cols * K + q - 1, mask=ok, other=0.0)
        tl.store(after + cols * K + q - 1, old, mask=written)
    new = tl.load(x + cols, mask=ok, other=0.0)
    tl.store(after + cols * K + K - 1, new, mask=written)
    return silu(total + new * tl.load(weight + cols * K + K - 1, mask=ok, other=0.0))


@triton.jit
def mamba1_conv(
    projected, window, weight, bias, x, after, I: tl.constexpr, K: tl.constexpr, BI: tl.constexpr
):  # fmt: skip
    TILES: tl.constexpr = (I + BI - 1) // BI
    pid = tl.program_id(0)
    bi = (pid // TILES).to(tl.int64)
    cols = pid % TILES * BI + tl.arange(0, BI)
    ok = cols < I
    shift = bi * I * K
    y = convolve_token(projected + bi * 2 * I, window + shift, after + shift, weight, bias, cols, ok, ok, K)
    tl.store(x + bi * I + cols, y, mask=ok)


@triton.jit
def mamba1_scan(
    projected, x, dt, dt_b_c, state, A_log, D, out, after,
    I: tl.constexpr, R: tl.constexpr, DT: tl.constexpr, BI: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (I + BI - 1) // BI
    pid = tl.program_id(0)
    bi = (pid // TILES).to(tl.int64)
    cols = pid % TILES * BI + tl.arange(0, BI)
    cr = tl.arange(0, BR)
    ok = cols < I
    inside = ok[:, None] & (cr < R)[None, :]
    at = cols[:, None] * R + cr[None, :]
    size = softplus(tl.load(dt + bi * I + cols, mask=ok, other=0.0))
    xt = tl.load(x + bi * I + cols, mask=ok, other=0.0)
    vectors = dt_b_c + bi * (DT + 2 * R) + DT + cr
    bt = tl.load(vectors, mask=cr < R, other=0.0)
    ct = tl.load(vectors + R, mask=cr < R, other=0.0)
    rate = -tl.exp(tl.load(A_log + at, mask=inside, other=0.0))
    h = tl.load(state + bi * I * R + at, mask=inside, other=0.0) * tl.exp(size[:, None] * rate)
    h += (size * xt)[:, None] * bt[None, :]
    tl.store(after + bi * I * R + at, h, mask=inside)
    y = tl.sum(h * ct[None, :], 1) + tl.load(D + cols, mask=ok, other=0.0) * xt
    y *= silu(tl.load(projected + bi * 2 * I + I + cols, mask=ok, other=0.0))
    tl.store(out + bi * I + cols, y, mask=ok)


@triton.jit
def mamba2(
    projected, window, state, conv_weight, conv_bias, dt_bias, A_log, D, out, window_after, state_after, dt_low,
    dt_high,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, K: tl.constexpr, MLP: tl.constexpr,
    D_PER_CHANNEL: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One head up to the skip; its group's first head keeps the window of B and C."""
    V: tl.constexpr = H * P + 2 * G * R
    WIDE: tl.constexpr = 2 * MLP + H * P + V + H
    pid = tl.program_id(0)
    hi = pid % H
    bi = (pid // H).to(tl.int64)
    projected += bi * WIDE
    window += bi * V * K
    window_after += bi * V * K
    x = projected + 2 * MLP + H * P
    cp, cr = tl.arange(0, BP), tl.arange(0, BR)
    group = hi // (H // G)
    kept = cr < tl.where(hi % (H // G) == 0, R, 0)
    cols = hi * P + cp
    value = convolve_token(x, window, window_after, conv_weight, conv_bias, cols, cp < P, cp < P, K)
    b_cols = H * P + group * R + cr
    bt = convolve_token(x, window, window_after, conv_weight, conv_bias, b_cols, cr < R, kept, K)
    ct = convolve_token(x, window, window_after, conv_weight, conv_bias, b_cols + G * R, cr < R, kept, K)
    size = clamped(softplus(tl.load(x + V + hi) + tl.load(dt_bias + hi)), dt_low, dt_high)
    decay = tl.exp(-size * tl.exp(tl.load(A_log + hi)))
    inside = (cp < P)[:, None] & (cr < R)[None, :]
    at = (bi * H + hi) * (P * R) + cp[:, None] * R + cr[None, :]
    h = tl.load(state + at, mask=inside, other=0.0) * decay
    h += tl.where(inside, (size * value)[:, None] * bt[None, :], 0.0)
    tl.store(state_after + at, h, mask=inside)
    if D_PER_CHANNEL:
        skip = tl.load(D + cols, mask=cp < P, other=0.0)
    else:
        skip = tl.load(D + hi)
    y = tl.sum(tl.where(inside, h * ct[None, :], 0.0), 1) + skip * value
    tl.store(out + bi * (H * P) + cols, y, mask=cp < P)


@triton.jit
def turned(
    x, weight, bias, cr, sin, cos, eps,
    R: tl.constexpr, A: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries `cr` of one vector of up to BLOCK, normed, biased and turned."""
    whole = tl.arange(0, BLOCK)
    _, inverse = normed(tl.load(x + whole, mask=whole < R, other=0.0), whole < R, eps, R)
    inside = cr < R
    partner, _, turns, sign = pairs_of(cr, R, A, NEIGHBOURS)
    y = tl.load(x + cr, mask=inside, other=0.0) * inverse * tl.load(weight + cr, mask=inside, other=0.0)
    y += tl.load(bias + cr, mask=inside, other=0.0)
    if A > 0:
        other = tl.load(x + partner, mask=inside, other=0.0) * inverse
        other = other * tl.load(weight + partner, mask=inside, other=0.0)
        other += tl.load(bias + partner, mask=inside, other=0.0)
        y = tl.where(turns, y * cos + other * sin * sign, y)
    return tl.where(inside, y, 0.0)


@triton.jit
def next_angle(angle, rot, size, scale, pair, there):
    """Wrapped to [-pi, pi], in float64: step sizes have no limit, and an angle counts modulo a turn."""
    raw = tl.load(rot + pair, mask=there, other=0.0).to(tl.float64)
    small = tl.exp(-2 * tl.abs(raw))
    tanh = tl.where(raw < 0, -1.0, 1.0) * (1 - small) / (1 + small)
    total = tl.load(angle + pair, mask=there, other=0.0).to(tl.float64) + size.to(tl.float64) * (scale * tanh)
    circle: tl.constexpr = 6.283185307179586
    return (total - circle * tl.floor(total / circle + 0.5)).to(tl.float32)


@triton.jit
def mamba3(
    projected, state, k_state, v_state, angle, dt_bias, B_norm, C_norm, B_bias, C_bias, mimo_x, mimo_z, mimo_o, D,
    norm_weight, out, state_after, k_after, v_after, angle_after, eps, dt_low, dt_high, a_floor, scale,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, G: tl.constexpr, M: tl.constexpr, A: tl.constexpr,
    KEPT: tl.constexpr, NEIGHBOURS: tl.constexpr, HEAVY: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr,
    BA: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head, from its step size to the sum of its ranks; of its state BR entries of every channel at a time."""
    BC: tl.constexpr = M * G * R
    WIDE: tl.constexpr = 2 * H * P + 2 * BC + 3 * H + KEPT
    pid = tl.program_id(0)
    hi = pid % H
    bi = (pid // H).to(tl.int64)
    projected += bi * WIDE
    numbers = projected + 2 * H * P + 2 * BC + hi
    rot = projected + 2 * H * P + 2 * BC + 3 * H
    angle += (bi * H + hi) * KEPT
    angle_after += (bi * H + hi) * KEPT
    cp, ca, ranks = tl.arange(0, BP), tl.arange(0, BA), tl.arange(0, BM)
    channels = cp < P
    size = clamped(softplus(tl.load(numbers) + tl.load(dt_bias + hi)), dt_low, dt_high)
    a = tl.load(numbers + H)
    if HEAVY:
        rate = tl.where(a > 0, 1 + a, 1 / (1 - tl.where(a > 0, 0.0, a)))
    else:
        rate = softplus(a)
    decay = tl.exp(-size * tl.where(rate < a_floor, a_floor, rate))
    share = tl.sigmoid(tl.load(numbers + 2 * H))
    if A > 0:
        tl.store(angle_after + ca, next_angle(angle, rot, size, scale, ca, ca < A), mask=ca < A)
    else:
        tl.store(angle_after + ca, tl.zeros((BA,), tl.float32), mask=ca < KEPT)
    x = tl.load(projected + H * P + hi * P + cp, mask=channels, other=0.0)
    z = tl.load(projected + hi * P + cp, mask=channels, other=0.0)
    old_x = tl.load(v_state + (bi * H + hi) * P + cp, mask=channels, other=0.0)
    tl.store(v_after + (bi * H + hi) * P + cp, x, mask=channels)
    keys = projected + 2 * H * P + hi // (H // G) * R
    outputs = tl.zeros((BM, BP), tl.float32)
    for r0 in range(0, R, BR):
        cr = r0 + tl.arange(0, BR)
        entries = cr < R
        inside = channels[:, None] & entries[None, :]
        sin, cos = 0.0, 1.0
        if A > 0:
            _, pair, turns, _ = pairs_of(cr, R, A, NEIGHBOURS)
            sin, cos = sine_and_cosine(next_angle(angle, rot, size, scale, pair, turns))
        at = (bi * H + hi) * (P * R) + cp[:, None] * R + cr[None, :]
        h = tl.load(state + at, mask=inside, other=0.0) * decay
        for j in range(M):
            expand = optional(mimo_x, (hi * M + j) * P + cp, channels, 1.0)
            kept = ((bi * M + j) * H + hi) * R + cr
            # The last token's other half of the trapezoid, and this token's own.
            old_b = tl.load(k_state + kept, mask=entries, other=0.0)
            h += ((1 - share) * size * decay * old_x * expand)[:, None] * old_b[None, :]
            bias = B_bias + (hi * M + j) * R
            bt = turned(keys + j * G * R, B_norm, bias, cr, sin, cos, eps, R, A, NEIGHBOURS, BLOCK)
            tl.store(k_after + kept, bt, mask=entries)
            h += (share * size * x * expand)[:, None] * bt[None, :]
        tl.store(state_after + at, h, mask=inside)
        for j in range(M):
            bias = C_bias + (hi * M + j) * R
            ct = turned(keys + BC + j * G * R, C_norm, bias, cr, sin, cos, eps, R, A, NEIGHBOURS, BLOCK)
            outputs += tl.where((ranks == j)[:, None], tl.sum(h * ct[None, :], 1)[None, :], 0.0)
    total = tl.zeros((BP,), tl.float32)
    for j in range(M):
        ranked = (hi * M + j) * P + cp
        y = tl.sum(tl.where((ranks == j)[:, None], outputs, 0.0), 0)
        y += tl.load(D + hi) * x * optional(mimo_x, ranked, channels, 1.0)
        if norm_weight is not None:
            y, _ = normed(y, channels, eps, P)
            y *= tl.load(norm_weight + hi * P + cp, mask=channels, other=0.0)
        y *= silu(z * optional(mimo_z, ranked, channels, 1.0))
        total += y * optional(mimo_o, ranked, channels, 1.0)
    tl.store(out + bi * (H * P) + hi * P + cp, total, mask=channels)
