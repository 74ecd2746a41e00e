# type: ignore  # Triton's language: its compiler checks it
"""Skip, gate, norm and the sum over ranks, a group of channels of a row at a time; and one copy of a row per rank."""

import triton
import triton.language as tl

from mambakit.kernels.triton.code.products import narrow


@triton.jit
def optional(pointer, at, mask, absent: tl.constexpr):
    """What lies there in float32, or `absent` where there is nothing."""
    value = absent
    if pointer is not None:
        value = tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def normed(u, inside, eps, GROUP: tl.constexpr):
    """`u` over its root mean square, and one over that. Scaled down before it is squared, so that squares fit."""
    scale = tl.maximum(tl.max(tl.abs(tl.where(inside, u, 0.0)), 0), 1.0)
    small = u / scale
    inverse = 1 / tl.sqrt(tl.sum(tl.where(inside, small * small, 0.0), 0) / GROUP + eps / scale / scale)
    return small * inverse, inverse / scale


@triton.jit(do_not_specialize=["y_n", "x_n", "z_n"])
def finish(
    y, x, skip, z, mimo_x, mimo_z, mimo_o, weight, out, y_n, x_n, z_n, eps,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = WIDTH // GROUP
    pid = tl.program_id(0)
    row = (pid // GROUPS).to(tl.int64)
    within = tl.arange(0, BLOCK)
    inside = within < GROUP
    at = pid % GROUPS * GROUP + within
    total = tl.zeros((BLOCK,), tl.float32)
    for m in tl.static_range(M):
        u = tl.load(y + row * y_n + m * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        if x is not None:
            ranked = optional(mimo_x, m * WIDTH + at, inside, 1.0)
            u += optional(skip, at, inside, 1.0) * optional(x, row * x_n + at, inside, 1.0) * ranked
        gate = 1.0
        if z is not None:
            g = optional(z, row * z_n + at, inside, 0.0) * optional(mimo_z, m * WIDTH + at, inside, 1.0)
            gate = g * tl.sigmoid(g)
        if ORDER != 2:
            u *= gate
        if ORDER != 0:
            u, _ = normed(u, inside, eps, GROUP)
            u *= optional(weight, at, inside, 1.0)
        if ORDER == 2:
            u *= gate
        total += u * optional(mimo_o, m * WIDTH + at, inside, 1.0)
    tl.store(out + row * WIDTH + at, narrow(total, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["y_n", "x_n", "z_n", "N", "blocks"])
def finish_backward(
    y, x, skip, z, mimo_x, mimo_z, mimo_o, weight, d_out, d_y, d_x, d_z, sums, y_n, x_n, z_n, N, blocks, eps,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS rows of one rank: d_y, d_x and d_z `Nmi`, and `sums` per block of rows, `[block, 5, m, i]`."""
    GROUPS: tl.constexpr = WIDTH // GROUP
    pid = tl.program_id(0)
    m = pid % M
    block = pid // M // GROUPS
    within = tl.arange(0, BLOCK)
    inside = within < GROUP
    at = (pid // M) % GROUPS * GROUP + within
    ranked = m * WIDTH + at
    skips, scale = optional(skip, at, inside, 1.0), optional(weight, at, inside, 1.0)
    from_x, from_z = optional(mimo_x, ranked, inside, 1.0), optional(mimo_z, ranked, inside, 1.0)
    to_out = optional(mimo_o, ranked, inside, 1.0)
    d_skip = tl.zeros((BLOCK,), tl.float32)
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_mimo_x = tl.zeros((BLOCK,), tl.float32)
    d_mimo_z = tl.zeros((BLOCK,), tl.float32)
    d_mimo_o = tl.zeros((BLOCK,), tl.float32)
    for i in range(ROWS):
        row = (block * ROWS + i).to(tl.int64)
        here = within < tl.where(row < N, GROUP, 0)
        d = tl.load(d_out + row * WIDTH + at, mask=here, other=0.0).to(tl.float32)
        u = tl.load(y + row * y_n + ranked, mask=here, other=0.0).to(tl.float32)
        xt = tl.zeros((BLOCK,), tl.float32)
        if x is not None:
            xt += optional(x, row * x_n + at, here, 0.0)
            u += skips * xt * from_x
        gate, slope = 1.0, 0.0
        zt = tl.zeros((BLOCK,), tl.float32)
        if z is not None:
            zt += optional(z, row * z_n + at, here, 0.0)
            g = zt * from_z
            share = tl.sigmoid(g)
            gate, slope = g * share, share * (1 + g * (1 - share))
        entering = u
        if ORDER != 2:
            entering = u * gate
        after, inverse = entering, 1.0
        if ORDER != 0:
            after, inverse = normed(entering, inside, eps, GROUP)
        left = after
        if ORDER != 0:
            left = after * scale
        value = left
        if ORDER == 2:
            value = left * gate
        d_mimo_o += d * value
        d *= to_out
        d_gate = d * left
        if ORDER == 2:
            d *= gate
        if ORDER != 0:
            d_weight += d * after
            d *= scale
            if GROUP == 1:
                # All but a sign: 1 - after^2, which would leave no digit of it.
                d *= eps * inverse * inverse * inverse
            else:
                d = (d - after * (tl.sum(d * after, 0) / GROUP)) * inverse
        if ORDER != 2:
            d_gate = d * u
            d *= gate
        place = (row * M + m) * WIDTH + at
        tl.store(d_y + place, narrow(d, d_y.dtype.element_ty), mask=here)
        if x is not None:
            tl.store(d_x + place, narrow(d * skips * from_x, d_x.dtype.element_ty), mask=here)
            d_skip += d * xt * from_x
            d_mimo_x += d * xt * skips
        if z is not None:
            tl.store(d_z + place, narrow(d_gate * slope * from_z, d_z.dtype.element_ty), mask=here)
            d_mimo_z += d_gate * slope * zt
    sums += (block * 5 * M + m) * WIDTH + at
    tl.store(sums, d_skip, mask=inside)
    tl.store(sums + M * WIDTH, d_weight, mask=inside)
    tl.store(sums + 2 * M * WIDTH, d_mimo_x, mask=inside)
    tl.store(sums + 3 * M * WIDTH, d_mimo_z, mask=inside)
    tl.store(sums + 4 * M * WIDTH, d_mimo_o, mask=inside)
