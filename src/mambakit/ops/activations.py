"""Activations of step sizes and decays, exact to the last digits of every dtype."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.ops.shapes import cast

# Above it softplus(x) and x are the same number: exp(-threshold) is below half a unit in the last place of it.
SOFTPLUS_THRESHOLD = {torch.float32: 20.0, torch.float64: 38.0}


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))`, in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.softplus(cast(x, wide), threshold=SOFTPLUS_THRESHOLD[wide])


def step_size(dt: Tensor, bias: Tensor, limit: tuple[float, float]) -> Tensor:
    """`softplus(dt + bias)` clamped to `limit`."""
    dt = softplus(dt + bias)
    return dt if limit == (0.0, math.inf) else dt.clamp(*limit)


def heavy_tail(x: Tensor) -> Tensor:
    """`1 + x` from zero on and `1 / (1 - x)` below, once differentiable at zero; in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    # relu, not clamp: at zero each of the two terms would count a slope of 1.
    return torch.relu(x) + 1 / (1 - x.clamp(max=0))
