"""A right call of every operation, with all its tensors: to be made wrong in one place."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import mambakit as mk
from mambakit.ops.expand_ranks import expand_ranks
from mambakit.ops.mamba3_prepare import mamba3_prepare
from mambakit.ops.norm import finish, gated_rms_norm, rms_norm
from mambakit.ops.quaternion import rotate_quaternion, running_quaternion, unit_quaternion
from mambakit.ops.quaternion_prepare import quaternion_prepare
from mambakit.ops.rotation import rotate, running_angle

SIZES = {
    "b": 2,
    "s": 5,
    "m": 2,
    "h": 4,
    "g": 2,
    "p": 3,
    "r": 8,
    "a": 3,
    "j": 2,
    "i": 12,
    "v": 6,
    "k": 4,
    "n": 2,
    "l": 3,
}
AXES = {"x": "bsi", "z": "bsi", "weight": "i"}
"""Of names that do not say them."""


def bundle(kind: type[Any]) -> Callable[..., Any]:
    def make_and_run(**tensors: Tensor) -> Any:
        return kind(**tensors).run()

    make_and_run.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
    return make_and_run


OPERATIONS: dict[str, Callable[..., Any]] = {
    "causal_conv": mk.causal_conv,
    "selective_scan": mk.selective_scan,
    "ssd": mk.ssd,
    "trapezoid": mk.trapezoid,
    "rms_norm": rms_norm,
    "gated_rms_norm": gated_rms_norm,
    "finish": finish,
    "mamba3_prepare": mamba3_prepare,
    "quaternion_prepare": quaternion_prepare,
    "expand_ranks": expand_ranks,
    "running_angle": running_angle,
    "rotate": rotate,
    "unit_quaternion": unit_quaternion,
    "running_quaternion": running_quaternion,
    "rotate_quaternion": rotate_quaternion,
    "Mamba2SsdInput": bundle(mk.Mamba2SsdInput),
    "Mamba3SingleSsdInput": bundle(mk.Mamba3SingleSsdInput),
    "Mamba3DoubleSsdInput": bundle(mk.Mamba3DoubleSsdInput),
}


def names_of(operation: str) -> dict[str, bool]:
    """The tensors of an operation, and whether it takes None for each."""
    parameters = inspect.signature(OPERATIONS[operation]).parameters.values()
    return {p.name: p.annotation is not Tensor for p in parameters if p.annotation in (Tensor, Tensor | None)}


def tensors_of(operation: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {name: make_tensor(name, dtype, make) for name in names_of(operation)}


def make_tensor(name: str, dtype: torch.dtype, make: torch.Generator) -> Tensor:
    axes = AXES.get(name) or name.rpartition("_")[2]
    shape = [int(axis) if axis.isdigit() else SIZES[axis] for axis in axes]
    if name == "segments_bs":
        return (torch.rand(shape, generator=make) < 0.3).cumsum(1)
    if name == "lengths_b":
        return torch.randint(0, SIZES["s"] + 1, shape, generator=make)
    x = torch.randn(shape, generator=make, dtype=torch.float64)
    what = name.rpartition("_")[0]
    if what in ("a", "da", "a_decay"):
        x = -x.abs()
    elif what in ("dt", "lambda"):
        x = x.abs() / (1 + x.abs())
    return x.to(dtype)


class Wrapped(torch.Tensor):
    """A tensor whose numbers are in another one; its own address leads nowhere. What is computed of it is plain."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapped":
        made = {"dtype": held.dtype, "device": held.device, "requires_grad": held.requires_grad}
        made |= {"strides": held.stride(), "storage_offset": held.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, **made)

    def __init__(self, held: Tensor):
        self.held = held.detach().resolve_neg()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda wrapped: wrapped.held, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return cls(result) if func is torch.ops.aten.detach.default else result


def negative_view(tensor: Tensor) -> Tensor:
    """The same numbers, in memory with the other sign."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
