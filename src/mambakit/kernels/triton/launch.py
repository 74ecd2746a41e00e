"""How a kernel is started: its grid, its tiles and the device of its tensors."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.kernels.triton.backend import interpreted


class Launch(NamedTuple):
    kernel: str
    """`file.function` in `code`."""
    programs: int
    arguments: tuple[Any, ...]
    sizes: dict[str, Any]
    """What it is compiled for."""
    warps: int
    stages: int


_records: list[list[Launch]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Inside, launches are noted and not done: what a call would start, from tensors without numbers too."""
    _records.append([])
    try:
        yield _records[-1]
    finally:
        _records.pop()


def power_of_two(n: int) -> int:
    """The next one from `n` on."""
    return 1 << max(n - 1, 0).bit_length()


def parts(size: int, step: int) -> int:
    return -(-size // step)


def most_programs(warps: int) -> int:
    """Of one launch: a grid has 31 bits, and on AMD its threads, up to 64 a warp, have 32."""
    return (2**32 - 1) // (64 * warps) if torch.version.hip else 2**31 - 1


def function(kernel: str) -> Any:
    file, name = kernel.split(".")
    return getattr(importlib.import_module(f"mambakit.kernels.triton.code.{file}"), name)


def launch(kernel: str, programs: int, *arguments: Any, warps: int = 4, stages: int = 1, **sizes: Any) -> None:
    """Start `programs` programs of a kernel on the device of its first tensor; none is no launch."""
    if programs == 0:
        return
    if programs > most_programs(warps):
        raise ValueError(
            f"{kernel} would be {programs} programs, at most {most_programs(warps)} fit: use smaller parts"
        )
    tensor, *others = (argument for argument in arguments if isinstance(argument, Tensor))
    if any(other.device != tensor.device for other in others):
        places = sorted({str(each.device) for each in (tensor, *others)})
        raise ValueError(f"{kernel} got tensors on {' and '.join(places)}: move them to one device")
    if _records:
        _records[-1].append(Launch(kernel, programs, arguments, sizes, warps, stages))
        return
    device = contextlib.nullcontext() if interpreted() else torch.cuda.device(tensor.device)
    with device:
        function(kernel)[(programs,)](*arguments, **sizes, num_warps=warps, num_stages=stages, enable_fp_fusion=True)
