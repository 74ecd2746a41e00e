"""One layer: a block between a norm and a residual, optionally followed by a gated MLP."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from mambakit.blocks.block import Options
from mambakit.blocks.config import BlockConfig
from mambakit.blocks.family import family_of
from mambakit.blocks.modules import Linear, RMSNorm
from mambakit.ops.ssd_path import SsdPath


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` with the weight's dtype for results and the wider one for arithmetic, as `RMSNorm` has them."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        wide = torch.promote_types(input.dtype, weight.dtype)
        bias = None if bias is None else bias.to(wide)
        y = F.layer_norm(input.to(wide), self.normalized_shape, weight.to(wide), bias, self.eps)
        return y.to(weight.dtype)


def make_norm(width: int, rms: bool, eps: float, **made: Any) -> RMSNorm | LayerNorm:
    return RMSNorm(width, eps, **made) if rms else LayerNorm(width, eps, **made)


class GatedMLP(nn.Module):
    """`fc2(value * silu(gate))`, value and gate being the halves of `fc1`."""

    def __init__(self, width: int, hidden: int, **made: Any):
        super().__init__()
        # Rounded up as in the official checkpoints.
        hidden = -(-hidden // 128) * 128
        self.fc1 = Linear(width, 2 * hidden, bias=False, **made)
        self.fc2 = Linear(hidden, width, bias=False, **made)

    @property
    def independent_maps(self) -> dict[str, dict[str, int]]:
        """The maps that each projection stacks, with their rows in order; see `blocks/param_groups.py`."""
        hidden = self.fc2.in_features
        return {"fc1": {"value": hidden, "gate": hidden}, "fc2": {"y": self.fc2.out_features}}

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(value * F.silu(gate))


class Layer(nn.Module):
    """`norm -> block`, with an MLP `+ norm2 -> mlp` on top of its own residual. Returns what to add to the residual."""

    def __init__(
        self,
        block: BlockConfig,
        *,
        d_intermediate: int = 0,
        rms_norm: bool = True,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.norm = make_norm(block.d_model, rms_norm, norm_eps, **made)
        self.mixer = family_of(block).block(block, **made)
        self.has_mlp = d_intermediate > 0
        if self.has_mlp:
            self.norm2 = make_norm(block.d_model, rms_norm, norm_eps, **made)
            self.mlp = GatedMLP(block.d_model, d_intermediate, **made)

    def forward(self, x_bsd: Tensor, cache: Any = None, **options: Unpack[Options]) -> tuple[Tensor, Any]:
        """The layer's delta and cache; `options` (path, masks, packing) are the block's."""
        with SsdPath.of(options.get("path")).around():
            delta_bsd, cache = self.mixer(self.norm(x_bsd), cache, **options)
            return (self.with_mlp(x_bsd, delta_bsd) if self.has_mlp else delta_bsd), cache

    def step(self, x_bd: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """One token."""
        delta_bsd, cache = self(x_bd[:, None], cache)
        return delta_bsd[:, 0], cache

    def step_infinite(self, x_bd: Tensor) -> Tensor:
        delta_bd = self.mixer.step_infinite(self.norm(x_bd))  # type: ignore[operator]
        return self.with_mlp(x_bd, delta_bd) if self.has_mlp else delta_bd

    def fresh_cache(self, batch: int) -> Any:
        return self.mixer.fresh_cache(batch)  # type: ignore[operator]

    def with_mlp(self, x: Tensor, delta: Tensor) -> Tensor:
        return delta + self.mlp(self.norm2(x + delta))
