"""The core: one weighted scan behind Mamba-2 and both pathways of Mamba-3."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mambakit.ops.backends import TORCH, asked, may_overwrite
from mambakit.ops.operation import TorchOperation
from mambakit.ops.segments import before_segment
from mambakit.ops.shapes import Sizes, bind, cast, check_floats, check_integers, check_segments, full_precision
from mambakit.ops.ssd_chunked import SsdChunks, ssd_minimal, ssd_serial
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.ssd_recalculated import default_chunk_len, from_core, recalculated, recalculated_backward, to_core


def check_sizes(required: Mapping[str, Tensor], **optional: Tensor | None) -> Sizes:
    size = bind(required, **optional)
    if size.g == 0 or size.h % size.g:
        raise ValueError(f"axis 'h' is {size.h} in v_bsmhp, not a multiple of axis 'g', which is {size.g} in b_bsmgr")
    return size


def _check(*inputs: Any) -> None:
    *tensors, segments_bs, chunk_len = inputs
    size = check_sizes(dict(zip(SSD.names, tensors, strict=False)), segments_bs=segments_bs)
    if size.s < 1 or chunk_len < 0:
        raise ValueError(f"v_bsmhp has {size.s} tokens and chunk_len is {chunk_len}, expected at least 1 and 0")
    if segments_bs is not None:
        check_integers("segments_bs", segments_bs)


SSD = TorchOperation(
    "ssd",
    "Tensor v_bsmhp, Tensor b_bsmgr, Tensor c_bsmgr, Tensor da_bsh, Tensor w_now_bsh, Tensor w_later_bsh, "
    "Tensor state_bhpr, Tensor? segments_bs, int chunk_len",
    lambda v, b, c, da, w_now, w_later, state, *_: [(v, v.shape), (state, state.shape)],
    check=_check,
    floats=7,
)
"""For a non-empty sequence; the state has the dtype to compute in. `chunk_len` 0 leaves the choice to the kernel."""
SSD.implement(TORCH, recalculated, recalculated_backward)

IN_CHUNKS = {"minimal": ssd_minimal, "serial": ssd_serial}


def ssd(
    v_bsmhp: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    da_bsh: Tensor,
    w_now_bsh: Tensor,
    w_later_bsh: Tensor,
    state_bhpr: Tensor | None = None,
    *,
    path: SsdPath | None = None,
    segments_bs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan `v` into the state and read it back; see docs/math.md, "The core".

        u_t    = sum_m v_t[m] (x) b_t[m]
        h_t    = exp(da_t) h_{t-1} + w_later_t u_t
        y_t[m] = (exp(da_t) h_{t-1} + w_now_t u_t) c_t[m]

    `da` holds log-decays, at most 0; -inf forgets everything. B and C come per group of heads: head `i` belongs to
    group `i // (h / g)`.
    `segments_bs` are non-decreasing ids of packed sequences; a new id starts from a zero state, and `state_bhpr` (None:
    zeros) belongs to the first token's. Any length, 0 included. `path=None` is `SsdPath()`.

    Returns `y_bsmhp` in the dtype of `v` and the state after the last token in at least float32. Splitting the sequence
    anywhere and passing the state on gives the same result as one call, gradients included. Differentiable twice
    through `minimal` and `serial`, once through `serial_recalculated`. Raises `ValueError` for shapes, dtypes or
    devices that do not fit together.

    Examples:
        >>> b, s, m, h, p, g, r = 2, 100, 1, 4, 16, 1, 32
        >>> v_bsmhp, dt_bsh = torch.randn(b, s, m, h, p), 0.1 * torch.rand(b, s, h)
        >>> b_bsmgr, c_bsmgr = torch.randn(b, s, m, g, r), torch.randn(b, s, m, g, r)
        >>> y_bsmhp, state_bhpr = mk.ssd(v_bsmhp, b_bsmgr, c_bsmgr, -dt_bsh, dt_bsh, dt_bsh)
        >>> y_bsmhp.shape, state_bhpr.shape
        (torch.Size([2, 100, 1, 4, 16]), torch.Size([2, 4, 16, 32]))
    """
    data = {"v_bsmhp": v_bsmhp, "b_bsmgr": b_bsmgr, "c_bsmgr": c_bsmgr}
    weights = {"da_bsh": da_bsh, "w_now_bsh": w_now_bsh, "w_later_bsh": w_later_bsh}
    size, dtype = check_core(data, weights, {"state_bhpr": state_bhpr}, segments_bs)
    if state_bhpr is None:
        state_bhpr = v_bsmhp.new_zeros(size.b, size.h, size.p, size.r, dtype=dtype)
    return scan(v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, w_now_bsh, w_later_bsh, state_bhpr, SsdPath.of(path), segments_bs)


