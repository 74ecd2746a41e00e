"""The names of tensors in GGUF files, and undoing what llama.cpp's converter does to some of them."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mambakit.checkpoints.fields import shown
from mambakit.checkpoints.files import MAX_TENSORS


class Each(NamedTuple):
    """One tensor for each entry of the first axis."""

    name: str


class Half(NamedTuple):
    """The first or the second half of a tensor's rows."""

    name: str
    place: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the tensors are called that were made into those of a file."""

    outside: Mapping[str, str]
    layer: str = "backbone.layers.{}."
    inside: Mapping[str, str | Each | Half] = field(default_factory=dict)
    """By the names in a layer of the file."""
    flattened: Collection[str] = ()
    """Those with one axis there and two here: another of one entry, or the groups."""


def named(tensors: Mapping[str, Tensor], layout: Layout, heads: Mapping[str, int] | None = None) -> dict[str, Tensor]:
    """The tensors as they were; `heads` are those of projections whose rows were put in another order."""
    found: dict[str, Tensor] = {}
    halves: dict[str, dict[int, Tensor]] = {}
    unknown = []
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if name in layout.outside:
            found[layout.outside[name]] = tensor
        elif match is None or match[2] not in layout.inside:
            unknown.append(shown(name))
        else:
            layer, kind = layout.layer.format(match[1]), match[2]
            called = layout.inside[kind]
            if kind in layout.flattened:
                tensor = tensor.flatten()
            tensor = restored(name, tensor, (heads or {}).get(kind.partition(".")[0]))
            if isinstance(called, Half):
                halves.setdefault(layer + called.name, {})[called.place] = tensor
            elif isinstance(called, Each):
                if len(tensor) > MAX_TENSORS:
                    raise ValueError(f"{name} has {len(tensor)} experts, and at most {MAX_TENSORS} are read")
                found |= {layer + called.name.format(i): one for i, one in enumerate(tensor)}
            else:
                found[layer + called] = tensor
    if unknown:
        raise ValueError(f"it has tensors that are not known: {', '.join(unknown)}")
    for name, parts in halves.items():
        if {place: part.shape for place, part in parts.items()} != dict.fromkeys((0, 1), parts[min(parts)].shape):
            raise ValueError(f"the halves of {name}, a gate and what it is for, are not two of one shape")
        found[name] = torch.cat([parts[0], parts[1]], -2)
    return found


def restored(name: str, tensor: Tensor, heads: int | None = None) -> Tensor:
    """What the converter made this tensor of."""
    if name.endswith("ssm_conv1d.weight"):
        return tensor.reshape(len(tensor), 1, -1)
    if name.endswith("ssm_a"):
        if not (tensor < 0).all():
            raise ValueError(f"{name} has numbers that are not negative, and no decay is")
        return torch.log(-tensor.double()).float()
    if heads is not None:
        if len(tensor) % (2 * heads):
            raise ValueError(f"{name} has {len(tensor)} rows, which is no even number for each of {heads} heads")
        # Pairs that rope turns lay half a head apart, and were put side by side.
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)
    return tensor
