"""What a format calls the weights of a model, as data: prefixes, and tables of what is called or laid out otherwise.

A table has our names inside a block, each a parameter or a module, and theirs:
- `"o_proj"`: the same tensor under another name;
- `("q_proj", "k_proj", "v_proj")`: its rows in several tensors, in this order, each a map of `independent_maps`;
- `Swapped("input_linear")`: its two halves of rows the other way round;
- `Each("experts.{}.up_proj.weight")`: one tensor per entry of the first axis; with two names, the halves of its rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.blocks.family import family_of
from mambakit.blocks.parallel import Parallel
from mambakit.models.language_model import LanguageModel


class Swapped(NamedTuple):
    name: str


class Each:
    def __init__(self, *names: str):
        self.names = names


Theirs = str | tuple[str, ...] | Swapped | Each
Table = Mapping[str, Theirs]


@dataclass(frozen=True, kw_only=True)
class Names:
    """The defaults are our own."""

    embedding: str = "backbone.embedding.weight"
    norm_f: str = "backbone.norm_f."
    layer: str = "backbone.layers.{}."
    norms: Sequence[str] = ("norm.", "norm2.")
    """Inside a layer, of its first block, of its second, and so on."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """Prefixes inside a layer by family. A family without one has our own."""
    tables: Mapping[str, Table] = field(default_factory=dict)
    """What is called otherwise inside a block, by family."""


class Rule(NamedTuple):
    """One tensor of ours and those of theirs that hold its values."""

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    part: Callable[[Tensor], Sequence[Tensor]]
    """The other way; also of a tensor without memory, whose parts have the shapes that theirs must have."""


def rules(model: LanguageModel, names: Names) -> Iterator[Rule]:
    """One for each tensor of the model."""
    backbone = model.backbone
    if names == Names():
        # Everything, also what only our own stacks have.
        yield from (same(key, key) for key in model.state_dict())
        return
    yield same("backbone.embedding.weight", names.embedding)
    yield same("lm_head.weight", "lm_head.weight")
    yield from _renamed(backbone.norm_f, "backbone.norm_f.", names.norm_f, {})
    for i, layer in enumerate(backbone.layers):
        theirs = names.layer.format(i)
        for place, (norm, block) in enumerate(layer.names):  # type: ignore[arg-type, union-attr]
            ours = f"backbone.layers.{i}."
            where = names.norms[place] if place < len(names.norms) else f"{norm}."
            yield from _renamed(layer.get_submodule(norm), f"{ours}{norm}.", theirs + where, {})
            yield from _of_block(layer.get_submodule(block), f"{ours}{block}.", theirs, f"{block}.", names)


def _of_block(block: Any, ours: str, layer: str, own: str, names: Names) -> Iterator[Rule]:
    if isinstance(block, Parallel):
        for part in ("a", "b"):
            yield from _of_block(getattr(block, part), f"{ours}{part}.", layer, f"{own}{part}.", names)
        return
    family = family_of(block).name
    yield from _renamed(block, ours, layer + names.blocks.get(family, own), names.tables.get(family, {}))


def _renamed(module: Any, ours: str, theirs: str, table: Table) -> Iterator[Rule]:
    for key, tensor in module.state_dict().items():
        found, rest = key, ""
        while found and found not in table:
            found, _, leaf = found.rpartition(".")
            rest = f".{leaf}{rest}"
        if not found:
            yield same(ours + key, theirs + key)
            continue
        entry = table[found]
        if isinstance(entry, str):
            yield same(ours + key, theirs + entry + rest)
        elif isinstance(entry, Swapped):
            # Of a bias the only axis, of a weight or of stacked ones that before the last.
            axis = -1 if tensor.dim() == 1 else -2
            yield Rule(ours + key, (theirs + entry.name + rest,), *_swapping(axis))
        elif isinstance(entry, Each):
            yield _each(ours + key, theirs, entry.names, len(tensor))
        else:
            rows = list(module.independent_maps[found].values())
            yield Rule(ours + key, tuple(theirs + one + rest for one in entry), _joined, _splitting(rows))


def same(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,), lambda tensors: tensors[0], lambda tensor: [tensor])


def _swapping(axis: int) -> tuple[Callable[[Sequence[Tensor]], Tensor], Callable[[Tensor], Sequence[Tensor]]]:
    def swap(tensor: Tensor) -> Tensor:
        return torch.cat(tensor.chunk(2, axis)[::-1], axis)

    return lambda tensors: swap(tensors[0]), lambda tensor: [swap(tensor)]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


def _splitting(rows: list[int]) -> Callable[[Tensor], Sequence[Tensor]]:
    return lambda tensor: tensor.split(rows)


def _each(ours: str, theirs: str, names: Sequence[str], count: int) -> Rule:
    all_names = tuple(theirs + name.format(i) for i in range(count) for name in names)
    n = len(names)

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([torch.cat(list(tensors[i : i + n])) for i in range(0, len(tensors), n)])

    return Rule(ours, all_names, join, lambda tensor: [part for one in tensor for part in one.chunk(n)])


class Renamed(Mapping[str, Tensor]):
    """Stored tensors under our names, each put together when it is asked for."""

    def __init__(self, tensors: dict[str, Tensor], found: Sequence[Rule]):
        self._tensors = tensors
        self._rules = {rule.ours: rule for rule in found if all(name in tensors for name in rule.theirs)}

    def __getitem__(self, name: str) -> Tensor:
        rule = self._rules[name]
        return rule.join([self._tensors[one] for one in rule.theirs])

    def take(self, name: str) -> Tensor:
        """The tensor, and no more of it here: once it is copied its memory is free."""
        rule = self._rules.pop(name)
        return rule.join([self._tensors.pop(one) for one in rule.theirs])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)


def renamed(tensors: Mapping[str, Tensor], found: Sequence[Rule]) -> dict[str, Tensor]:
    """Our tensors under the names of a format."""
    named = ((rule, rule.part(tensors[rule.ours])) for rule in found if rule.ours in tensors)
    return {name: part for rule, parts in named for name, part in zip(rule.theirs, parts, strict=True)}