def check_core(
    data: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    carried: Mapping[str, Tensor | None],
    segments_bs: Tensor | None,
) -> tuple[Sizes, torch.dtype]:
    """The sizes of a scan's inputs, v first, and the dtype to compute in; what is carried from before may be None."""
    size = check_sizes({**data, **weights}, **carried, segments_bs=segments_bs)
    dtype = check_floats({**data}, {**weights, **carried})
    if segments_bs is not None:
        check_segments(segments_bs)
    return size, dtype


def scan(
    v_bsmhp: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    da_bsh: Tensor,
    w_now_bsh: Tensor,
    w_later_bsh: Tensor,
    state_bhpr: Tensor,
    path: SsdPath,
    segments_bs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`ssd` for tensors that are known to fit together, which takes a token longer to check than to scan."""
    s, dtype = v_bsmhp.shape[1], torch.promote_types(v_bsmhp.dtype, torch.float32)
    sequence = (v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, w_now_bsh, w_later_bsh)
    recalculates = path.algorithm == "serial_recalculated"
    path.check_kernels()
    # The recurrence itself is the shortest way through one token, unless a kernel is asked for by name.
    named = asked() if path.backend == "auto" else path.backend
    kernel = None
    if recalculates and (s > 1 or named != "auto"):
        kernel = SSD.choose(path.backend, *sequence, state_bhpr, segments_bs)
    state_bhpr = cast(state_bhpr, dtype)
    if s == 0:
        return v_bsmhp.clone(), state_bhpr.clone()
    with full_precision(v_bsmhp.device):
        if kernel is not None:
            y_bsmhp, state_bhpr = kernel(*sequence, state_bhpr, segments_bs, path.chunk_len or 0)
            return y_bsmhp, state_bhpr
        if s == 1:
            v, b, c, da, w_now, w_later = [cast(tensor[:, 0], dtype) for tensor in sequence]
            w_later = w_now if w_later_bsh is w_now_bsh else w_later
            y_bmhp, state_bhpr = one_token(v, b, c, da, w_now, w_later, state_bhpr)
            return cast(y_bmhp[:, None], v_bsmhp.dtype), state_bhpr
        if recalculates:
            y_bsmhp, state_bhpr = SSD.run_plainly(*sequence, state_bhpr, segments_bs, path.chunk_len or 0)
            return y_bsmhp, state_bhpr
        return in_chunks(IN_CHUNKS[path.algorithm], *sequence, state_bhpr, segments_bs, path.chunk_len or 0)


def in_chunks(
    algorithm: Callable[[SsdChunks, Tensor], tuple[Tensor, Tensor]],
    v_bsmhp: Tensor,
    b_bsmgr: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor]:
    """`SSD`'s inputs through an algorithm that takes all chunks at once."""
    *coefficients, state_bhpr, segments_bs, chunk_len = others
    s, dtype = v_bsmhp.shape[1], state_bhpr.dtype
    chunk_len = min(chunk_len or default_chunk_len(v_bsmhp, b_bsmgr), s)
    v, b, c, da, w_now, w_later = (tensor.to(dtype) for tensor in (v_bsmhp, b_bsmgr, *coefficients))
    chunks = into_chunks(v, b, c, da, w_now, w_later, segments_bs, chunk_len)
    y_bnlmgqp, state_bgrqp = algorithm(chunks, to_core(state_bhpr, b_bsmgr.shape[3]))
    y_bsmhp = y_bnlmgqp.flatten(4, 5).flatten(1, 2)[:, :s]
    return y_bsmhp.to(v_bsmhp.dtype), from_core(state_bgrqp)


def one_token(
    v_bmhp: Tensor,
    b_bmgr: Tensor,
    c_bmgr: Tensor,
    da_bh: Tensor,
    w_now_bh: Tensor,
    w_later_bh: Tensor,
    state_bhpr: Tensor,
) -> tuple[Tensor, Tensor]:
    """The recurrence itself, for decoding: as few passes over the state as there are."""
    decay_bh11 = da_bh.exp()[..., None, None]
    held_bhpr = state_bhpr.mul_(decay_bh11) if may_overwrite() else decay_bh11 * state_bhpr
    # Without gradients nobody else needs the decayed state: writing into it saves the pages of a second one.
    in_place = not torch.is_grad_enabled()
    if w_now_bh is w_later_bh:
        state_bhpr = add_write(held_bhpr, w_later_bh, v_bmhp, b_bmgr, in_place=in_place)
        return read_state(state_bhpr, c_bmgr), state_bhpr
    groups = b_bmgr.shape[2]
    held_bmhp = read_state(held_bhpr, c_bmgr)
    match_bgmj = c_bmgr.transpose(1, 2) @ b_bmgr.transpose(1, 2).mT
    own_bgqmp = match_bgmj[:, :, None] @ v_bmhp.transpose(1, 2).unflatten(1, (groups, -1))
    y_bmhp = torch.addcmul(held_bmhp, own_bgqmp.flatten(1, 2).transpose(1, 2), w_now_bh[:, None, :, None])
    return y_bmhp, add_write(held_bhpr, w_later_bh, v_bmhp, b_bmgr, in_place=in_place)


def read_state(state_bhpr: Tensor, c_bmgr: Tensor) -> Tensor:
    """`y[m] = state c[m]`."""
    b, h, p, r = state_bhpr.shape
    g = c_bmgr.shape[2]
    c_bg1mr, state_bgqpr = c_bmgr.transpose(1, 2)[:, :, None], state_bhpr.view(b, g, h // g, p, r)
    # Rows times a transposed matrix, head by head: other ways to batch this product take several times as long.
    return (c_bg1mr @ state_bgqpr.mT).flatten(1, 2).transpose(1, 2)


def add_write(
    state_bhpr: Tensor, weight_bh: Tensor, v_bmhp: Tensor, b_bmgr: Tensor, *, in_place: bool = False
) -> Tensor:
    """`state + weight u` with `u = sum_m v[m] (x) b[m]`."""
    (b, h, p, r), m, g = state_bhpr.shape, v_bmhp.shape[1], b_bmgr.shape[2]
    v_bmgqp = (weight_bh[:, None, :, None] * v_bmhp).view(b, m, g, h // g, p)
    state_bgqpr = state_bhpr.view(b, g, h // g, p, r)
    for rank in range(m):
        factors = (v_bmgqp[:, rank, ..., None], b_bmgr[:, rank, :, None, None])
        state_bgqpr = state_bgqpr.addcmul_(*factors) if in_place else state_bgqpr.addcmul(*factors)
    return state_bhpr if in_place else state_bgqpr.flatten(1, 2)


def into_chunks(
    v_bsmhp: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    da_bsh: Tensor,
    w_now_bsh: Tensor,
    w_later_bsh: Tensor,
    segments_bs: Tensor | None,
    chunk_len: int,
) -> SsdChunks:
    """Cut into chunks, the last one filled up with zeros: no decay, no write, so the state passes through unchanged."""
    groups = b_bsmgr.shape[3]
    missing = -v_bsmhp.shape[1] % chunk_len

    def chunked(tensor: Tensor) -> Tensor:
        if missing:
            tensor = torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
        return tensor.unflatten(1, (-1, chunk_len))

    segments_bnl = before_bn = None
    if segments_bs is not None:
        last_bs = segments_bs[:, -1:].expand(-1, missing)
        segments_bnl = torch.cat([segments_bs, last_bs], 1).unflatten(1, (-1, chunk_len))
        before_bn = torch.cat([segments_bs[:, :1], segments_bnl[:, :-1, -1]], 1)
    return SsdChunks(
        v_bnlmgqp=chunked(v_bsmhp).unflatten(4, (groups, -1)),
        b_bnlmgr=chunked(b_bsmgr),
        c_bnlmgr=chunked(c_bsmgr),
        da_bnlgq=chunked(da_bsh).unflatten(3, (groups, -1)),
        w_now_bnlgq=chunked(w_now_bsh).unflatten(3, (groups, -1)),
        w_later_bnlgq=chunked(w_later_bsh).unflatten(3, (groups, -1)),
        segments_bnl=segments_bnl,
        before_bn=before_bn,
    )


def learned_start(learned_hpr: Tensor, c_bsmgr: Tensor, da_bsh: Tensor, segments_bs: Tensor) -> tuple[Tensor, Tensor]:
    """What a learned state adds to `ssd`'s outputs when every segment but the first starts from it instead of zero.

    The recurrence is linear in its state, so this is read by itself: `y_t = exp(a_t) h c_t` with `a_t` the sum of the
    log-decays since the segment's start.
    """
    wide = da_bsh.dtype if da_bsh.device.type == "mps" else torch.float64
    sum_bsh = da_bsh.cumsum(1, dtype=wide)
    since_bsh = sum_bsh - before_segment(sum_bsh, segments_bs, sum_bsh.new_zeros(()))
    later_bs1 = (segments_bs != segments_bs[:, :1])[..., None]
    decay_bsh = since_bsh.to(da_bsh.dtype).exp() * later_bs1
    with full_precision(c_bsmgr.device):
        learned_gqpr = learned_hpr.to(da_bsh.dtype).unflatten(0, (c_bsmgr.shape[3], -1))
        read_bsmgqp = torch.einsum("bsmgr,gqpr->bsmgqp", c_bsmgr.to(da_bsh.dtype), learned_gqpr)
    y_bsmhp = read_bsmgqp.flatten(3, 4) * decay_bsh[:, :, None, :, None]
    if segments_bs.shape[1] == 0:
        return y_bsmhp, torch.zeros_like(learned_hpr)
    return y_bsmhp, learned_hpr * decay_bsh[:, -1, :, None, None]
