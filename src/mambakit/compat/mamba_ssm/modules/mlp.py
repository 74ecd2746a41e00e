"""The gated MLP."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.blocks.modules import Linear

__all__ = ["GatedMLP"]


class GatedMLP(nn.Module):
    """`fc2(value * activation(gate))`, value and gate being the halves of `fc1`."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
        bias: bool = False,
        multiple_of: int = 128,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        made = {"bias": bias, "device": device, "dtype": dtype}
        hidden = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        self.fc1 = Linear(in_features, 2 * hidden, **made)
        self.activation = activation
        self.fc2 = Linear(hidden, in_features if out_features is None else out_features, **made)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(value * self.activation(gate))
