"""What a public op checks at its door: sizes by the letters in the names, devices, dtypes."""

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from mambakit.ops.backends import PLAIN_TENSORS

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""That torch computes with: of wider unsigned ones it knows little more than how to keep them."""
NOTHING: Mapping[str, Tensor] = MappingProxyType({})
is_functional = torch._is_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_NO_DISPATCH = getattr(Tensor, "__torch_dispatch__", None)


class Sizes:
    """Axis sizes as attributes. A plain class, because `torch.compile` cannot trace a `SimpleNamespace`."""

    def __init__(self, sizes: dict[str, int]) -> None:
        for axis, size in sizes.items():
            setattr(self, axis, size)

    def __getattr__(self, axis: str) -> int:
        raise AttributeError(f"no tensor has an axis {axis!r}")


def bind(required: Mapping[str, Tensor] = NOTHING, /, **optional: Tensor | None) -> Sizes:
    """Read every axis from the suffix of each name and return the sizes as attributes.

    `bind({"v_bsmhp": v}, da_bsh=da)` gives `.b .s .m .h .p`. A digit is an axis of exactly that size. Of the optional
    tensors `None` is skipped. Raises `ValueError` when a rank, a shared axis or a device does not fit.
    """
    check_tensors(required)
    sizes: dict[str, int] = {}
    seen_in: dict[str, str] = {}
    first: tuple[str, Tensor] | None = None
    for name, tensor in (*required.items(), *optional.items()):
        if tensor is None:
            continue
        axes = name.rsplit("_", 1)[-1]
        if name not in required:
            check_tensors({name: tensor})
        if type(tensor) not in PLAIN_TENSORS and hasattr(tensor, "full_tensor"):
            given = f"{name} is a {type(tensor).__name__}, which"
            raise ValueError(f"{given} this operation cannot divide; give every process its part, to_local()")
        if tensor.dim() != len(axes):
            raise ValueError(f"{name} needs {len(axes)} axes ({', '.join(axes)}), got shape {tuple(tensor.shape)}")
        for axis, size in zip(axes, tensor.shape, strict=True):
            if axis not in sizes:
                if axis.isdigit() and size != int(axis):
                    raise ValueError(f"{name} needs size {axis} where it has {size} (shape {tuple(tensor.shape)})")
                sizes[axis], seen_in[axis] = size, name
            elif sizes[axis] != size:
                raise ValueError(f"axis '{axis}' is {size} in {name} but {sizes[axis]} in {seen_in[axis]}")
        if first is None:
            first = (name, tensor)
        else:
            check_beside(*first, name, tensor)
    return Sizes(sizes)


def check_beside(first: str, other: Tensor, name: str, tensor: Tensor) -> None:
    """That a tensor is where the first one is, and of a kind that torch computes with together with it."""
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device} but {first} on {other.device}; move them to one device")
    if type(tensor) is not type(other) and keeps_apart(type(tensor), type(other)):
        kinds = f"{name} is a {type(tensor).__name__} but {first} a {type(other).__name__}"
        raise ValueError(f"{kinds}, which do not mix; make all of them the same")


def keeps_apart(kind: type, other: type) -> bool:
    """Whether torch refuses to compute with tensors of two kinds together."""
    if (kind in PLAIN_TENSORS and other in PLAIN_TENSORS) or torch.compiler.is_compiling():
        return False
    return any(hasattr(one, "full_tensor") or issubclass(one, FakeTensor | FunctionalTensor) for one in (kind, other))


def check_tensors(named: Mapping[str, Any]) -> None:
    """That these are tensors, and dense ones."""
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} has to be a tensor, got {None if tensor is None else type(tensor).__name__}")
        check_dense(name, tensor)


def check_dense(name: str, tensor: Any) -> None:
    """That there is a number at every index of a tensor, and that it can be had; anything else passes."""
    if not isinstance(tensor, Tensor):
        return
    if tensor.is_nested or tensor.layout is not torch.strided:
        given = "nested" if tensor.is_nested else str(tensor.layout).rpartition(".")[2]
        raise ValueError(f"{name} is a {given} tensor, expected a dense one")
    if torch.compiler.is_compiling():
        return
    if tensor._is_zerotensor():
        raise ValueError(f"{name} is a zero tensor without memory; clone() makes an ordinary one")
    if is_stranded(tensor):
        kind = "fake" if isinstance(tensor, FakeTensor) else "functional"
        raise ValueError(f"{name} is a {kind} tensor outside of the mode that made it")


def is_stranded(tensor: Tensor) -> bool:
    """Whether torch cannot compute with a tensor and those it makes here, because what would wrap them is not there."""
    kind = type(tensor)
    if kind in PLAIN_TENSORS and not is_functional(tensor):
        return False
    modes = torch._C._TorchDispatchModeKey
    if issubclass(kind, FakeTensor):
        return torch._C._get_dispatch_mode(modes.FAKE) is None
    if kind is FunctionalTensor or is_functional(tensor):
        mode = torch._C._get_dispatch_mode(modes.FUNCTIONAL)
        return mode is None and not torch._C._are_functorch_transforms_active()
    return False


def check_floats(same: dict[str, Tensor | None], wider: dict[str, Tensor | None] | None = None) -> torch.dtype:
    """Check dtypes and return the one to compute in: float64 for float64, float32 for everything else.

    The tensors of `same` share one dtype. Those of `wider` (decays, weights, states) may also be float32.
    Float64 is everywhere or nowhere: a mixture would lose silently what the caller asked for.
    """
    given = {name: tensor for name, tensor in {**same, **(wider or {})}.items() if tensor is not None}
    dtypes = {tensor.dtype for tensor in given.values()}
    if dtypes in ({torch.float32}, {torch.float64}):
        return dtypes.pop()
    for name, tensor in given.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} is {tensor.dtype}, expected float16, bfloat16, float32 or float64")
    first = next(name for name, tensor in same.items() if tensor is not None)
    dtype = given[first].dtype
    for name, tensor in given.items():
        if name in same and tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype} but {first} is {dtype}; cast one of them")
        if (tensor.dtype == torch.float64) != (dtype == torch.float64):
            raise ValueError(
                f"{name} is {tensor.dtype} but {first} is {dtype}; use float64 for all of them or for none"
            )
    return torch.promote_types(dtype, torch.float32)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which takes longer to find out that there is nothing to do; that counts in a step."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is on there; torch raises where it has none, as on the meta device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Switch autocast off: decays, sums and states need at least float32 whatever the surroundings say."""
    if is_autocast(device):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def check_integers(name: str, tensor: Tensor, what: str = "integers") -> None:
    if tensor.dtype not in INTEGERS:
        raise ValueError(f"{name} has to hold {what}, got {tensor.dtype}")


