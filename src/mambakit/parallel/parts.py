"""What ranks have a share of, whole; and back: parameters in parts, and caches of some heads."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mambakit.arguments import check_kind
from mambakit.blocks.parallel import ParallelCache
from mambakit.blocks.shares import Parts
from mambakit.blocks.stateless import NoCache
from mambakit.models.class_tokens import ClassCache
from mambakit.models.stack import Stack
from mambakit.ops.shapes import check_tensors
from mambakit.parallel.tensor import Lane, lane_of


def joined(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of a tensor-parallel model's parameters, by those of the model before it was divided.

    Each has to be whole: `tensor.full_tensor()` of a DTensor is. Of any other model they are what they are.

    Examples:
        >>> model = mk.Mamba2(d_model=64, per_head_dim=16)
        >>> mk.parallel.joined(model, dict(model.named_parameters())).keys() == dict(model.named_parameters()).keys()
        True
    """
    check_named(model, tensors)
    found, rest = {}, dict(tensors)
    for path, parts in named_parts(model):
        own = [rest.pop(f"{path}.{part.name}", None) for part in parts.split.parts]
        if all(tensor is not None for tensor in own):
            found[path] = torch.cat(own, parts.split.axis)  # type: ignore[arg-type]
    return found | rest


def parted(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Back: what `joined` gives, by the names of this model's parameters, each whole.

    Examples:
        >>> model = mk.Mamba2(d_model=64, per_head_dim=16)
        >>> mk.parallel.parted(model, dict(model.named_parameters())).keys() == dict(model.named_parameters()).keys()
        True
    """
    check_named(model, tensors)
    found = dict(tensors)
    for path, parts in named_parts(model):
        if path in found:
            whole, sizes, axis = found.pop(path), [part.size for part in parts.split.parts], parts.split.axis
            if whole.dim() <= axis or whole.shape[axis] != sum(sizes):
                raise ValueError(f"{path} has shape {tuple(whole.shape)}, expected {sum(sizes)} entries on axis {axis}")
            pieces = whole.split(sizes, axis)
            found |= {f"{path}.{part.name}": piece for part, piece in zip(parts.split.parts, pieces, strict=True)}
    return found


def check_named(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    check_kind("model", model, nn.Module, "a model")
    check_kind("tensors", tensors, Mapping, "tensors by name")
    check_tensors(tensors)


def named_parts(model: nn.Module) -> Iterator[tuple[str, Parts]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, Parts))


def whole_cache(model: nn.Module, cache: Any) -> Any:
    """A stack's or language model's cache with all ranks' heads, on every rank. Every rank has to ask.

    Examples:
        >>> model = mk.Stack(mk.StackConfig(block=mk.Mamba1Config(d_model=64), n_layer=2))
        >>> cache = mk.parallel.whole_cache(model, model.fresh_cache(2))
    """
    return on_caches(model, cache, from_all_ranks)


def share_of_cache(model: nn.Module, cache: Any) -> Any:
    """Of a whole cache, what this rank's heads carry.

    Examples:
        >>> model = mk.Stack(mk.StackConfig(block=mk.Mamba1Config(d_model=64), n_layer=2))
        >>> cache = mk.parallel.share_of_cache(model, model.fresh_cache(2))
    """
    return on_caches(model, cache, own_entries)


def on_caches(model: Any, cache: Any, change: Callable[[Lane, str, Tensor], Tensor]) -> Any:
    if isinstance(cache, ClassCache):
        return cache._replace(inner=on_caches(model, cache.inner, change))
    stack: Any = getattr(model, "backbone", model)
    if not isinstance(stack, Stack):
        raise ValueError(f"model is a {type(model).__name__}, expected a Stack or a LanguageModel")
    if not isinstance(cache, tuple | list) or len(cache) != len(stack.order):
        given = len(cache) if isinstance(cache, tuple | list) else f"a {type(cache).__name__}"
        raise ValueError(f"cache is {given}, expected {len(stack.order)} caches, one for each layer")

    def changed(block: nn.Module, carried: Any) -> Any:
        if isinstance(carried, ParallelCache):
            return ParallelCache(changed(block.a, carried.a), changed(block.b, carried.b))  # type: ignore[arg-type]
        lane = lane_of(block)
        if lane is None:
            return carried
        check_kind("a block's cache", carried, block.cache_class, f"a {block.cache_class.__name__}")  # type: ignore[arg-type, union-attr]
        return carried._replace(**{name: change(lane, name, getattr(carried, name)) for name in lane.caches[0]})

    after = []
    for real, carried in zip(stack.order, cache, strict=True):
        layer: Any = stack.layers[real]
        by_block = {block: changed(block, own) for block, own in layer.apart(carried).items()}
        after.append(layer.together([by_block.get(block, NoCache()) for _, block in layer.parts]))
    return tuple(after)


def own_entries(lane: Lane, name: str, tensor: Tensor) -> Tensor:
    split = lane.caches[lane.team.rank][name]
    return tensor.index_select(split.axis, torch.tensor(split.own(lane.team), device=tensor.device))


def from_all_ranks(lane: Lane, name: str, tensor: Tensor) -> Tensor:
    team, split = lane.team, lane.caches[0][name]
    found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(team.size)]
    dist.all_gather(found, tensor.detach().contiguous(), group=team.group)
    shape = list(tensor.shape)
    shape[split.axis] = sum(part.size for part in split.parts)
    out = tensor.new_zeros(shape)
    for rank, part in enumerate(found):
        index = lane.caches[rank][name].own(team._replace(rank=rank))
        out.index_copy_(split.axis, torch.tensor(index, device=tensor.device), part)
    return out
