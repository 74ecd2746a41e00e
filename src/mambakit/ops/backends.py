"""Backends, and how a call says which one it wants.

`"torch"` is torch's own operators, which run everywhere. Every other backend is a folder of `mambakit.kernels` that
registers kernels behind operations (`operation.py`). `"auto"` takes the first that can run a call.

What a call asks for travels with it: as an argument, or set around a whole model by `use_backend`. The latter is a
thread's own; see docs/decisions/0008-backends.md for why it is no `ContextVar`.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mambakit.arguments import shown

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
"""What has its numbers in its own memory. A subclass may keep them elsewhere."""

_running = threading.local()
# Set here although it is the default everywhere: compilers guard on an attribute that is there.
_running.backend, _running.overwrite, _running.notes, _running.unseen = "auto", False, None, False


@dataclass(frozen=True, eq=False, kw_only=True)
class Backend:
    """What is true of all kernels of a backend."""

    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    """Floating-point dtypes its kernels read; integers are as each operation says."""
    why_missing: Callable[[], str | None]
    """None where the backend can be used at all, else one clause for a person."""
    about: Callable[[], dict[str, Any]] = dict
    """More about it, where it can be used."""
    why_not_auto: Callable[[str, Sequence[Tensor | None]], str | None] = lambda operation, tensors: None
    """Of an operation and a call it can run: why `"auto"` passes it over all the same."""
    warn: Callable[[str, Sequence[Tensor | None]], None] = lambda operation, tensors: None
    """Of the same: warns if there is something to warn of where it runs because it was asked for."""
    prove: Callable[[], list[dict[str, Any]]] = list
    """Its kernels against torch's operators on the devices here: a finding per case, with its error and limit."""
    tune: Callable[[], list[dict[str, Any]]] | None = None
    """Times its choices on the devices here and keeps the best; returns what it measured."""

    def why_not(self, tensors: Sequence[Tensor | None]) -> str | None:
        reason = self.why_missing()
        if reason is not None:
            return reason
        looked_at = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        if looked_at and not torch.compiler.is_compiling():
            return "torch.func's transforms or forward-mode derivatives look at every operation"
        return self.why_unreadable(tensors)

    def is_for(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether they are on its kind of device: if not, there is no more to say about it."""
        return any(tensor is not None and tensor.device.type == self.device for tensor in tensors)

    def why_unreadable(self, tensors: Iterable[Tensor | None]) -> str | None:
        """Why its kernels do not find the numbers of one of the tensors where they look for them."""
        # What a compiler traces stands for plain tensors.
        tracing, is_here = torch.compiler.is_compiling(), f"is_{self.device}"
        others = 0 if tracing else ~ordinary_keys(self.device)
        for tensor in tensors:
            if tensor is None:
                continue
            if not tracing and type(tensor) not in PLAIN_TENSORS:
                return f"it got a {type(tensor).__name__}, whose numbers a kernel does not find"
            dtype = tensor.dtype
            unknown = dtype not in self.dtypes and (dtype.is_floating_point or dtype.is_complex)
            if unknown or not getattr(tensor, is_here):
                return f"it got a tensor of {dtype} on {tensor.device}"
            if not tracing and dispatch_keys(tensor).raw_repr() & others:
                if tensor.is_neg():
                    return "it got the negative view of a tensor, whose numbers have the other sign in memory"
                return "it got a tensor that torch keeps in a form of its own, whose numbers a kernel does not find"
        return None


dispatch_keys = torch._C._dispatch_keys


@cache
def ordinary_keys(device: str) -> int:
    """What torch asks of a tensor whose numbers are simply there: not to wrap, negate, imagine or look them up."""
    return dispatch_keys(torch.empty(0, device=device)).raw_repr()


TORCH = Backend(name="torch", device="any", dtypes=(), why_missing=lambda: None)
"""torch's operators. An operation whose plain form has a derivative of its own registers it as a kernel of this."""
BACKENDS: dict[str, Backend] = {}
"""All that register kernels, in the order in which `"auto"` asks them."""


def register_backend(backend: Backend) -> Backend:
    if backend.name in ("auto", "torch") or BACKENDS.setdefault(backend.name, backend) is not backend:
        raise ValueError(f"a backend named {backend.name!r} is known already; choose another name")
    return backend


def backend_names() -> tuple[str, ...]:
    """The words a caller may use."""
    return ("auto", "torch", *BACKENDS)


def check_backend(name: str) -> None:
    if not isinstance(name, str) or (name not in ("auto", "torch") and name not in BACKENDS):
        raise ValueError(f"backend {shown(name)} is unknown; choose from {', '.join(backend_names())}")


def asked() -> str:
    """What `use_backend` says here."""
    return getattr(_running, "backend", "auto")


class _Setting:
    """One of `_running`'s values inside a `with`; a class, because compilers trace it and it costs least."""

    __slots__ = ("before", "name", "value")

    def __init__(self, name: str, value: object):
        self.name, self.value = name, value

    def __enter__(self) -> None:
        self.before = getattr(_running, self.name, DEFAULTS[self.name])
        setattr(_running, self.name, self.value)

    def __exit__(self, *raised: object) -> None:
        setattr(_running, self.name, self.before)


DEFAULTS = {"backend": "auto", "overwrite": False, "notes": None, "unseen": False}


def unseen() -> _Setting:
    """`with unseen():` is for calls on plain tensors inside of an autograd function, differentiated once if at all.

    Nobody looks on there who would have to see the operators that kernels stand behind.
    """
    return _Setting("unseen", True)


def nobody_looks_on() -> bool:
    return getattr(_running, "unseen", False)


def use_backend(name: str) -> _Setting:
    """Inside `with use_backend(name):`, every operation of this thread runs on that backend unless its call names one.

    By name, a backend that cannot be used at all or that cannot run one of its operations raises `ValueError`; an
    operation it has no kernel for runs in torch's operators. With `"torch"` nothing but those runs.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> with mk.use_backend("torch"):
        ...     y_bsd, _ = block(torch.randn(1, 100, 64))
    """
    check_backend(name)
    return _Setting("backend", name)


def overwriting() -> _Setting:
    """Inside, a step without gradients may turn the states it is given into the new ones instead of making others.

    For who owns the states, such as a decoding loop: a model's states are too large for the allocator to keep at hand,
    and touching fresh pages costs more than the step.
    """
    return _Setting("overwrite", True)


def may_overwrite() -> bool:
    return getattr(_running, "overwrite", False) and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
