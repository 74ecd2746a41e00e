# type: ignore  # Triton's language: its compiler checks it
"""The SSD core: the states between chunks, what a chunk reads, and a chunk's gradients.

A chunk is BT rows, one per token and rank, rank fastest and filled up to MP, a power of two. All tensors are
contiguous: v and y `bsmhp`, b and c `bsmgr`, decays and weights `bsh`, states between chunks `bnhpr`. A program finds
its place in a grid of one axis, which has no limit. IN parts hold an input exactly, MID parts what is computed
(`products.mm`).
"""

import triton
import triton.language as tl

from mambakit.kernels.triton.code.products import decays, mm, narrow


@triton.jit
def rows_of(n, s, M: tl.constexpr, MP: tl.constexpr, BT: tl.constexpr):
    """Token, rank and validity of each row of chunk n; tokens count from the chunk's first."""
    rows = tl.arange(0, BT)
    within, rank = rows // MP, rows % MP
    return within, rank, (n * (BT // MP) + within < s) & (rank < M)


@triton.jit
def tile(base, within, rank, ok, start, cols, heads: tl.constexpr, width: tl.constexpr, M: tl.constexpr):
    """Rows of a head's or group's vectors; `base` is the chunk's first token, `start` the head's first channel."""
    offset = (within * M + rank) * (heads * width) + start
    mask = ok[:, None] & (cols < width)[None, :]
    return tl.load(base + offset[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def tile_of_state(base, cp, cr, P: tl.constexpr, R: tl.constexpr):
    mask = (cp < P)[:, None] & (cr < R)[None, :]
    return tl.load(base + cp[:, None] * R + cr[None, :], mask=mask, other=0.0)


@triton.jit
def around_chunk(seg, n, within, s, TC: tl.constexpr):
    """Segments of a chunk's rows, of the token before it, and of its last; the entering state is the first token's."""
    t0 = n * TC
    ids = tl.load(seg + t0 + within, mask=t0 + within < s, other=0)
    return ids, tl.load(seg + tl.maximum(t0 - 1, 0)), tl.load(seg + tl.minimum(t0 + TC, s) - 1)


@triton.jit
def pair_weights(high, low, now, later, within, ids, SEGMENTS: tl.constexpr):
    """How reader l sees what writer t wrote, `lt`: the decay between, below the diagonal, and the whole weight."""
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    pair = within[:, None] > within[None, :]
    if SEGMENTS:
        pair = pair & (ids[:, None] == ids[None, :])
    # Mask before exp: above the diagonal the gap is positive and overflows.
    decay = tl.exp(tl.where(pair, between, -float("inf")))
    same = within[:, None] == within[None, :]
    return decay, tl.where(same, now[:, None], decay * later[None, :]), same


@triton.jit(do_not_specialize=["s", "chunks"])
def walk_states(
    x, k, da, w, seg, first, between, last, s, chunks,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr,
    BACK: tl.constexpr, SEGMENTS: tl.constexpr, IN: tl.constexpr, MID: tl.constexpr,
):  # fmt: skip
    """The state that enters each chunk, from `first` to `last`; BACK: the gradient of the one that leaves it."""
    TC: tl.constexpr = BT // MP
    NP: tl.constexpr = (P + BP - 1) // BP
    NR: tl.constexpr = (R + BR - 1) // BR
    pid = tl.program_id(0)
    row = pid // (NP * NR)
    cp = (pid // NR) % NP * BP + tl.arange(0, BP)
    cr = pid % NR * BR + tl.arange(0, BR)
    bi = (row // H).to(tl.int64)
    hi = row % H
    inside = (cp < P)[:, None] & (cr < R)[None, :]
    at = cp[:, None] * R + cr[None, :]
    state = tl.load(first + row.to(tl.int64) * (P * R) + at, mask=inside, other=0.0).to(tl.float32)
    if SEGMENTS:
        seg += bi * s
    for i in range(chunks):
        n = i
        if BACK:
            n = chunks - 1 - i
        within, rank, ok = rows_of(n, s, M, MP, BT)
        t0 = bi * s + n * TC
        here = between + ((bi * chunks + n) * H + hi) * (P * R)
        tl.store(here + at, narrow(state, between.dtype.element_ty), mask=inside)
        high, low, to_end, end = decays(da + t0 * H + hi, within, rank, s - n * TC, H)
        if BACK:
            weight = tl.exp(high)
        else:
            weight = tl.exp(to_end) * tl.load(w + t0 * H + hi + within * H, mask=ok, other=0.0)
        keep = tl.exp(end)
        if SEGMENTS:
            ids, before, final = around_chunk(seg, n, within, s, TC)
            if BACK:
                weight = tl.where(ids == before, weight, 0.0)
            else:
                weight = tl.where(ids == final, weight, 0.0)
            keep = tl.where(final == before, keep, 0.0)
        xt = tile(x + t0 * (M * H * P), within, rank, ok, hi * P, cp, H, P, M)
        kt = tile(k + t0 * (M * G * R), within, rank, ok, hi // (H // G) * R, cr, G, R, M)
        state = mm(tl.trans(xt.to(tl.float32) * weight[:, None]), kt, state * keep, MID, IN)
    tl.store(last + row.to(tl.int64) * (P * R) + at, state, mask=inside)


@triton.jit(do_not_specialize=["s", "chunks"])
def read_chunks(
    v, b, c, da, w_now, w_later, seg, entering, y, s, chunks,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr,
    SEGMENTS: tl.constexpr, IN: tl.constexpr, MID: tl.constexpr,
):  # fmt: skip
    """Outputs of one chunk: from its own tokens and from the state that enters it."""
    TC: tl.constexpr = BT // MP
    NP: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    cp = pid % NP * BP + tl.arange(0, BP)
    n = (pid // NP) % chunks
    row = pid // NP // chunks
    bi = (row // H).to(tl.int64)
    hi = row % H
    gr = hi // (H // G) * R
    t0 = bi * s + n * TC
    within, rank, ok = rows_of(n, s, M, MP, BT)
    entering += ((bi * chunks + n) * H + hi) * (P * R)
    match = tl.zeros((BT, BT), tl.float32)
    held = tl.zeros((BT, BP), tl.float32)
    for r0 in range(0, R, BR):
        cr = r0 + tl.arange(0, BR)
        ct = tile(c + t0 * (M * G * R), within, rank, ok, gr, cr, G, R, M)
        bt = tile(b + t0 * (M * G * R), within, rank, ok, gr, cr, G, R, M)
        match = mm(ct, tl.trans(bt), match, IN, IN)
        held = mm(ct, tl.trans(tile_of_state(entering, cp, cr, P, R)), held, IN, MID)
    high, low, to_end, end = decays(da + t0 * H + hi, within, rank, s - n * TC, H)
    near = t0 * H + hi + within * H
    now = tl.load(w_now + near, mask=ok, other=0.0)
    later = tl.load(w_later + near, mask=ok, other=0.0)
    from_start = tl.exp(high)
    ids = within
    if SEGMENTS:
        ids, before, final = around_chunk(seg + bi * s, n, within, s, TC)
        from_start = tl.where(ids == before, from_start, 0.0)
    decay, weight, same = pair_weights(high, low, now, later, within, ids, SEGMENTS)
    vt = tile(v + t0 * (M * H * P), within, rank, ok, hi * P, cp, H, P, M)
    out = mm(match * weight, vt, held * from_start[:, None], MID, IN)
    place = y + t0 * (M * H * P) + ((within * M + rank) * (H * P) + hi * P)[:, None] + cp[None, :]
    tl.store(place, narrow(out, y.dtype.element_ty), mask=ok[:, None] & (cp < P)[None, :])


@triton.jit
def gather(x, same, MP: tl.constexpr):
    """For every row the sum over its token's ranks."""
    if MP > 1:
        x = tl.sum(tl.where(same, x[:, None], 0.0), 0)
    return x


@triton.jit(do_not_specialize=["s", "chunks"])
def grad_values(
    v, b, c, da, w_now, w_later, seg, dy, entering, leaving, d_v, d_da, d_now, d_later, s, chunks,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr,
    SEGMENTS: tl.constexpr, IN: tl.constexpr, MID: tl.constexpr,
):  # fmt: skip
    """Gradients of one head's values, decays and weights in one chunk; `leaving` is the leaving state's gradient."""
    TC: tl.constexpr = BT // MP
    pid = tl.program_id(0)
    n = pid % chunks
    row = pid // chunks
    bi = (row // H).to(tl.int64)
    hi = row % H
    gr = hi // (H // G) * R
    t0 = bi * s + n * TC
    within, rank, ok = rows_of(n, s, M, MP, BT)
    state = ((bi * chunks + n) * H + hi) * (P * R)
    match = tl.zeros((BT, BT), tl.float32)
    for r0 in range(0, R, BR):
        cr = r0 + tl.arange(0, BR)
        ct = tile(c + t0 * (M * G * R), within, rank, ok, gr, cr, G, R, M)
        bt = tile(b + t0 * (M * G * R), within, rank, ok, gr, cr, G, R, M)
        match = mm(ct, tl.trans(bt), match, IN, IN)
    high, low, to_end, end = decays(da + t0 * H + hi, within, rank, s - n * TC, H)
    near = t0 * H + hi + within * H
    now = tl.load(w_now + near, mask=ok, other=0.0)
    later = tl.load(w_later + near, mask=ok, other=0.0)
    from_start, to_last, keep = tl.exp(high), tl.exp(to_end), tl.exp(end)
    ids = within
    if SEGMENTS:
        ids, before, final = around_chunk(seg + bi * s, n, within, s, TC)
        from_start = tl.where(ids == before, from_start, 0.0)
        to_last = tl.where(ids == final, to_last, 0.0)
        keep = tl.where(final == before, keep, 0.0)
    decay, weight, same = pair_weights(high, low, now, later, within, ids, SEGMENTS)
    mixed = tl.trans(match * weight)
    product = tl.zeros((BT, BT), tl.float32)
    d_start = tl.zeros((BT,), tl.float32)
    d_write = tl.zeros((BT,), tl.float32)
    carried = tl.zeros((BP,), tl.float32)
    for p0 in range(0, P, BP):
        cp = p0 + tl.arange(0, BP)
        dyt = tile(dy + t0 * (M * H * P), within, rank, ok, hi * P, cp, H, P, M)
        vt = tile(v + t0 * (M * H * P), within, rank, ok, hi * P, cp, H, P, M)
        product = mm(dyt, tl.trans(vt), product, IN, IN)
        held = tl.zeros((BT, BP), tl.float32)
        write = tl.zeros((BT, BP), tl.float32)
        for r0 in range(0, R, BR):
            cr = r0 + tl.arange(0, BR)
            ct = tile(c + t0 * (M * G * R), within, rank, ok, gr, cr, G, R, M)
            bt = tile(b + t0 * (M * G * R), within, rank, ok, gr, cr, G, R, M)
            enters = tile_of_state(entering + state, cp, cr, P, R)
            leaves = tile_of_state(leaving + state, cp, cr, P, R)
            held = mm(ct, tl.trans(enters), held, IN, MID)
            write = mm(bt, tl.trans(leaves), write, IN, MID)
            carried += tl.sum(enters.to(tl.float32) * leaves.to(tl.float32), 1)
        d_start += tl.sum(dyt.to(tl.float32) * held, 1)
        d_write += tl.sum(vt.to(tl.float32) * write, 1)
        out = mm(mixed, dyt, write * (to_last * later)[:, None], MID, IN)
        place = d_v + t0 * (M * H * P) + ((within * M + rank) * (H * P) + hi * P)[:, None] + cp[None, :]
        tl.store(place, narrow(out, d_v.dtype.element_ty), mask=ok[:, None] & (cp < P)[None, :])
    product *= match
    pairs = product * decay
    only = ok & (rank == 0)
    tl.store(d_now + near, gather(tl.sum(tl.where(same, product, 0.0), 1), same, MP), mask=only)
    tl.store(d_later + near, gather(tl.sum(pairs, 0) + to_last * d_write, same, MP), mask=only)
    # Token k decays every read at or after it and every write before it: summing just those never subtracts.
    earlier = within[:, None] < within[None, :]
    crossing = mm(pairs * later[None, :], tl.where(earlier, 1.0, 0.0), tl.zeros((BT, BT), tl.float32), MID, 1)
    d_start *= from_start
    d_end = to_last * later * d_write
    found = tl.sum(tl.where(earlier, d_end[:, None], crossing + d_start[:, None]), 0)
    tl.store(d_da + near, found + keep * tl.sum(carried, 0), mask=only)


@triton.jit(do_not_specialize=["s", "chunks"])
def grad_keys(
    v, b, c, da, w_now, w_later, seg, dy, entering, leaving, d_b, d_c, s, chunks,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr,
    SEGMENTS: tl.constexpr, IN: tl.constexpr, MID: tl.constexpr,
):  # fmt: skip
    """Gradients of one group's b and c in one chunk: its heads one after the other, so that nothing is added twice."""
    TC: tl.constexpr = BT // MP
    NR: tl.constexpr = (R + BR - 1) // BR
    pid = tl.program_id(0)
    cr = pid % NR * BR + tl.arange(0, BR)
    n = (pid // NR) % chunks
    row = pid // NR // chunks
    bi = (row // G).to(tl.int64)
    gi = row % G
    t0 = bi * s + n * TC
    within, rank, ok = rows_of(n, s, M, MP, BT)
    ids = within
    if SEGMENTS:
        ids, before, final = around_chunk(seg + bi * s, n, within, s, TC)
    both = tl.zeros((BT, BT), tl.float32)
    bt_grad = tl.zeros((BT, BR), tl.float32)
    ct_grad = tl.zeros((BT, BR), tl.float32)
    for hi in range(gi * (H // G), (gi + 1) * (H // G)):
        state = ((bi * chunks + n) * H + hi) * (P * R)
        product = tl.zeros((BT, BT), tl.float32)
        held = tl.zeros((BT, BR), tl.float32)
        write = tl.zeros((BT, BR), tl.float32)
        for p0 in range(0, P, BP):
            cp = p0 + tl.arange(0, BP)
            dyt = tile(dy + t0 * (M * H * P), within, rank, ok, hi * P, cp, H, P, M)
            vt = tile(v + t0 * (M * H * P), within, rank, ok, hi * P, cp, H, P, M)
            product = mm(dyt, tl.trans(vt), product, IN, IN)
            held = mm(dyt, tile_of_state(entering + state, cp, cr, P, R), held, IN, MID)
            write = mm(vt, tile_of_state(leaving + state, cp, cr, P, R), write, IN, MID)
        high, low, to_end, end = decays(da + t0 * H + hi, within, rank, s - n * TC, H)
        near = t0 * H + hi + within * H
        now = tl.load(w_now + near, mask=ok, other=0.0)
        later = tl.load(w_later + near, mask=ok, other=0.0)
        from_start, to_last = tl.exp(high), tl.exp(to_end)
        if SEGMENTS:
            from_start = tl.where(ids == before, from_start, 0.0)
            to_last = tl.where(ids == final, to_last, 0.0)
        decay, weight, same = pair_weights(high, low, now, later, within, ids, SEGMENTS)
        both += product * weight
        ct_grad += held * from_start[:, None]
        bt_grad += write * (to_last * later)[:, None]
    ct = tile(c + t0 * (M * G * R), within, rank, ok, gi * R, cr, G, R, M)
    bt = tile(b + t0 * (M * G * R), within, rank, ok, gi * R, cr, G, R, M)
    ct_grad = mm(both, bt, ct_grad, MID, IN)
    bt_grad = mm(tl.trans(both), ct, bt_grad, MID, IN)
    place = t0 * (M * G * R) + ((within * M + rank) * (G * R) + gi * R)[:, None] + cr[None, :]
    mask = ok[:, None] & (cr < R)[None, :]
    tl.store(d_b + place, narrow(bt_grad, d_b.dtype.element_ty), mask=mask)
    tl.store(d_c + place, narrow(ct_grad, d_c.dtype.element_ty), mask=mask)
