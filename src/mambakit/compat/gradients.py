"""Gradients of our operations for official functions that are called to compute them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def pulled_back(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], upstream: Sequence[Tensor | None]
) -> list[Any]:
    """The gradient of each input, of its dtype, from those of the outputs of `function(*inputs)`.

    None for an input that is None; an output whose gradient is None does not count. What gradients there are does not
    depend on the caller's mode, which inside of an `autograd.Function` is to compute none.
    """
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(y, d_y) for y, d_y in zip(outputs, upstream, strict=True) if d_y is not None and y.requires_grad]
        loss, d_loss = [y for y, _ in pairs], [d_y.to(y.dtype) for y, d_y in pairs]
        given = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(loss, given, d_loss, materialize_grads=True))
    return [None if leaf is None else next(found) for leaf in leaves]


def written(values: Tensor, out: Tensor | None) -> Tensor:
    """`values`, in `out` if that was given to hold them."""
    return values if out is None else out.detach().copy_(values)
