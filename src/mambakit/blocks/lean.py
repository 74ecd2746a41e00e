"""A block's call that keeps its input alone for the backward, and goes back through its heads a few at a time.

Heads meet in the projections and nowhere else, but for a norm over all of them. So the backward takes the block for one
that is divided among ranks, which take turns; `lean_backward.py` has it. See docs/decisions/0010-lean-blocks.md.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mambakit.blocks.family import family_of
from mambakit.blocks.lean_backward import Backward, Call, is_outside, put_in, shell, wide
from mambakit.blocks.lean_plan import slabs
from mambakit.blocks.modules import is_plain
from mambakit.ops.backends import PLAIN_TENSORS, asked, unseen, use_backend
from mambakit.ops.boundary import boundary
from mambakit.ops.shapes import is_autocast
from mambakit.ops.ssd_path import SsdPath

LONGEST = 256
"""Tokens of a piece on the way forward: with more, products are hardly faster."""


def run_lean(
    block: Any, x_bsd: Tensor, cache: Any, path: SsdPath, segments_bs: Tensor | None, lengths_b: Tensor | None
) -> tuple[Tensor, Any]:
    """`block.run`, to the last digits of the arithmetic. ValueError for a block that is more than its family says."""
    reason = why_not(block)
    if reason is not None:
        raise ValueError(f"SsdPath(lean={path.lean}) cannot run this {type(block).__name__}: {reason}; leave lean out")
    parameters = dict(block.named_parameters())
    carried = {name: without_room(t) for name, t in cache._asdict().items() if isinstance(t, Tensor)}
    # Without its tensors, which would be kept for nothing.
    kind = cache._replace(**dict.fromkeys(carried))
    call = Call(block, kind, path, segments_bs, lengths_b, tuple(parameters), tuple(carried))
    y_bsd, *after = Lean.apply(call, x_bsd, *carried.values(), *parameters.values())  # type: ignore[misc]
    return y_bsd, cache._replace(**dict(zip(carried, after, strict=True)))


def without_room(t: Tensor) -> Tensor:
    """Zeros of a fresh cache need not be kept one by one."""
    return t if t.requires_grad or t.any() else t.new_zeros(()).expand(t.shape)


def why_not(block: Any) -> str | None:
    if boundary() is not None:
        return "its tokens are shares of sequences that other ranks go on with"
    if torch._C._are_functorch_transforms_active():
        return "torch.func's transforms look at every operation"
    if type(block) is not family_of(block).block:
        return "it is a class of its own"
    known = kinds(block.config)
    for name, module in block.named_modules():
        if name and (name not in known or not is_plain(module, known[name])):
            return f"{name} is wrapped or hooked"
    if any(type(t) not in PLAIN_TENSORS for t in block.parameters()):
        return "its parameters are not plain tensors"
    return None


def forward_piece(call: Call, x_bsd: Tensor, parameters: dict[str, Tensor]) -> int:
    """Tokens whose way through the block takes no more than the backward will: the gradients are not there yet."""
    config, (_, inner) = call.config, parameters["out_proj.weight"].shape
    ranks, lines = 1, 0
    if call.block.lines_per_head:
        ranks, lines = config.ranks, 2 * config.nheads * config.ranks * config.state_rank
    alive = len(x_bsd) * (len(parameters["in_proj.weight"]) + (2 * ranks + 4) * inner + lines)
    share, tokens = call.path.lean or 0, x_bsd.numel()
    room = (1 + share) * sum(t.numel() for t in parameters.values()) + 2 * share * tokens
    return min(max(int(room / alive) // 32 * 32, 32), LONGEST)


@lru_cache(maxsize=64)
def kinds(config: Any) -> dict[str, type[nn.Module]]:
    """Of the modules of a block, by their names."""
    return {name: type(module) for name, module in family_of(config).block(config, device="meta").named_modules()}


class Lean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, x_bsd: Tensor, *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        carried = dict(zip(call.carried, tensors, strict=False))
        parameters = dict(zip(call.names, tensors[len(carried) :], strict=True))
        norm, (b, s, _) = call.block.outer_norm, x_bsd.shape
        made = shell(call.config)
        put_in(made, {name: t.detach() for name, t in parameters.items() if not is_outside(name, norm)})
        y_bsd, inverse_bs1 = None, None
        after: dict[str, list[Tensor]] = {name: [] for name in carried}
        for rows in slabs(b, s):
            cache = call.caches({name: t[rows].detach() for name, t in carried.items()})
            for piece in call.pieces(s, forward_piece(call, x_bsd[rows], parameters)):
                projected = F.linear(x_bsd[rows, piece], parameters["in_proj.weight"], parameters.get("in_proj.bias"))
                inner, cache = made.run(projected, cache, call.path, *call.of_rows(rows))
                if norm is not None:
                    inverse = torch.rsqrt(inner.to(wide(inner.dtype)).square().mean(-1, keepdim=True) + norm.eps)
                    inverse_bs1 = inverse.new_empty(b, s, 1) if inverse_bs1 is None else inverse_bs1
                    inverse_bs1[rows, piece] = inverse
                    inner = (inner * inverse * norm.weight).to(inner.dtype)
                y = F.linear(inner, parameters["out_proj.weight"], parameters.get("out_proj.bias"))
                y_bsd = y.new_empty(b, s, y.shape[-1]) if y_bsd is None else y_bsd
                y_bsd[rows, piece] = y
            for name in carried:
                after[name].append(getattr(cache, name))
        assert y_bsd is not None
        ctx.save_for_backward(x_bsd, *tensors)
        ctx.call, ctx.inverse_bs1, ctx.backend = call, inverse_bs1, asked()
        ctx.cast = torch.get_autocast_dtype(x_bsd.device.type) if is_autocast(x_bsd.device) else None
        # Not as a saved tensor: it can go as soon as the first sums are there.
        ctx.y, ctx.is_normed = (None if norm is None else (y_bsd.detach(), y_bsd._version)), norm is not None
        return y_bsd, *(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in after.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor | None, *d_after: Tensor | None) -> Any:  # type: ignore[override]
        call, (x_bsd, *tensors) = ctx.call, ctx.saved_tensors
        carried = dict(zip(call.carried, tensors, strict=False))
        parameters = dict(zip(call.names, tensors[len(carried) :], strict=True))
        d_y_bsd = x_bsd.new_zeros(x_bsd.shape, dtype=ctx.cast) if d_y is None else d_y
        products_bs1 = None
        if ctx.is_normed:
            if ctx.y is None:
                raise RuntimeError("a call with SsdPath(lean=...) can be gone back through once, retain_graph or not")
            (y_bsd, version), ctx.y = ctx.y, None
            if y_bsd._version != version:
                raise RuntimeError("the output of a block with SsdPath(lean=...) was changed in place")
            bias = parameters.get("out_proj.bias")
            y_bsd = y_bsd if bias is None else y_bsd - bias.to(y_bsd.dtype)
            both = (d_y_bsd[..., None, :].to(ctx.inverse_bs1.dtype), y_bsd[..., None].to(ctx.inverse_bs1.dtype))
            products_bs1 = (both[0] @ both[1])[..., 0]
            del both
            del y_bsd
        back = Backward(call, x_bsd, carried, parameters, ctx.needs_input_grad[1:], ctx.cast)
        with use_backend(ctx.backend), unseen():
            for rows in back.slabs:
                d_cache = dict(zip(carried, d_after, strict=True))
                back.go(back.slab(rows, d_y_bsd, d_cache, ctx.inverse_bs1, products_bs1))
        return None, *back.gradients()
