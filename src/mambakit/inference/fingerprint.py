"""What a model computes with, as a value that can be compared later."""

import weakref
import zlib
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from mambakit.ops.shapes import is_autocast

VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)
"""What compares by value and never changes."""
PIECE = 1 << 24
"""Bytes that a thread takes at a time."""


def fingerprint(model: nn.Module) -> Any:
    """Equal to an earlier one if the model has not changed since, however it was changed.

    It has the bytes of all tensors as checksums of 32 bits, one for each tensor or 16 MB of it, and everything else
    that modules hold: numbers, configs, submodules, hooks, replaced methods, the methods of their classes; also hooks
    on all modules, and autocast. Functions and objects of unknown types are compared by identity, so what those read
    elsewhere is not seen. A tensor whose bytes cannot be read makes it equal to no other.

    This reads every weight, by as many threads as torch has.
    """
    walk = Walk()
    parts = [walk.visit(model)]
    parts += [walk.visit(hooks) for name, hooks in vars(torch_modules).items() if name.startswith("_global_")]
    parts += [[Same(part) for part in vars(kind).values() if callable(part)] for kind in walk.classes()]
    devices = sorted({tensor.device.type for tensor in walk.tensors})
    parts += [torch.get_autocast_dtype(device) for device in devices if is_autocast(torch.device(device))]
    return parts, checksums(walk.tensors)


class Same:
    """Equal for one and the same object, which it does not keep alive if it can do without."""

    __slots__ = ("get",)

    def __init__(self, thing: Any):
        try:
            self.get = weakref.ref(thing)
        except TypeError:
            self.get = lambda: thing

    def __eq__(self, other: object) -> bool:
        thing = self.get()
        return isinstance(other, Same) and thing is not None and thing is other.get()

    __hash__ = None  # type: ignore[assignment]


class Walk:
    """Through a model and what its modules hold; tensors are collected, each once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        # By address, with the things themselves: an address of something freed may be given away again.
        self._places: dict[int, tuple[int, Any]] = {}

    def visit(self, thing: Any) -> Any:
        if isinstance(thing, VALUES):
            return type(thing), thing
        if id(thing) in self._places:
            return "as before", self._places[id(thing)][0]
        self._places[id(thing)] = len(self._places), thing
        if isinstance(thing, Tensor):
            return self._visit_tensor(thing)
        if isinstance(thing, nn.Module):
            return Same(thing), type(thing), self.visit(vars(thing))
        if isinstance(thing, Mapping):
            return type(thing), [(self.visit(key), self.visit(value)) for key, value in thing.items()]
        if isinstance(thing, list | tuple):
            return type(thing), [self.visit(part) for part in thing]
        if isinstance(thing, Set) and all(isinstance(part, VALUES) for part in thing):
            return type(thing), set(thing)
        if is_dataclass(thing):
            return type(thing), [self.visit(getattr(thing, field.name)) for field in fields(thing)]
        return Same(thing)

    def _visit_tensor(self, tensor: Tensor) -> Any:
        plain = tensor.detach()
        if type(plain) is not Tensor or plain.layout != torch.strided or plain.is_quantized or plain.is_meta:
            return float("nan")
        self.tensors.append(plain)
        return plain.dtype, plain.device, plain.shape

    def classes(self) -> list[type]:
        """Of all modules, and what they are derived from."""
        modules = [thing for _, thing in self._places.values() if isinstance(thing, nn.Module)]
        return list(dict.fromkeys(kind for module in modules for kind in type(module).__mro__))


def checksums(tensors: list[Tensor]) -> list[list[int]]:
    pieces = [piece for tensor in tensors for piece in tensor.reshape(-1).view(torch.uint8).split(PIECE)]
    if sum(piece.numel() for piece in pieces) < PIECE:
        return [checksum(pieces)]
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(checksum, [pieces[thread::threads] for thread in range(threads)]))


def checksum(pieces: list[Tensor]) -> list[int]:
    return [zlib.crc32(piece.cpu().numpy().data) for piece in pieces]
