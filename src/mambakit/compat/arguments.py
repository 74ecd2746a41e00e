"""What the doors of the official functions have in common: signatures, dtypes that may differ, unknown words."""

import warnings
from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mambakit.arguments import shown
from mambakit.checkpoints.fields import renamed
from mambakit.checkpoints.official import BLOCK, WIDTH
from mambakit.ops.activations import softplus
from mambakit.ops.shapes import FLOATS, check_beside, check_tensors

Function = TypeVar("Function", bound=Callable[..., Any])

FORKS = {"bimamba", "bimamba_type", "if_divide_out", "if_devide_out", "init_layer_scale", "nslices", "use_norm"}
"""Arguments of modified copies of the package, Vision Mamba's and its relatives'."""

ACTIVATIONS = (None, "silu", "swish")
NARROW = (torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)


def in_the_order(names: str, like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a function of keywords an official signature: these arguments in this order, with the defaults of `like`.

    What the function itself names keeps its own default; a default that the caller leaves out is not passed on.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        known = {**signature(like).parameters, **signature(function).parameters}
        official = Signature(
            [known[name].replace(kind=known[name].POSITIONAL_OR_KEYWORD) for name in names.split(", ")]
        )

        @wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            return function(**official.bind(*args, **options).arguments)

        called.__signature__ = official  # type: ignore[attr-defined]
        return called

    return decorate


def of_tensors(function: Function) -> Function:
    """Makes ValueErrors of arguments that are no tensors where the signature says `Tensor`, or do not go together."""
    parameters = signature(function).parameters
    required = [name for name, parameter in parameters.items() if parameter.annotation is Tensor]
    optional = [name for name, p in parameters.items() if p.annotation in (Tensor | None, Tensor | str | None)]
    worded = [name for name, parameter in parameters.items() if parameter.annotation == Tensor | str | None]
    flags = [name for name, parameter in parameters.items() if parameter.annotation is bool]

    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **options}
        tensors = {name: given[name] for name in required if name in given}
        words = [name for name in worded if isinstance(given.get(name), str)]
        tensors |= {name: given[name] for name in optional if given.get(name) is not None and name not in words}
        check_tensors(tensors)
        first = next(iter(tensors), "")
        for name, tensor in tensors.items():
            if name != "cu_seqlens":  # bounds are read, wherever they are
                check_beside(first, tensors[first], name, tensor)
        for name in flags:
            if isinstance(given.get(name), Tensor):
                raise ValueError(f"{name} is a tensor, expected True or False")
        return function(*args, **options)

    return cast(Function, called)


def through_apply(name: str, function: Callable[..., Any]) -> Any:
    """A class that stands for an official `autograd.Function`: its `apply` is the function."""
    return type(name, (), {"__doc__": f"`{name}.apply` is `{function.__name__}`.", "apply": staticmethod(function)})


def check_channels(x: Tensor, **named: Tensor | None) -> None:
    """That these have an entry for each of the last axis of `x`."""
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(x.shape[-1:])}")


def refuse_unknown(owner: str, unknown: dict[str, Any]) -> None:
    """TypeError for keywords that the official class does not have."""
    if not unknown:
        return
    names = ", ".join(sorted(unknown))
    forks = sorted(FORKS & unknown.keys())
    if forks:
        raise TypeError(
            f"{owner} has no argument {names}: {', '.join(forks)} belongs to a modified copy of mamba_ssm "
            "(Vision Mamba and its relatives), not to the official package. Put that copy on the path: it stays, and "
            "what in it needs a GPU is filled in. Or wrap two blocks, one over the flipped sequence, as "
            "examples/gallery/bidirectional.py does"
        )
    raise TypeError(f"{owner} has no argument {names}")


def warn_of_unknown(owner: str, unknown: dict[str, Any]) -> None:
    """One warning for keywords that the official class takes and ignores."""
    if unknown:
        names = ", ".join(sorted(unknown))
        warnings.warn(f"{owner} ignores {names}, as the official one does", UserWarning, stacklevel=3)


def in_our_words(family: str, official: dict[str, Any]) -> dict[str, Any]:
    """The fields of our config of a block that official arguments give; other arguments do not describe it."""
    return renamed(official, WIDTH | BLOCK[family])


def check_activation(activation: str | None) -> bool:
    """Whether SiLU follows."""
    if activation not in ACTIVATIONS:
        raise NotImplementedError(f'activation = {activation!r} is not one of None, "silu" and "swish"')
    return activation is not None


def by_version(activation: str | None, *others: Any) -> list[Any]:
    """The activation, then the other arguments: in older versions it comes earlier, at the place of one of them."""
    for given in others:
        if isinstance(given, str):
            activation = given
    return [activation, *(None if isinstance(given, str) else given for given in others)]


def in_one_precision(*tensors: Tensor | None, may_be_complex: bool = False) -> tuple[Any, ...]:
    """The tensors as they are, or all in float64 if one of them is. Official functions mix dtypes freely."""
    known = (*FLOATS, *COMPLEX) if may_be_complex else FLOATS
    for t in tensors:
        if t is not None and t.dtype not in known:
            raise ValueError(f"a tensor of shape {tuple(t.shape)} is {t.dtype}, expected floating-point numbers")
    if not any(t is not None and t.dtype in (torch.float64, torch.complex128) for t in tensors):
        return tensors
    return tuple(None if t is None else t.to(torch.complex128 if t.is_complex() else torch.float64) for t in tensors)


def in_full_precision(*tensors: Tensor | None, may_be_complex: bool = False) -> tuple[Any, ...]:
    """`in_one_precision`, and none narrower than float32: official kernels round their output and nothing before it."""
    tensors = in_one_precision(*tensors, may_be_complex=may_be_complex)
    return tuple(t if t is None or t.dtype not in NARROW else t.float() for t in tensors)


def step_size(dt: Tensor, bias: Tensor | None, is_softplus: bool, limit: tuple[float, float] | None = None) -> Tensor:
    """`clamp(softplus(dt + bias), limit)` in at least float32, `bias` along the last axes of `dt`."""
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    dt = dt if bias is None else dt + bias
    dt = softplus(dt) if is_softplus else dt
    if limit is None:
        return dt
    is_pair = isinstance(limit, tuple | list) and len(limit) == 2
    if not is_pair or not all(isinstance(one, int | float) and one == one for one in limit):
        raise ValueError(f"dt_limit is {shown(limit)}, expected the least and the largest step size, two numbers")
    return dt.clamp(*map(float, limit))
