"""What the rest of the project knows about a kind of block: one record, at the end of the block's file.

Every list of families is `FAMILIES`. A new family is a file with a config, a cache, a block and its record.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor

from mambakit.arguments import shown
from mambakit.blocks.block import Block
from mambakit.blocks.shares import Shares
from mambakit.ops.team import Team


class Slots(NamedTuple):
    """Kernels have a row's tokens in their order, with room for more behind the last."""

    in_order: Callable[[Any, Any, int], tuple[Any, Tensor]]
    """Of a block, a cache and a number of tokens to come: that cache with room, the position of each first."""
    in_slots: Callable[[Any, Any, Tensor], Any]
    """Back, of a block, a cache with tokens in order and the position of each first."""


@dataclass(frozen=True, kw_only=True)
class FusedStep:
    """A block's step in the words of the kernels that run it: the fields of their struct, without an address yet."""

    fields: Callable[[Any], dict[str, Any]] = lambda block: {}
    """Of a block: its parameters as they are, numbers and words. Nothing is computed."""
    prepared: Callable[[Any], dict[str, Tensor]] = lambda block: {}
    """Fields computed from a block's parameters, which they do not follow: for who keeps them over many tokens."""
    projections: tuple[str, ...] = ()
    """Its matrices, by the names of modules, or of parameters that stack several; some blocks may lack one."""
    places: Mapping[str, str] = field(default_factory=dict)
    """What the kernels call each tensor of a cache."""
    notes: tuple[str, Callable[[Any], int]] | None = None
    """A tensor of its cache, too large to be copied for every token; and, of a block, how many numbers are in the note
    of what a token writes into it."""
    narrow: str | None = None
    """What the kernels call that tensor where it is in bfloat16; None if they know no such."""
    slots: "Slots | None" = None
    """Of a block that keeps tokens, in what its cache's `grows` names: how the kernels have them."""
    inside: Callable[[Any], tuple[Any, ...]] = lambda block: (block,)
    """The blocks that it is the sum of, which all read its input: itself first, with others that carry nothing, or
    others alone, whose caches make up its own."""
    modules: tuple[type, ...] = ()
    """Types of modules that no other blocks have."""
    why_not: Callable[[Any], str | None] = lambda block: None
    """What keeps a block, itself and its modules of the usual types, from being stepped so; None if nothing does."""


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    """In configs and on the command line: "mamba2"."""
    title: str
    """For a reader: "Mamba-2"."""
    block: type[Block]
    sizes: Mapping[str, tuple[str, int, str]]
    """How stored tensors reveal a size: the tensor's name, its axis, and what the config calls the size."""
    resolved: Mapping[str, str] = field(default_factory=dict)
    """Fields with a value that stands for another (None, "auto"), each with the property that says which."""
    flops: Callable[[Any, int], float] = lambda config, tokens: 0.0
    """Of a forward's matrix products beside the projections, for a config and so many tokens."""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More names on the command line, each with the fields it sets."""
    needed: Mapping[str, Any] = field(default_factory=dict)
    """Fields without a default, for who does not name them."""
    at_hand: Mapping[str, Any] = field(default_factory=dict)
    """Fields for training on the machine at hand, where the defaults are meant for large models."""
    example: Mapping[str, Any]
    """Fields of a tiny block for self-checks."""
    step: FusedStep | None = None
    shares: Callable[[Any, Team], Shares] | None = None
    """Of a config and the ranks: this one's share of a block. A block without that may consist of others."""
    alone: bool = True
    """Whether a model can be made of such blocks and no others."""

    @property
    def config(self) -> type:
        return self.block.config_class

    @property
    def cache(self) -> type:
        return self.block.cache_class

    def has(self, name: str) -> bool:
        """Whether the config has such a field."""
        return any(known.name == name for known in fields(self.config))

    def configure(self, *given: Mapping[str, Any]) -> Any:
        """A config; what is given later wins. Sizes that are None, or not of this family, are left out."""
        sizes = {name: value for each in (self.needed, *given) for name, value in each.items() if value is not None}
        return self.config(**{name: value for name, value in sizes.items() if self.has(name)})


FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Make a family known everywhere: to stacks, checkpoints, caches and the command line."""
    taken = {word for other in FAMILIES.values() for word in _names(other)}
    if again := sorted(taken & set(_names(family))):
        raise ValueError(f"{', '.join(again)} belongs to a family already; choose another name")
    FAMILIES[family.name] = family
    return family


def family_of(part: Any) -> Family:
    """The family of a config or a block, also of a class derived from one."""
    kinds = {kind: family for family in FAMILIES.values() for kind in (family.config, family.block)}
    for kind in type(part).__mro__:
        if kind in kinds:
            return kinds[kind]
    expected = ", ".join(family.config.__name__ for family in FAMILIES.values())
    raise ValueError(f"block is a {type(part).__name__}, expected one of {expected}")


def to_dict(config: Any) -> dict[str, Any]:
    """A block's config as JSON values, its family among them."""
    return {"family": family_of(config).name, **config.to_dict()}


def from_dict(values: Any, where: str = "block") -> Any:
    """What `to_dict` gave the values of; `where` is what messages call them."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} = {values!r} is of the wrong type, expected an object with the fields of a block")
    fields = dict(values)
    family = fields.pop("family", None)
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"{where}.family is {shown(family)}, expected one of {', '.join(FAMILIES)}")
    return FAMILIES[family].config.from_dict(fields)


def presets() -> dict[str, tuple[Family, Mapping[str, Any]]]:
    """The names a command line offers, each with its family and the fields it sets."""
    families = [family for family in FAMILIES.values() if family.alone]
    return {name: (f, given) for f in families for name, given in {f.name: {}, **f.variants}.items()}


def head_notes(config: Any, writers: int = 1) -> int:
    """The size of a note of what a token writes into the states of all heads: a decay, and pairs of vectors."""
    return config.nheads * (1 + writers * (config.per_head_dim + config.state_rank))


def ssd_flops(config: Any, tokens: int, *, groups: int, ranks: int = 1) -> float:
    """Of one forward's scan at chunks of 64 rows: c.b per group, the pairs of a chunk, and the two with the state.

    Pairs count in full squares, as a library of matrix products would compute them.
    """
    rows, channels = tokens * ranks, config.nheads * config.per_head_dim
    pairs = 64 // ranks * ranks * (groups * config.state_rank + channels)
    return 2.0 * rows * (pairs + 2 * channels * config.state_rank)


def _names(family: Family) -> Iterator[str]:
    """What no two families may share, but for the name of a cache of nothing."""
    yield from (family.name, *family.variants, family.config.__name__)
    if family.cache._fields:
        yield family.cache.__name__
