"""Blocks that treat every token by itself: they carry nothing from one call to the next."""

from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from mambakit.blocks.block import Block
from mambakit.blocks.config import BlockConfig

Config = TypeVar("Config", bound=BlockConfig)


class NoCache(NamedTuple):
    """Nothing to carry, in the place of a cache."""


class Stateless(Block[Config, NoCache]):
    """A block whose `run` is the same for every token and row; masks only make absent outputs zero."""

    cache_class, splits = NoCache, True

    def cache_shapes(self, batch: int) -> dict[str, tuple[Any, ...]]:
        return {}

    def fresh_cache(self, batch: int) -> NoCache:
        return NoCache()

    def step_infinite(self, x_bd: Tensor) -> Tensor:
        """One token is as good as its endless repetition."""
        return self.step(x_bd)[0]
