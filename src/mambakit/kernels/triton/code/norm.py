# type: ignore  # Triton's language: its compiler checks it
"""Skip, gate, norm and the sum over ranks, a group of channels of a row at a time, in parts of BLOCK channels."""

import triton
import triton.language as tl

from mambakit.kernels.triton.code.products import narrow, scale_of


@triton.jit
def optional(pointer, at, mask, absent: tl.constexpr):
    """What lies there in float32, or `absent` where there is nothing."""
    value = absent
    if pointer is not None:
        value = tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def normed(u, inside, eps, GROUP: tl.constexpr):
    """`u` over its root mean square, and one over that."""
    scale = scale_of(tl.max(tl.abs(tl.where(inside, u, 0.0)), 0))
    small = u / scale
    inverse = 1 / tl.sqrt(tl.sum(tl.where(inside, small * small, 0.0), 0) / GROUP + eps / scale / scale)
    return small * inverse, inverse / scale


@triton.jit
def with_skip(y, x, skip, mimo_x, row, y_n, x_n, at, ranked, here):
    """One rank's channels, zero where they are not `here`."""
    u = tl.load(y + row * y_n + ranked, mask=here, other=0.0).to(tl.float32)
    if x is not None:
        u += (
            optional(skip, at, here, 1.0) * optional(x, row * x_n + at, here, 1.0) * optional(mimo_x, ranked, here, 1.0)
        )
    return u


@triton.jit
def gate_of(z, mimo_z, row, z_n, at, ranked, here):
    gate = 1.0
    if z is not None:
        g = optional(z, row * z_n + at, here, 0.0) * optional(mimo_z, ranked, here, 1.0)
        gate = g * tl.sigmoid(g)
    return gate


@triton.jit
def inverse_rms(
    y, x, skip, z, mimo_x, mimo_z, row, y_n, x_n, z_n, first, m, eps,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one rank's group, which begins at channel `first`; scaled down as in `normed`, by the largest so far."""
    scale, total = 1.0, 0.0
    for c0 in range(0, GROUP, BLOCK):
        within = c0 + tl.arange(0, BLOCK)
        here = within < GROUP
        at = first + within
        u = with_skip(y, x, skip, mimo_x, row, y_n, x_n, at, m * WIDTH + at, here)
        if ORDER == 1:
            u *= gate_of(z, mimo_z, row, z_n, at, m * WIDTH + at, here)
        larger = scale_of(tl.maximum(scale, tl.max(tl.abs(u), 0)))
        small, before = u / larger, scale / larger
        total = total * before * before + tl.sum(small * small, 0)
        scale = larger
    return 1 / tl.sqrt(total / GROUP + eps / scale / scale) / scale


@triton.jit
def finish(
    y, x, skip, z, mimo_x, mimo_z, mimo_o, weight, out, y_n, x_n, z_n, eps,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = WIDTH // GROUP
    pid = tl.program_id(0)
    row = (pid // GROUPS).to(tl.int64)
    first = pid % GROUPS * GROUP
    ranks = tl.arange(0, MP)
    inverses = tl.zeros((MP,), tl.float32)
    if ORDER != 0:
        for m in tl.static_range(M):
            inverse = inverse_rms(
                y, x, skip, z, mimo_x, mimo_z, row, y_n, x_n, z_n, first, m, eps, WIDTH, GROUP, ORDER, BLOCK
            )
            inverses = tl.where(ranks == m, inverse, inverses)
    for c0 in range(0, GROUP, BLOCK):
        within = c0 + tl.arange(0, BLOCK)
        here = within < GROUP
        at = first + within
        total = tl.zeros((BLOCK,), tl.float32)
        for m in tl.static_range(M):
            u = with_skip(y, x, skip, mimo_x, row, y_n, x_n, at, m * WIDTH + at, here)
            u *= gate_of(z, mimo_z, row, z_n, at, m * WIDTH + at, here)
            if ORDER != 0:
                u *= tl.sum(tl.where(ranks == m, inverses, 0.0), 0) * optional(weight, at, here, 1.0)
            total += u * optional(mimo_o, m * WIDTH + at, here, 1.0)
        tl.store(out + row * WIDTH + at, narrow(total, out.dtype.element_ty), mask=here)


@triton.jit
def finish_means(
    y, x, skip, z, mimo_x, mimo_z, mimo_o, weight, d_out, means, y_n, x_n, z_n, eps,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What gradients need of a group in several parts, `[row, m, group, 2]`: one over its root mean square, and the
    mean of its normed channels times their gradients."""
    pid = tl.program_id(0)
    GROUPS: tl.constexpr = WIDTH // GROUP
    row = (pid // GROUPS // M).to(tl.int64)
    m = (pid // GROUPS) % M
    first = pid % GROUPS * GROUP
    inverse = inverse_rms(y, x, skip, z, mimo_x, mimo_z, row, y_n, x_n, z_n, first, m, eps, WIDTH, GROUP, ORDER, BLOCK)
    total = 0.0
    for c0 in range(0, GROUP, BLOCK):
        within = c0 + tl.arange(0, BLOCK)
        here = within < GROUP
        at = first + within
        ranked = m * WIDTH + at
        d = tl.load(d_out + row * WIDTH + at, mask=here, other=0.0).to(tl.float32)
        d *= optional(weight, at, here, 1.0) * optional(mimo_o, ranked, here, 1.0)
        # The gate stands before the norm or after it: in the product it is the same.
        u = with_skip(y, x, skip, mimo_x, row, y_n, x_n, at, ranked, here)
        u *= gate_of(z, mimo_z, row, z_n, at, ranked, here)
        total += tl.sum(d * (u * inverse), 0)
    means += pid.to(tl.int64) * 2
    tl.store(means, inverse)
    tl.store(means + 1, total / GROUP)


@triton.jit(do_not_specialize=["N"])
def finish_backward(
    y, x, skip, z, mimo_x, mimo_z, mimo_o, weight, d_out, means, d_y, d_x, d_z, sums, y_n, x_n, z_n, N, eps,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS rows of one rank and part: d_y, d_x and d_z `Nmi`, and `sums` per block of rows,
    `[block, 5, m, i]`. A group in one part needs no `means`."""
    GROUPS: tl.constexpr = WIDTH // GROUP
    PARTS: tl.constexpr = (GROUP + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    m = pid % M
    group = (pid // M // PARTS) % GROUPS
    block = (pid // M // PARTS // GROUPS).to(tl.int64)
    within = (pid // M) % PARTS * BLOCK + tl.arange(0, BLOCK)
    inside = within < GROUP
    at = group * GROUP + within
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
        row = block * ROWS + i
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
        after, inverse, mean = entering, 1.0, 0.0
        if ORDER != 0:
            if PARTS == 1:
                after, inverse = normed(entering, inside, eps, GROUP)
            else:
                found = means + ((row * M + m) * GROUPS + group) * 2
                inverse = tl.load(found, mask=row < N, other=0.0)
                mean = tl.load(found + 1, mask=row < N, other=0.0)
                after = entering * inverse
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
                if PARTS == 1:
                    mean = tl.sum(d * after, 0) / GROUP
                d = (d - after * mean) * inverse
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
