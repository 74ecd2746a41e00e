"""Two blocks side by side: their config, cache, block and record."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import Unpack

from mambakit.blocks import block, family
from mambakit.blocks.block import Block, Options
from mambakit.blocks.config import BlockConfig, Config, check_object, check_types
from mambakit.blocks.family import Family, FusedStep, family_of, register
from mambakit.blocks.mlp import MLPConfig
from mambakit.blocks.stateless import NoCache
from mambakit.ops.ssd_path import SsdPath


@dataclass(frozen=True, slots=True)
class ParallelConfig(BlockConfig):
    """Two blocks that read the same input.

    Examples:
        >>> mamba, attention = mk.Mamba2Config(d_model=64, per_head_dim=16), mk.AttentionConfig(64, n_heads=4)
        >>> config = mk.ParallelConfig(mamba, attention)
    """

    a: BlockConfig
    b: BlockConfig

    def __post_init__(self) -> None:
        for part in (self.a, self.b):
            family_of(part)
        check_types(self)
        if self.a.d_model != self.b.d_model:
            raise ValueError(
                f"a.d_model = {self.a.d_model}, but b.d_model = {self.b.d_model}; both read the same input"
            )

    @property
    def d_model(self) -> int:  # type: ignore[override]  # not a field: its blocks have it
        return self.a.d_model

    def to_dict(self) -> dict[str, Any]:
        return {**Config.to_dict(self), "a": family.to_dict(self.a), "b": family.to_dict(self.b)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]):
        check_object(cls, values)
        made = {
            name: part if isinstance(part, BlockConfig) else family.from_dict(part, name)
            for name, part in ((name, values.get(name)) for name in ("a", "b"))
        }
        return super(ParallelConfig, cls).from_dict({**values, **made})


class ParallelCache(NamedTuple):
    """What the two carry, each its own.

    Examples:
        >>> mamba, attention = mk.Mamba2Config(d_model=64, per_head_dim=16), mk.AttentionConfig(64, n_heads=4)
        >>> _, cache = mk.Parallel(mk.ParallelConfig(mamba, attention))(torch.randn(2, 10, 64))
        >>> type(cache).__name__
        'ParallelCache'
    """

    a: Any
    b: Any


class Parallel(Block[ParallelConfig, ParallelCache]):
    """Two blocks side by side: `a(x) + b(x)`.

    Examples:
        >>> mamba, attention = mk.Mamba2Config(d_model=64, per_head_dim=16), mk.AttentionConfig(64, n_heads=4)
        >>> y_bsd, cache = mk.Parallel(mk.ParallelConfig(mamba, attention))(torch.randn(2, 10, 64))
    """

    config_class, cache_class, splits = ParallelConfig, ParallelCache, True

    def __init__(self, config: ParallelConfig | None = None, *, device: Any = None, dtype: Any = None, **fields: Any):
        super().__init__(config, **fields)
        config = self.config
        self.a = family_of(config.a).block(config.a, device=device, dtype=dtype)
        self.b = family_of(config.b).block(config.b, device=device, dtype=dtype)

    def cache_shapes(self, batch: int) -> dict[str, tuple[Any, ...]]:
        """None of its own: a cache holds the caches of its blocks, which know theirs."""
        return {}

    def fresh_cache(self, batch: int) -> ParallelCache:
        return ParallelCache(fresh(self.config.a, self.a, batch), fresh(self.config.b, self.b, batch))

    def check_cache(self, cache: Any, rows: int, x_bsd: Tensor) -> None:
        super().check_cache(cache, rows, x_bsd)
        self.a.check_cache(cache.a, rows, x_bsd)
        self.b.check_cache(cache.b, rows, x_bsd)

    def restarted(self, cache: ParallelCache, fresh_b: Tensor) -> ParallelCache:
        return ParallelCache(self.a.restarted(cache.a, fresh_b), self.b.restarted(cache.b, fresh_b))

    def forward(
        self, x_bsd: Tensor, cache: ParallelCache | None = None, **options: Unpack[Options]
    ) -> tuple[Tensor, ParallelCache]:
        """As a block's; what its two blocks check by themselves is left to them."""
        config, entering = self.config, ParallelCache(None, None)
        block.check_input(self, x_bsd)
        if cache is not None:
            super().check_cache(cache, 0, x_bsd)
            entering = cache
        if config.in_scale != 1:
            x_bsd = x_bsd * config.in_scale
        y_bsd, after_a = self.a(x_bsd, entering.a, **options)
        other_bsd, after_b = self.b(x_bsd, entering.b, **options)
        y_bsd = y_bsd + other_bsd
        return (y_bsd if config.out_scale == 1 else y_bsd * config.out_scale), ParallelCache(after_a, after_b)

    def step(
        self, x_bd: Tensor, cache: ParallelCache | None = None, *, reset_b: Tensor | None = None
    ) -> tuple[Tensor, ParallelCache]:
        """One token; rows of `reset_b` start afresh before it."""
        for part in (self.a, self.b):
            if isinstance(part, Block):
                block.check_token(part, x_bd)
        return super().step(x_bd, cache, reset_b=reset_b)

    def run(
        self,
        x_bsd: Tensor,
        cache: ParallelCache,
        path: SsdPath,
        segments_bs: Tensor | None,
        lengths_b: Tensor | None,
    ) -> tuple[Tensor, ParallelCache]:
        raise TypeError("the two blocks of a Parallel are called as modules, by its forward")


def fresh(config: BlockConfig, block: Any, batch: int) -> Any:
    # Not asked of a block that has none: an adapter may have wrapped it.
    return NoCache() if family_of(config).cache is NoCache else block.fresh_cache(batch)


FAMILY = register(
    Family(
        name="parallel",
        title="Parallel",
        block=Parallel,
        sizes={},
        example={"a": MLPConfig(24, 40), "b": MLPConfig(24, 24, gated=False)},
        step=FusedStep(inside=lambda block: (block.a, block.b)),
        alone=False,
    )
)
