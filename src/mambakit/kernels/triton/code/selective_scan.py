# type: ignore  # Triton's language: its compiler checks it
"""Mamba-1's scan: the states of BI channels in registers, one token after the other.

x, dt, z and y are `bsi`, b and c `bsgr`, a `ir`, states `bir`; all contiguous. CHANNELS is that of a group. Between
chunks of CT tokens the states are kept, so that the backward can start anywhere.
"""

import triton
import triton.language as tl

from mambakit.kernels.triton.code.products import narrow


@triton.jit
def softplus(x):
    # Above 20 they are the same number; below, exp does not overflow. `tl.minimum` would make a number of a NaN.
    return tl.where(x > 20, x, log1p(tl.exp(tl.where(x > 20, 0.0, x))))


@triton.jit
def log1p(x):
    """`log(1 + x)` for x >= 0 to the last digits: what `1 + x` rounds off is put back."""
    sum_ = 1 + x
    return tl.log(sum_) + (x - (sum_ - 1)) / sum_


@triton.jit
def step_size(dt, dt_bias, at, cols, ok, SOFTPLUS: tl.constexpr):
    """The step size, and its slope over what came in."""
    raw = tl.load(dt + at, mask=ok, other=0.0).to(tl.float32)
    if dt_bias is not None:
        raw += tl.load(dt_bias + cols, mask=ok, other=0.0).to(tl.float32)
    size, slope = raw, tl.full(raw.shape, 1.0, tl.float32)
    if SOFTPLUS:
        size, slope = softplus(raw), tl.sigmoid(raw)
    return size, slope


@triton.jit
def decay_of(size, rate, fresh, token):
    decay = tl.exp(size[:, None] * rate)
    if fresh is not None:
        decay = tl.where(tl.load(fresh + token) != 0, 0.0, decay)
    return decay


