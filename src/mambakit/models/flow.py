"""The way of tokens through the layers of a stack: residuals, streams, rows, the gradient horizon, checkpoints."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mambakit.blocks.caches import detach
from mambakit.models.class_tokens import Splice, splice, splice_flags

if TYPE_CHECKING:
    from mambakit.models.stack import Stack

StackCache = tuple[Any, ...]
"""One block cache per virtual layer; inside a `ClassCache` where class latents have cursors."""
Call = Callable[[Any, Tensor, Any, Tensor | None], tuple[Tensor, Any]]
"""`call(layer, x, cache, mask) -> (delta, cache)`."""


class Flow(NamedTuple):
    """What one layer hands to the next."""

    x: Tensor
    mask_bs: Tensor | None = None
    streams: Tensor | None = None
    """MultiGate's, with an axis before the last."""
    carry: Tensor | None = None
    """Zero, with the gradient of the stack's input: its way around the layers that have none."""

    def insert(self, piece: Splice) -> "Flow":
        """A row enters the token stream and all gated streams alike."""
        rows_nd, index = piece
        streams = carry = None
        if self.streams is not None:
            rows_nkd = rows_nd[:, None].expand(-1, self.streams.shape[2], -1)
            streams = splice(self.streams, rows_nkd, index)
        if self.carry is not None:
            carry = splice(self.carry, rows_nd - rows_nd.detach(), index)
        return Flow(splice(self.x, rows_nd, index), splice_flags(self.mask_bs, index), streams, carry)

    def take_up_carry(self) -> "Flow":
        if self.carry is None:
            return self
        streams = None if self.streams is None else self.streams + self.carry[..., None, :]
        return Flow(self.x + self.carry, self.mask_bs, streams)


def run(
    stack: "Stack",
    flow: Flow,
    cache: StackCache | None,
    call: Call,
    splices: dict[int, list[Splice]] | None = None,
) -> tuple[Flow, StackCache]:
    """All layers, each by `call(layer, x, cache, mask)`: the one place for residuals, rows and the horizon."""
    flow = flow._replace(streams=stack.residual.seed(flow.x))
    inserted, cut = splices or {}, cut_of(stack)
    if cut:
        flow = flow._replace(carry=flow.x - flow.x.detach())
    after = []
    for q, (real, entering) in enumerate(zip(stack.order, check_slots(len(stack.order), cache), strict=True)):
        if cut and q == cut:
            flow = flow.take_up_carry()
        for piece in inserted.get(q, ()):
            flow = flow.insert(piece)
        with torch.no_grad() if q < cut else nullcontext():
            if splices is not None and entering is not None and flow.x.shape[1] == 0:
                delta, leaving = flow.x, entering  # no token or row yet: untouched to the last digit
            else:
                delta, leaving = call(stack.layers[real], flow.x, entering, flow.mask_bs)
            x, streams = stack.residual.join(q, flow.x, flow.streams, delta)
        flow = flow._replace(x=x, streams=streams)
        after.append(detach(leaving) if q < cut else leaving)
    return flow.take_up_carry() if cut == len(stack.order) else flow, tuple(after)


def cut_of(stack: "Stack") -> int:
    """How many layers from below run without gradients."""
    if stack.grad_horizon is None or not torch.is_grad_enabled():
        return 0
    if stack.grad_horizon < 0:
        raise ValueError(f"grad_horizon = {stack.grad_horizon} has to be 0 or more layers, or None for all")
    return max(0, len(stack.order) - stack.grad_horizon)


def caller(checkpointed: bool, options: dict[str, Any]) -> Call:
    """How a layer is called in `forward`."""

    def call(layer: nn.Module, x_bsd: Tensor, cache: Any, mask_bs: Tensor | None) -> tuple[Tensor, Any]:
        if checkpointed and torch.is_grad_enabled():
            # Nothing in a layer is random.
            keep = {"use_reentrant": False, "preserve_rng_state": False}
            return cast(Any, checkpoint(layer, x_bsd, cache, mask_bs=mask_bs, **keep, **options))
        return layer(x_bsd, cache, mask_bs=mask_bs, **options)

    return call


def check_slots(n: int, cache: StackCache | None) -> StackCache:
    """A cache for each of `n` virtual layers."""
    if cache is None:
        return (None,) * n
    if hasattr(cache, "_fields"):
        raise ValueError(f"a stack's cache is a tuple of its layers' caches, got a {type(cache).__name__}")
    if len(cache) != n:
        raise ValueError(f"the cache is of {len(cache)} layers, but this stack has {n}")
    return cache


def without_absent(x_bsd: Tensor, mask_bs: Tensor | None) -> Tensor:
    """Zero where there is no token."""
    return x_bsd if mask_bs is None else x_bsd.masked_fill(~mask_bs.bool()[..., None], 0)
