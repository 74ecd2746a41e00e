"""Tensors of all kinds in the place of plain ones, and what numbers are in them."""

# pyright: reportPrivateImportUsage=false
import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from calls import Wrapped, negative_view

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
OTHER_DTYPES = (*DTYPES, *INTEGERS, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn)


def mutated(tensor: Tensor, draw: random.Random) -> Any:
    """Something in the place of a tensor: often wrong, sometimes only laid out in another way."""
    # Wrong enough, and torch never ends with some views of empty DTensors.
    if tensor.is_nested or tensor.layout != torch.strided or isinstance(tensor, DTensor):
        return tensor
    axis = draw.randrange(max(tensor.dim(), 1))
    has_axis = tensor.dim() > 0 and tensor.shape[axis] > 0
    number = draw.choice((torch.nan, torch.inf, -1e4, 3e4, 1e30, 0.0))
    choices: list[Callable[[], Any]] = [
        lambda: None,
        lambda: draw.choice((3, 0.5, "x", [1.0], (), {})),
        lambda: tensor.to(draw.choice(OTHER_DTYPES)),
        lambda: tensor[None],
        lambda: tensor.select(axis, 0) if has_axis else tensor,
        lambda: tensor.narrow(axis, 0, tensor.shape[axis] - 1) if has_axis else tensor,
        lambda: torch.cat([tensor, tensor], axis) if tensor.dim() else tensor,
        lambda: tensor.narrow(axis, 0, 0) if has_axis else tensor,
        lambda: tensor.narrow(axis, 0, 1).expand_as(tensor) if has_axis else tensor,
        lambda: tensor.transpose(0, axis).contiguous().transpose(0, axis) if tensor.dim() else tensor,
        lambda: tensor.transpose(0, axis) if tensor.dim() else tensor,
        lambda: torch.stack([tensor] * 3, -1)[..., 1],
        lambda: torch.cat([tensor.flatten(), tensor.flatten()])[tensor.numel() :].view(tensor.shape),
        lambda: far_apart(tensor),
        lambda: tensor.flip(axis) if tensor.dim() else tensor,
        lambda: with_one(tensor, number, draw),
        lambda: tensor * draw.choice((1e-20, 1e4, -1)),
        *[lambda: of_kind(draw.choice(list(KINDS)), tensor)] * 6,
    ]
    return made(draw.choice(choices), tensor)


def made(make: Callable[[], Any], otherwise: Any) -> Any:
    """What is made, if torch makes it."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()
    return otherwise


@cache
def one_rank() -> DeviceMesh:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


@cache
def fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


def functional(tensor: Tensor) -> Tensor:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(tensor)


def inferred(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "wrapped": Wrapped,
    "parameter": lambda tensor: nn.Parameter(tensor, requires_grad=tensor.is_floating_point()),
    "meta": lambda tensor: tensor.to("meta"),
    "negative": lambda tensor: negative_view(tensor) if tensor.dtype in DTYPES[:2] else tensor,
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "share": lambda tensor: distribute_tensor(tensor, one_rank()),
    "fake": lambda tensor: fake_mode().from_tensor(tensor),
    "functional": functional,
    "functional inside": torch._to_functional_tensor,
    "inference": inferred,
    "sparse": Tensor.to_sparse,
    "sparse rows": Tensor.to_sparse_csr,
    "oneDNN": Tensor.to_mkldnn,
    "nested": lambda tensor: torch.nested.as_nested_tensor(tensor),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    "ragged": lambda tensor: torch.nested.as_nested_tensor(tensor, layout=torch.jagged),
}
"""A tensor as one of another kind, most of them without numbers at the address they give."""


def of_kind(kind: str, tensor: Tensor) -> Tensor:
    """Of plain tensors only: torch makes some kinds of others, but never ends.

    Nor of zero tensors: by itself torch crashes in the first operator on a subclass that holds one.
    """
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_nested
    is_plain = is_plain and not torch._is_functional_tensor(tensor) and not tensor.is_inference()
    is_plain = is_plain and not tensor._is_zerotensor()
    return KINDS[kind](tensor) if is_plain else tensor


def far_apart(tensor: Tensor) -> Tensor:
    """With strides far beyond its size."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    apart = tensor.new_zeros(tensor.shape[0] * 100_003 + tensor.numel())
    strides = (100_003, *tensor[0].contiguous().stride())
    return torch.as_strided(apart, tensor.shape, strides).copy_(tensor)


def with_one(tensor: Tensor, number: float, draw: random.Random) -> Tensor:
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return tensor
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    tensor.view(-1)[draw.randrange(tensor.numel())] = number
    return tensor


def places(value: Any, where: tuple = ()) -> Iterator[tuple]:
    """Where tensors are in arguments, caches included."""
    if isinstance(value, Tensor):
        yield where
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*where, key))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from places(part, (*where, i))


def changed(value: Any, where: tuple, change: Callable[[Any], Any]) -> Any:
    if not where:
        return change(value)
    key, *rest = where
    if isinstance(value, dict):
        return {**value, key: changed(value[key], tuple(rest), change)}
    parts = [changed(part, tuple(rest), change) if i == key else part for i, part in enumerate(value)]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def has_numbers(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def numbers(tensor: Tensor) -> Tensor:
    """What a tensor of any kind holds, as a plain one; zeros if that is nothing."""
    if not has_numbers(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if isinstance(tensor, Wrapped):
        return numbers(tensor.held)
    if isinstance(tensor, DTensor):
        return numbers(tensor.full_tensor())
    if isinstance(tensor, FunctionalTensor):
        return numbers(tensor.elem)
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        return numbers(torch._from_functional_tensor(tensor))
    tensor = tensor.detach()
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    return (tensor if tensor.layout == torch.strided else tensor.to_dense()).resolve_neg().contiguous()


def widened(value: Any) -> Any:
    """The same numbers as plain float64 tensors of their own."""

    def widen(tensor: Tensor) -> Tensor:
        tensor = numbers(tensor)
        if tensor.is_complex():
            return tensor.to(torch.complex128)
        return tensor.to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)

    return tree_map_only(Tensor, widen, value)
