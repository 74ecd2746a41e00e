"""What wraps a stack: class latents, several residual streams, a gradient horizon, layers that are checkpointed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mambakit.blocks.caches import detach
from mambakit.models.class_tokens import Splice, splice, splice_flags
from mambakit.ops.backends import asked, use_backend
from mambakit.ops.boundary import Across, Boundary, boundary

if TYPE_CHECKING:
    from mambakit.models.stack import Stack

Call = Callable[..., tuple[Tensor, Any]]
"""`call(x, cache, mask_bs=mask) -> (delta, cache)`."""


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
    slots: Sequence[Any],
    calls: Sequence[Call],
    splices: Mapping[int, Sequence[Splice]] | None = None,
) -> tuple[Flow, tuple[Any, ...]]:
    """All layers, by the `calls` of their weights, with the rows that `splices` puts before them."""
    flow = flow._replace(streams=stack.residual.seed(flow.x))
    inserted, cut = splices or {}, cut_of(stack)
    if cut:
        flow = flow._replace(carry=flow.x - flow.x.detach())
    after = []
    for q, (real, entering) in enumerate(zip(stack.order, slots, strict=True)):
        if cut and q == cut:
            flow = flow.take_up_carry()
        for piece in inserted.get(q, ()):
            flow = flow.insert(piece)
        with torch.no_grad() if q < cut else nullcontext():
            if splices is not None and entering is not None and flow.x.shape[1] == 0:
                delta, leaving = flow.x, entering  # no token or row yet: untouched to the last digit
            else:
                delta, leaving = calls[real](flow.x, entering, mask_bs=flow.mask_bs)
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


def calls(stack: Any, options: Mapping[str, Any]) -> list[Call]:
    """How each set of weights is called; where layers are checkpointed, once more in the backward pass."""
    layers = [partial(layer, **options) for layer in stack.layers]
    if not (stack.checkpoint_layers and torch.is_grad_enabled()):
        return layers
    # Nothing in a layer is random.
    keep: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    backend, edge = asked(), boundary()
    if backend != "auto" or edge is not None:
        # The backward pass may run outside of what asks for it here.
        keep["context_fn"] = lambda: (nullcontext(), as_here(backend, edge))
    return [partial(checkpoint, layer, **keep) for layer in layers]


@contextmanager
def as_here(backend: str, edge: Boundary | None) -> Iterator[None]:
    with use_backend(backend), Across(edge):
        yield


def at_infinity(layer: Any, x_bd: Tensor, cache: None, mask_bs: None) -> tuple[Tensor, None]:
    """`step_infinite` as a call."""
    return layer.step_infinite(x_bd), None