def check_boolean(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.bool, *INTEGERS):
        raise ValueError(f"{name} has to be boolean, got {tensor.dtype}")


def has_numbers(tensor: Tensor) -> bool:
    """Whether a check can look at them: not while a compiler traces, nor in a tensor that is only a shape."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor))


def check_numbers(name: str, tensor: Tensor) -> None:
    """That there is something to write down."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        raise ValueError(f"{name} is on the meta device or a fake tensor, and has no numbers")


def check_readable(name: str, tensor: Tensor) -> None:
    """That the numbers of a tensor can be had as a list."""
    check_tensors({name: tensor})
    if torch.compiler.is_compiling():
        return
    if tensor.is_meta or getattr(type(tensor), "__torch_dispatch__", None) is not _NO_DISPATCH:
        given = f"a {type(tensor).__name__} on {tensor.device}"
        raise ValueError(f"{name} is {given}, expected a plain tensor with numbers")
    if tensor.is_quantized:
        raise ValueError(f"{name} is {tensor.dtype}; dequantize() gives its numbers")


def check_segments(segments_bs: Tensor) -> None:
    """Segment ids are integers that never decrease along a row."""
    check_integers("segments_bs", segments_bs, "integer ids")
    if not has_numbers(segments_bs) or segments_bs.shape[1] < 2:
        return
    falls_bs = segments_bs[:, 1:] < segments_bs[:, :-1]
    if bool(falls_bs.any()):
        row, token = (int(i) for i in falls_bs.nonzero()[0])
        before, after = (int(i) for i in segments_bs[row, token : token + 2])
        raise ValueError(
            f"segments_bs falls from {before} to {after} at token {token + 1} of row {row}; "
            "ids must not decrease, and a later segment needs an id of its own"
        )


def check_lengths(lengths_b: Tensor, s: int) -> None:
    """How many of a row's `s` tokens count."""
    check_integers("lengths_b", lengths_b)
    if not has_numbers(lengths_b):
        return
    outside_b = (lengths_b < 0) | (lengths_b > s)
    if bool(outside_b.any()):
        row = int(outside_b.nonzero()[0])
        raise ValueError(f"lengths_b is {int(lengths_b[row])} for row {row}, expected 0 to {s} tokens")
