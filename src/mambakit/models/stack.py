"""A stack of layers around one residual stream."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mambakit.blocks.config import Config, check_positive
from mambakit.models.layer import FAMILIES, BlockConfig, Layer, family_of

StackCache = tuple[Any, ...]
"""One block cache per layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig(Config):
    block: BlockConfig
    n_layer: int
    d_intermediate: int = 0
    """Hidden width of each layer's gated MLP, rounded up to a multiple of 128; 0 is none."""
    rms_norm: bool = True
    """RMSNorm before blocks, or LayerNorm."""
    norm_eps: float = 1e-5
    residual_in_fp32: bool = True

    def __post_init__(self) -> None:
        family_of(self.block)
        check_positive(self, "n_layer", "norm_eps")
        if self.d_intermediate < 0:
            raise ValueError(f"d_intermediate = {self.d_intermediate} has to be 0 (no MLP) or positive")

    def to_dict(self) -> dict[str, Any]:
        block = {"family": family_of(self.block), **self.block.to_dict()}
        return {**Config.to_dict(self), "block": block}

    @classmethod
    def from_dict(cls, values: dict[str, Any]):
        block = dict(values.get("block") or {})
        family = block.pop("family", None)
        if family not in FAMILIES:
            raise ValueError(f"block.family is {family!r}, expected one of {', '.join(FAMILIES)}")
        made = FAMILIES[family][0].from_dict(block)  # type: ignore[attr-defined]
        return super(StackConfig, cls).from_dict({**values, "block": made})


class Stack(nn.Module):
    """Layers with the call, step, cache and mask contract of a block."""

    def __init__(self, config: StackConfig, *, device: Any = None, dtype: Any = None):
        super().__init__()
        self.config = config
        options = {"d_intermediate": config.d_intermediate, "rms_norm": config.rms_norm, "norm_eps": config.norm_eps}
        made = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList(Layer(config.block, **options, **made) for _ in range(config.n_layer))

    @property
    def d_model(self) -> int:
        return self.config.block.d_model

    def fresh_cache(self, batch: int) -> StackCache:
        return tuple(layer.fresh_cache(batch) for layer in self.layers)  # type: ignore[operator]

    def forward(self, x_bsd: Tensor, cache: StackCache | None = None, **options: Any) -> tuple[Tensor, StackCache]:
        """The residual stream after the last layer, and the cache; `options` (path, masks, packing) are a block's."""
        caches = self.check_cache(cache)
        residual_bsd = self.into_residual(x_bsd)
        after = []
        for layer, entering in zip(self.layers, caches, strict=True):
            delta_bsd, leaving = layer(residual_bsd, entering, **options)
            residual_bsd = residual_bsd + delta_bsd
            after.append(leaving)
        return residual_bsd, tuple(after)

    def step(self, x_bd: Tensor, cache: StackCache | None = None) -> tuple[Tensor, StackCache]:
        """One token."""
        caches = self.check_cache(cache)
        residual_bd = self.into_residual(x_bd)
        after = []
        for layer, entering in zip(self.layers, caches, strict=True):
            delta_bd, leaving = layer.step(residual_bd, entering)  # type: ignore[operator]
            residual_bd = residual_bd + delta_bd
            after.append(leaving)
        return residual_bd, tuple(after)

    def into_residual(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) if self.config.residual_in_fp32 else x

    def check_cache(self, cache: StackCache | None) -> StackCache:
        if cache is None:
            return (None,) * len(self.layers)
        if len(cache) != len(self.layers):
            raise ValueError(f"the cache is of {len(cache)} layers, but this stack has {len(self.layers)}")
        return cache
