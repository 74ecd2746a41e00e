"""Mamba-1's selective scan: one decay per channel and state entry, evaluated block by block.

A block is a run of tokens whose states fit in cache. Its arrays are `lbgrp`: token, row, group, state entry, and `p`,
the channel in a group. Everything is computed for a whole block at once, the recurrence in a number of operations that
grows with the logarithm of its length. The backward pass keeps the inputs and recomputes the rest.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.arguments import check_flag
from mambakit.ops.activations import softplus
from mambakit.ops.backends import TORCH
from mambakit.ops.operation import TorchOperation
from mambakit.ops.shapes import bind, check_floats, check_segments, full_precision

BLOCK_ELEMENTS = 1 << 18
"""State entries in each array of a block: a megabyte or so, so that the passes over a block stay in cache."""

BLOCK_TOKENS = 16
"""Fewest tokens in a block. The backward pass keeps one state per block, so this bounds its memory."""


def selective_scan(
    x_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b_bsgr: Tensor,
    c_bsgr: Tensor,
    state_bir: Tensor | None = None,
    *,
    skip_i: Tensor | None = None,
    z_bsi: Tensor | None = None,
    dt_bias_i: Tensor | None = None,
    dt_softplus: bool = False,
    segments_bs: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Scan `x` into a state per channel and read it back.

        h_t[i, r] = exp(dt_t[i] a[i, r]) h_{t-1}[i, r] + dt_t[i] b_t[g, r] x_t[i]
        y_t[i]    = sum_r h_t[i, r] c_t[g, r],    g = the group of channel i

    `dt` is positive and `a` negative; each of the `g` groups is a run of `i / g` channels. Returns `y_bsi` in the dtype
    of `x` and the state after the last token in at least float32, both differentiable once. Splitting the sequence
    anywhere and passing the state on gives the same result as one call.

    Around the scan, each if given: `dt_bias` is added to `dt` and then, if `dt_softplus`, its softplus taken; `skip x`
    is added to `y`, and then `silu(z)` multiplied. The fused kernel (`backend` "cpu", taken by "auto" where it applies)
    does all of it in one pass, "torch" with operators; see docs/mamba1_scan.md.

    `segments_bs` packs several sequences into a row: ids never decrease, the entering state belongs to the first
    token's segment, and the state restarts from zero at every new id. With a complex `a` every entry stands for a
    conjugate pair and `y` is twice the real part of the sum. Raises `ValueError` for sizes, dtypes or devices that do
    not fit.

    Examples:
        >>> b, s, i, g, r = 2, 100, 32, 1, 16
        >>> x_bsi, dt_bsi, a_ir = torch.randn(b, s, i), torch.randn(b, s, i), -torch.rand(i, r)
        >>> b_bsgr, c_bsgr = torch.randn(b, s, g, r), torch.randn(b, s, g, r)
        >>> y_bsi, state_bir = mk.selective_scan(x_bsi, dt_bsi, a_ir, b_bsgr, c_bsgr, dt_softplus=True)
    """
    tensors = (x_bsi, dt_bsi, a_ir, b_bsgr, c_bsgr, state_bir, skip_i, z_bsi, dt_bias_i)
    check_sizes(*tensors)
    named: dict[str, Tensor | None] = dict(zip(SELECTIVE_SCAN.names, tensors, strict=False))
    if segments_bs is not None:
        bind({"x_bsi": x_bsi}, segments_bs=segments_bs)
        check_segments(segments_bs)
    check_flag("dt_softplus", dt_softplus)
    dtype = state_dtype(named)
    fresh_bs = None
    if segments_bs is not None and x_bsi.shape[1]:
        fresh_bs = F.pad(segments_bs[:, 1:] != segments_bs[:, :-1], (1, 0))
    kernel = SELECTIVE_SCAN.choose(backend, *tensors, segments_bs)
    if kernel is not None:
        # The state has the dtype of `a`, which is not the narrow one of `x`.
        y_bsi, last_bir = kernel(x_bsi, dt_bsi, a_ir.to(dtype), *tensors[3:], fresh_bs, dt_softplus)
        return y_bsi.to(x_bsi.dtype), last_bir
    if dt_bias_i is not None:
        dt_bsi = dt_bsi.to(torch.promote_types(dt_bsi.dtype, torch.float32)) + dt_bias_i
    dt_bsi = softplus(dt_bsi) if dt_softplus else dt_bsi
    # Rounded once, at the end.
    wide = torch.promote_types(x_bsi.dtype, torch.float32)
    wide_bsi = x_bsi if skip_i is None and z_bsi is None else x_bsi.to(wide)
    y_bsi, last_bir = scan_plainly(wide_bsi, dt_bsi, a_ir.to(dtype), b_bsgr, c_bsgr, state_bir, fresh_bs)
    y_bsi = y_bsi if skip_i is None else y_bsi + skip_i * wide_bsi
    y_bsi = y_bsi if z_bsi is None else y_bsi * F.silu(z_bsi.to(wide))
    return y_bsi.to(x_bsi.dtype), last_bir