@triton.jit
def place_of(pid, G: tl.constexpr, CHANNELS: tl.constexpr, BI: tl.constexpr, BR: tl.constexpr, R: tl.constexpr):
    """Row, group, channels and their validity, state entries, and where these states lie in `ir`."""
    PARTS: tl.constexpr = (CHANNELS + BI - 1) // BI
    within = pid % PARTS * BI + tl.arange(0, BI)
    gi = (pid // PARTS) % G
    ok = within < CHANNELS
    cr = tl.arange(0, BR)
    cols = gi * CHANNELS + within
    return (pid // PARTS // G).to(tl.int64), gi, cols, ok, cr, cols[:, None] * R + cr[None, :]


@triton.jit(do_not_specialize=["s", "chunks"])
def scan(
    x, dt, a, b, c, state, skip, z, dt_bias, fresh, y, last, kept, s, chunks,
    G: tl.constexpr, CHANNELS: tl.constexpr, R: tl.constexpr, SOFTPLUS: tl.constexpr,
    CT: tl.constexpr, BI: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Outputs and the last state; with `kept` instead of `y`, the states that enter each chunk."""
    WIDTH: tl.constexpr = G * CHANNELS
    bi, gi, cols, ok, cr, at = place_of(tl.program_id(0), G, CHANNELS, BI, BR, R)
    inside = ok[:, None] & (cr < R)[None, :]
    rate = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    h = tl.zeros((BI, BR), tl.float32)
    if state is not None:
        h = tl.load(state + bi * (WIDTH * R) + at, mask=inside, other=0.0).to(tl.float32)
    for t in range(s):
        token = bi * s + t
        if kept is not None:
            if t % CT == 0:
                tl.store(kept + (bi * chunks + t // CT) * (WIDTH * R) + at, h, mask=inside)
        size, _ = step_size(dt, dt_bias, token * WIDTH + cols, cols, ok, SOFTPLUS)
        xt = tl.load(x + token * WIDTH + cols, mask=ok, other=0.0).to(tl.float32)
        bt = tl.load(b + (token * G + gi) * R + cr, mask=cr < R, other=0.0).to(tl.float32)
        h = decay_of(size, rate, fresh, token) * h + (size * xt)[:, None] * bt[None, :]
        if y is not None:
            ct = tl.load(c + (token * G + gi) * R + cr, mask=cr < R, other=0.0).to(tl.float32)
            out = tl.sum(h * ct[None, :], 1)
            if skip is not None:
                out += tl.load(skip + cols, mask=ok, other=0.0).to(tl.float32) * xt
            if z is not None:
                zt = tl.load(z + token * WIDTH + cols, mask=ok, other=0.0).to(tl.float32)
                out *= zt * tl.sigmoid(zt)
            tl.store(y + token * WIDTH + cols, narrow(out, y.dtype.element_ty), mask=ok)
    if y is not None:
        tl.store(last + bi * (WIDTH * R) + at, h, mask=inside)


@triton.jit(do_not_specialize=["s", "chunks"])
def scan_backward(
    x, dt, a, b, c, skip, z, dt_bias, fresh, kept, dy, d_last, scratch, d_x, d_dt, d_a, d_b, d_c, d_state, d_skip, d_z,
    d_bias, s, chunks,
    G: tl.constexpr, CHANNELS: tl.constexpr, R: tl.constexpr, SOFTPLUS: tl.constexpr,
    CT: tl.constexpr, BI: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """All gradients, chunk by chunk from the last: a chunk's states once more into `scratch`, then back through them.

    `scratch` holds the CT + 1 states of one chunk for every program. Sums over channels are one per part,
    `[part, ...]`, those over tokens one per row.
    """
    WIDTH: tl.constexpr = G * CHANNELS
    PARTS: tl.constexpr = (CHANNELS + BI - 1) // BI
    pid = tl.program_id(0)
    bi, gi, cols, ok, cr, at = place_of(pid, G, CHANNELS, BI, BR, R)
    inside = ok[:, None] & (cr < R)[None, :]
    rate = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    here = bi * (WIDTH * R) + at
    own = tl.arange(0, BI)[:, None] * BR + cr[None, :]
    scratch += pid.to(tl.int64) * ((CT + 1) * BI * BR)
    rows = tl.num_programs(0) // (PARTS * G)
    share = (pid % PARTS) * rows.to(tl.int64) * s
    g = tl.load(d_last + here, mask=inside, other=0.0).to(tl.float32)
    d_rate = tl.zeros((BI, BR), tl.float32)
    d_skips = tl.zeros((BI,), tl.float32)
    d_biases = tl.zeros((BI,), tl.float32)
    skips = tl.zeros((BI,), tl.float32)
    if skip is not None:
        skips += tl.load(skip + cols, mask=ok, other=0.0).to(tl.float32)
    for back in range(chunks):
        n = chunks - 1 - back
        t0 = n * CT
        count = tl.minimum(CT, s - t0)
        h = tl.load(kept + (bi * chunks + n) * (WIDTH * R) + at, mask=inside, other=0.0)
        for i in range(count):
            tl.store(scratch + i * (BI * BR) + own, h)
            token = bi * s + t0 + i
            size, _ = step_size(dt, dt_bias, token * WIDTH + cols, cols, ok, SOFTPLUS)
            xt = tl.load(x + token * WIDTH + cols, mask=ok, other=0.0).to(tl.float32)
            bt = tl.load(b + (token * G + gi) * R + cr, mask=cr < R, other=0.0).to(tl.float32)
            h = decay_of(size, rate, fresh, token) * h + (size * xt)[:, None] * bt[None, :]
        # On AMD this does not wait for stores: a thread reads what it wrote itself, which the gate's tests look at.
        tl.debug_barrier()
        for j in range(count):
            i = count - 1 - j
            token = bi * s + t0 + i
            place = token * WIDTH + cols
            before = tl.load(scratch + i * (BI * BR) + own)
            size, slope = step_size(dt, dt_bias, place, cols, ok, SOFTPLUS)
            xt = tl.load(x + place, mask=ok, other=0.0).to(tl.float32)
            vectors = (token * G + gi) * R + cr
            bt = tl.load(b + vectors, mask=cr < R, other=0.0).to(tl.float32)
            ct = tl.load(c + vectors, mask=cr < R, other=0.0).to(tl.float32)
            d = tl.load(dy + place, mask=ok, other=0.0).to(tl.float32)
            decay = decay_of(size, rate, fresh, token)
            h = decay * before + (size * xt)[:, None] * bt[None, :]
            if z is not None:
                zt = tl.load(z + place, mask=ok, other=0.0).to(tl.float32)
                gate = tl.sigmoid(zt)
                out = tl.sum(h * ct[None, :], 1) + skips * xt
                tl.store(d_z + place, narrow(d * out * gate * (1 + zt * (1 - gate)), d_z.dtype.element_ty), mask=ok)
                d *= zt * gate
            d_skips += d * xt
            g += d[:, None] * ct[None, :]
            # Where a token is fresh the decay is zero, and with it all that came before.
            exponent = g * before * decay
            written = tl.sum(g * bt[None, :], 1)
            tl.store(d_x + place, narrow(size * written + skips * d, d_x.dtype.element_ty), mask=ok)
            d_size = (xt * written + tl.sum(exponent * rate, 1)) * slope
            tl.store(d_dt + place, narrow(d_size, d_dt.dtype.element_ty), mask=ok)
            d_biases += d_size
            d_rate += exponent * size[:, None]
            sums = share * G * R + vectors
            tl.store(d_b + sums, tl.sum(g * (size * xt)[:, None], 0), mask=cr < R)
            tl.store(d_c + sums, tl.sum(h * d[:, None], 0), mask=cr < R)
            g *= decay
        tl.debug_barrier()
    tl.store(d_a + here, d_rate, mask=inside)
    tl.store(d_state + here, g, mask=inside)
    tl.store(d_skip + bi * WIDTH + cols, d_skips, mask=ok)
    tl.store(d_bias + bi * WIDTH + cols, d_biases, mask=ok)
