"""One layer: blocks in a row, each between a norm and the residual."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from mambakit.blocks.block import Options
from mambakit.blocks.config import BlockConfig
from mambakit.blocks.family import family_of
from mambakit.blocks.mlp import MLPConfig
from mambakit.blocks.modules import RMSNorm
from mambakit.blocks.stateless import NoCache
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


class Layer(nn.Module):
    """Blocks one after the other, each `x = x + scale * block(norm(x))`. Returns what to add to the residual.

    The first block is `mixer` behind `norm`. The second is behind `norm2`: `mlp`, as in the official checkpoints, where
    it is one, or else `mixer2`, and so on.

    Examples:
        >>> layer = mk.Layer((mk.Mamba2Config(d_model=64, per_head_dim=16), mk.MLPConfig(64, 128)))
        >>> [name for _, name in layer.names]
        ['mixer', 'mlp']
    """

    def __init__(
        self,
        blocks: BlockConfig | Sequence[BlockConfig],
        *,
        rms_norm: bool = True,
        norm_eps: float = 1e-5,
        residual_scale: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        blocks = (blocks,) if isinstance(blocks, BlockConfig) else tuple(blocks)
        self.residual_scale = residual_scale
        self.names: list[tuple[str, str]] = []
        """Of each norm and the block behind it."""
        self.carries = [family_of(config).cache is not NoCache for config in blocks]
        """Which blocks have a cache. Not asked of the blocks, which an adapter may have wrapped."""
        for place, config in enumerate(blocks):
            number = str(place + 1) if place else ""
            called = "mlp" if place == 1 and isinstance(config, MLPConfig) else f"mixer{number}"
            self.names.append((f"norm{number}", called))
            self.add_module(f"norm{number}", make_norm(config.d_model, rms_norm, norm_eps, **made))
            self.add_module(called, family_of(config).block(config, **made))

    @property
    def parts(self) -> list[tuple[Any, Any]]:
        """Each norm with the block behind it."""
        modules = self._modules
        return [(modules[norm], modules[block]) for norm, block in self.names]

    @property
    def carriers(self) -> list[Any]:
        """The blocks that have a cache."""
        return [block for (_, block), carries in zip(self.parts, self.carries, strict=True) if carries]

    def forward(self, x_bsd: Tensor, cache: Any = None, **options: Unpack[Options]) -> tuple[Tensor, Any]:
        """The layer's delta and cache; `options` (path, masks, packing) are the blocks'."""
        entering, leaving, deltas = self.apart(cache), [], []
        with SsdPath.of(options.get("path")).around():
            for norm, block in self.parts:
                if deltas:
                    x_bsd = x_bsd + deltas[-1]
                y_bsd, after = block(norm(x_bsd), entering.get(block), **options)
                deltas.append(self.scaled(y_bsd))
                leaving.append(after)
            return total(deltas), self.together(leaving)

    def step(self, x_bd: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """One token."""
        delta_bsd, cache = self(x_bd[:, None], cache)
        return delta_bsd[:, 0], cache

    def step_infinite(self, x_bd: Tensor) -> Tensor:
        deltas = []
        for norm, block in self.parts:
            if deltas:
                x_bd = x_bd + deltas[-1]
            deltas.append(self.scaled(block.step_infinite(norm(x_bd))))
        return total(deltas)

    def fresh_cache(self, batch: int) -> Any:
        return self.together([block.fresh_cache(batch) for block in self.carriers])

    def scaled(self, y: Tensor) -> Tensor:
        return y if self.residual_scale == 1 else self.residual_scale * y

    def together(self, caches: Sequence[Any]) -> Any:
        """Of the caches of all blocks, the one that is not empty, or a tuple of those that are not."""
        carried = tuple(cache for cache in caches if not isinstance(cache, NoCache))
        return carried[0] if len(carried) == 1 else carried

    def apart(self, cache: Any) -> dict[nn.Module, Any]:
        """The caches of blocks that have one, from what `together` made of them."""
        if cache is None:
            return {}
        blocks = self.carriers
        caches = (cache,) if len(blocks) == 1 else cache
        if not isinstance(caches, tuple | list) or len(caches) != len(blocks):
            raise ValueError(f"this layer's cache is a tuple of {len(blocks)} caches, got a {type(cache).__name__}")
        return dict(zip(blocks, caches, strict=True))


def total(deltas: Sequence[Tensor]) -> Tensor:
    # Not `sum`, which starts with 0.
    return functools.reduce(torch.add, deltas)