def check_sizes(
    x_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b_bsgr: Tensor,
    c_bsgr: Tensor,
    state_bir: Tensor | None,
    skip_i: Tensor | None,
    z_bsi: Tensor | None,
    dt_bias_i: Tensor | None,
    fresh_bs: Tensor | None = None,
    dt_softplus: bool = False,
) -> None:
    required = {"x_bsi": x_bsi, "dt_bsi": dt_bsi, "a_ir": a_ir, "b_bsgr": b_bsgr, "c_bsgr": c_bsgr}
    optional = {"state_bir": state_bir, "skip_i": skip_i, "z_bsi": z_bsi, "dt_bias_i": dt_bias_i}
    size = bind(required, **optional, fresh_bs=fresh_bs)
    if size.g == 0 or size.i % size.g:
        raise ValueError(f"axis 'i' of x_bsi is {size.i}, not a multiple of the {size.g} groups of b_bsgr")
    if fresh_bs is not None and fresh_bs.dtype != torch.bool:
        raise ValueError(f"fresh_bs has to be boolean, got {fresh_bs.dtype}")


def scan_plainly(
    x_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b_bsgr: Tensor,
    c_bsgr: Tensor,
    state_bir: Tensor | None,
    fresh_bs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The scan alone in torch's operators, in the dtype of `a`; `fresh` marks tokens that start from a zero state."""
    dtype, (batch, length, _) = a_ir.dtype, x_bsi.shape
    state_bir = a_ir.new_zeros(batch, *a_ir.shape) if state_bir is None else state_bir.to(dtype)
    if dtype.is_complex:
        b_bsgr, c_bsgr = b_bsgr.to(dtype), 2 * c_bsgr.to(dtype)
    if length == 0:
        return x_bsi.clone(), state_bir.clone()
    if length == 1:
        a_ir = finite(a_ir) if torch.is_grad_enabled() else a_ir
        y_bi, state_bir = scan_token(x_bsi[:, 0], dt_bsi[:, 0], a_ir, b_bsgr[:, 0], c_bsgr[:, 0], state_bir)
        return y_bi[:, None], state_bir
    around = (None, None, None)
    y_bsi, last_bir = SELECTIVE_SCAN.run_plainly(
        x_bsi, dt_bsi, a_ir, b_bsgr, c_bsgr, state_bir, *around, fresh_bs, False
    )
    return y_bsi, last_bir


def state_dtype(named: dict[str, Tensor | None]) -> torch.dtype:
    """Check the dtypes of all inputs and return that of the state, which is complex if `a` is."""
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    complex_names = {name for name, tensor in given.items() if tensor.is_complex()}
    real: dict[str, Tensor | None] = {**given}
    if not complex_names:
        return check_floats({"x_bsi": real.pop("x_bsi")}, real)
    if complex_names - {"a_ir", "b_bsgr", "c_bsgr", "state_bir"} or "a_ir" not in complex_names:
        raise ValueError(
            f"{sorted(complex_names)} complex: a_ir may be, and with it b_bsgr, c_bsgr and state_bir, but nothing else"
        )
    real |= {name: given[name].real for name in complex_names}
    return torch.promote_types(check_floats({"x_bsi": real.pop("x_bsi")}, real), torch.complex32)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """To `dtype`. From complex to real it keeps the real part, which holds for outputs and for gradients alike."""
    return (tensor if dtype.is_complex or not tensor.is_complex() else tensor.real).to(dtype)


def scan_token(
    x_bi: Tensor, dt_bi: Tensor, a_ir: Tensor, b_bgr: Tensor, c_bgr: Tensor, state_bir: Tensor
) -> tuple[Tensor, Tensor]:
    """`selective_scan` of one token, out of elementwise operations and a sum, which autocast leaves alone."""
    groups, dtype = b_bgr.shape[1], a_ir.dtype
    dt_bgp, x_bgp = (t.to(dtype).unflatten(1, (groups, -1)) for t in (dt_bi, x_bi))
    decay_bgpr = ((math.log2(math.e) * dt_bgp)[..., None] * a_ir.unflatten(0, (groups, -1))).exp2_()
    state_bgpr = b_bgr.to(dtype)[:, :, None] * (dt_bgp * x_bgp)[..., None]
    state_bgpr.addcmul_(decay_bgpr, state_bir.unflatten(1, (groups, -1)))
    y_bgp = (state_bgpr * c_bgr.to(dtype)[:, :, None]).sum(dim=-1)
    return cast(y_bgp.flatten(1), x_bi.dtype), state_bgpr.flatten(1, 2)


def finite(a_ir: Tensor) -> Tensor:
    """With the same decays: in the gradient of `dt` it multiplies one of zero, of which -inf would make no number."""
    return a_ir if a_ir.is_complex() else a_ir.clamp(min=torch.finfo(a_ir.dtype).min)


class Tokens(NamedTuple):
    """What the scan reads, ready to broadcast against `lbgrp`. The leading axes are `sb`, or `lb` in one block."""

    x_g1p: Tensor
    dt_g1p: Tensor
    b_g1r: Tensor
    c_g1r: Tensor
    fresh_111: Tensor | None
    """True where a token starts from a zero state."""

    def block(self, tokens: slice, rows: slice, dtype: torch.dtype) -> "Tokens":
        x_lbg1p, dt_lbg1p, b_lbg1r, c_lbg1r = (t[tokens, rows].to(dtype) for t in self[:4])
        fresh_lb111 = None if self.fresh_111 is None else self.fresh_111[tokens, rows]
        return Tokens(x_lbg1p, dt_lbg1p, b_lbg1r, c_lbg1r, fresh_lb111)


def view_tokens(x_bsi: Tensor, dt_bsi: Tensor, b_bsgr: Tensor, c_bsgr: Tensor, fresh_bs: Tensor | None) -> Tokens:
    x_sbg1p, dt_sbg1p, b_sbg1r, c_sbg1r = (time_first(t, b_bsgr.shape[2]) for t in (x_bsi, dt_bsi, b_bsgr, c_bsgr))
    fresh_sb111 = None if fresh_bs is None else fresh_bs.T[..., None, None, None]
    return Tokens(x_sbg1p, dt_sbg1p, b_sbg1r, c_sbg1r, fresh_sb111)


def time_first(per_token_bs: Tensor, ngroups: int) -> Tensor:
    """A view of `bsi` as `sbg1p`, or of `bsgr` as `sbg1r`."""
    if per_token_bs.dim() == 3:
        per_token_bs = per_token_bs.unflatten(-1, (ngroups, per_token_bs.shape[-1] // ngroups))
    return per_token_bs.unsqueeze(-2).transpose(0, 1)


def by_group(state_ir: Tensor, ngroups: int) -> Tensor:
    """`...ir` to `...grp`. Channels come last: there are many, and vector operations run along the last axis."""
    return state_ir.unflatten(-2, (ngroups, state_ir.shape[-2] // ngroups)).mT.contiguous()


def by_channel(state_grp: Tensor) -> Tensor:
    """`...grp` back to `...ir`."""
    return state_grp.mT.flatten(-3, -2)


def plan_blocks(x_bsi: Tensor, a_ir: Tensor) -> tuple[list[slice], list[slice]]:
    """Slices of rows and of tokens: as many rows as leave room for `BLOCK_TOKENS`, then as many tokens as fit."""
    row_size = max(1, a_ir.numel())
    nrows = min(max(1, len(x_bsi)), max(1, BLOCK_ELEMENTS // (BLOCK_TOKENS * row_size)))
    ntokens = max(BLOCK_TOKENS, BLOCK_ELEMENTS // (nrows * row_size))
    steps = ((x_bsi.shape[0], nrows), (x_bsi.shape[1], ntokens))
    rows, tokens = ([slice(start, start + step) for start in range(0, size, step)] for size, step in steps)
    return rows, tokens


def scan_block(tokens: Tokens, a_grp: Tensor, state_bgrp: Tensor) -> tuple[Tensor, Tensor]:
    """The decay of each token of a block, and the state after it."""
    # exp2 takes half the time of exp on CPU.
    decay_lbgrp = (tokens.dt_g1p * math.log2(math.e) * a_grp).exp2_()
    if tokens.fresh_111 is not None:
        decay_lbgrp.masked_fill_(tokens.fresh_111, 0)
    state_lbgrp = tokens.b_g1r.mT * (tokens.dt_g1p * tokens.x_g1p)
    state_lbgrp[0].addcmul_(decay_lbgrp[0], state_bgrp)
    accumulate_(decay_lbgrp[1:], state_lbgrp)
    return decay_lbgrp, state_lbgrp


def accumulate_(link: Tensor, value: Tensor, *, back: bool = False) -> None:
    """`value[t] += link[t - 1] value[t - 1]` from the first token on, or back `value[t] += link[t] value[t + 1]`.

    In place: neighbours are joined to pairs, the sequence of pairs, half as long, is solved, and the tokens between are
    filled in.
    """
    length = len(value)
    if length < 2:
        return
    pairs, between = length // 2, (length - 1) // 2
    start = length % 2 if back else 0
    inside, across = link[start::2][:pairs], link[start + 1 :: 2][: pairs - 1]
    left, right = value[start::2][:pairs], value[start + 1 :: 2][:pairs]
    joined, partner = (left, right) if back else (right, left)
    joined.addcmul_(inside, partner)
    if pairs > 1:
        accumulate_(across * (inside[:-1] if back else inside[1:]), joined, back=back)
    if between and back:
        value[1 - start :: 2][:between].addcmul_(link[1 - start :: 2][:between], joined[-between:])
    elif between:
        value[2::2].addcmul_(link[1::2][:between], joined[:between])


def scan_block_back(c_lbg1r: Tensor, decay_lbgrp: Tensor, dy_lbg1p: Tensor, d_last_bgrp: Tensor) -> Tensor:
    """The gradient of the state after each token: g_t = c_t dy_t + decay_{t+1} g_{t+1}."""
    d_state_lbgrp = c_lbg1r.mT * dy_lbg1p
    d_state_lbgrp[-1] += d_last_bgrp
    accumulate_(decay_lbgrp[1:], d_state_lbgrp, back=True)
    return d_state_lbgrp


def block_gradients(
    tokens: Tokens, a_grp: Tensor, state_bgrp: Tensor, dy_lbg1p: Tensor, d_last_bgrp: Tensor, wanted: set[str]
) -> dict[str, Tensor]:
    """The wanted gradients of one block, and always that of the `state` that entered it."""
    decay_lbgrp, state_lbgrp = scan_block(tokens, a_grp, state_bgrp)
    # The adjoint of a factor is its conjugate; a real one is not copied. A lazy `conj` is lost when autograd is traced.
    factors = (tokens.b_g1r, tokens.c_g1r, a_grp, state_bgrp, decay_lbgrp, state_lbgrp)
    b_lbg1r, c_lbg1r, a_grp, state_bgrp, decay_lbgrp, state_lbgrp = (t.conj_physical() for t in factors)
    d_state_lbgrp = scan_block_back(c_lbg1r, decay_lbgrp, dy_lbg1p, d_last_bgrp)
    grads = {"state": decay_lbgrp[0] * d_state_lbgrp[0]}
    # A row times a transposed matrix: as a matrix times a column, the batched product takes ten times as long.
    if "b" in wanted:
        grads["b"] = (tokens.dt_g1p * tokens.x_g1p) @ d_state_lbgrp.mT
    if "c" in wanted:
        grads["c"] = dy_lbg1p @ state_lbgrp.mT
    d_write_lbg1p = b_lbg1r @ d_state_lbgrp
    if "x" in wanted:
        grads["x"] = tokens.dt_g1p * d_write_lbg1p
    if wanted & {"dt", "a"}:
        d_exponent_lbgrp = d_state_lbgrp.mul_(decay_lbgrp)
        d_exponent_lbgrp[0] *= state_bgrp
        d_exponent_lbgrp[1:] *= state_lbgrp[:-1]
        grads["a"] = (d_exponent_lbgrp * tokens.dt_g1p).sum(dim=(0, 1))
        d_decay_lbg1p = d_exponent_lbgrp.mul_(a_grp).sum(dim=-2, keepdim=True)
        grads["dt"] = d_decay_lbg1p + tokens.x_g1p * d_write_lbg1p
    return grads


def scan_tokens(
    x_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b_bsgr: Tensor,
    c_bsgr: Tensor,
    state_bir: Tensor,
    *others: Any,
) -> list[Tensor]:
    """`SELECTIVE_SCAN` with a state and nothing around it, `a` and the state in the dtype to compute in."""
    *_, fresh_bs, _ = others
    g, dtype = b_bsgr.shape[2], a_ir.dtype
    tokens, a_grp = view_tokens(x_bsi, dt_bsi, b_bsgr, c_bsgr, fresh_bs), by_group(a_ir, g)
    y_bsi, last_bir = x_bsi.new_empty(x_bsi.shape), state_bir.new_empty(state_bir.shape)
    y_sbg1p = time_first(y_bsi, g)
    row_slices, token_slices = plan_blocks(x_bsi, a_ir)
    with full_precision(x_bsi.device):
        for rows in row_slices:
            state_bgrp = by_group(state_bir[rows], g)
            for span in token_slices:
                block = tokens.block(span, rows, dtype)
                _, state_lbgrp = scan_block(block, a_grp, state_bgrp)
                y_sbg1p[span, rows] = cast(block.c_g1r @ state_lbgrp, y_bsi.dtype)
                state_bgrp = state_lbgrp[-1]
            last_bir[rows] = by_channel(state_bgrp)
    return [y_bsi, last_bir]


def scan_tokens_backward(output_grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor | None]:
    """The wanted gradients of `scan_tokens`'s inputs in their dtypes."""
    dy_bsi, d_last_bir = output_grads
    x_bsi, dt_bsi, a_ir, b_bsgr, c_bsgr, state_bir, *_, fresh_bs, _, needs = inputs_and_needs
    inputs = {"x": x_bsi, "dt": dt_bsi, "a": a_ir, "b": b_bsgr, "c": c_bsgr, "state": state_bir}
    wanted = {name for name, need in zip(inputs, needs, strict=False) if need}
    grads = {name: t.new_empty(t.shape if name in wanted else 0) for name, t in inputs.items()}
    g, dtype = b_bsgr.shape[2], a_ir.dtype
    tokens, a_grp = view_tokens(x_bsi, dt_bsi, b_bsgr, c_bsgr, fresh_bs), by_group(finite(a_ir), g)
    dy_sbg1p, d_a_grp = time_first(dy_bsi, g), torch.zeros_like(a_grp)
    per_token = {name: time_first(grads[name], g) for name in wanted & {"x", "dt", "b", "c"}}
    row_slices, token_slices = plan_blocks(x_bsi, a_ir)
    with full_precision(x_bsi.device):
        for rows in row_slices:
            entering = [by_group(state_bir[rows], g)]
            for span in token_slices[:-1]:
                _, state_lbgrp = scan_block(tokens.block(span, rows, dtype), a_grp, entering[-1])
                entering.append(state_lbgrp[-1].clone())
            d_state_bgrp = by_group(d_last_bir[rows], g)
            for span in reversed(token_slices):
                block, dy_lbg1p = tokens.block(span, rows, dtype), dy_sbg1p[span, rows].to(dtype)
                block_grads = block_gradients(block, a_grp, entering.pop(), dy_lbg1p, d_state_bgrp, wanted)
                d_state_bgrp = block_grads["state"]
                for name, d_sbg1 in per_token.items():
                    d_sbg1[span, rows] = cast(block_grads[name], d_sbg1.dtype)
                if "a" in wanted:
                    d_a_grp += block_grads["a"]
            if "state" in wanted:
                grads["state"][rows] = by_channel(d_state_bgrp)
    if "a" in wanted:
        grads["a"].copy_(by_channel(d_a_grp))
    return [*grads.values(), None, None, None]


SELECTIVE_SCAN = TorchOperation(
    "selective_scan",
    "Tensor x_bsi, Tensor dt_bsi, Tensor a_ir, Tensor b_bsgr, Tensor c_bsgr, Tensor? state_bir, Tensor? skip_i, "
    "Tensor? z_bsi, Tensor? dt_bias_i, Tensor? fresh_bs, bool dt_softplus",
    lambda x_bsi, dt_bsi, a_ir, *_: [(x_bsi, x_bsi.shape), (a_ir, (x_bsi.shape[0], *a_ir.shape))],
    check=check_sizes,
    floats=9,
)
"""The scan with what stands around it; `fresh` marks tokens that start from a zero state."""
SELECTIVE_SCAN.implement(TORCH, scan_tokens, scan_tokens_backward)
