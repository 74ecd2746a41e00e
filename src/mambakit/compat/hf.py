"""mambakit's scans inside transformers' own models.

transformers writes its mixers against the official functions and calls slow stand-ins where those are not installed. A
mixer's `forward` gets new globals in which these names are ours: the code that runs is transformers', caches and hooks
are as before, and no other model is touched.
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from mambakit.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mambakit.compat.mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mambakit.compat.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mambakit.compat.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "mamba_selective_scan": selective_scan_fn,
    "mamba_selective_state_update": selective_state_update,
    "mamba2_chunk_scan": mamba_chunk_scan_combined,
    "mamba2_selective_state_update": selective_state_update,
}
"""transformers' names, and the official functions they stand for."""


class Accelerated:
    """What was replaced: `mixers`, by their names in the model, and `functions`, by transformers' names for them."""

    def __init__(self, mixers: dict[str, nn.Module], functions: list[str]):
        self._modules = dict(mixers)
        self.mixers, self.functions = list(mixers), functions

    def undo(self) -> None:
        """Give every mixer its own forward back. A second call does nothing."""
        for mixer in self._modules.values():
            del mixer.forward
        self._modules.clear()

    def __repr__(self) -> str:
        return f"Accelerated({len(self.mixers)} mixers, {', '.join(self.functions)})"


def accelerate(model: nn.Module) -> Accelerated:
    """Let the Mamba mixers of a transformers model compute with mambakit: the same outputs and caches, sooner.

    Works for every model whose mixers call transformers' Mamba functions: mamba, mamba2, falcon_mamba, and hybrids such
    as jamba, bamba, zamba2. Raises `ValueError` for a model without such mixers, for one that is accelerated already,
    and for mixers whose `forward` something else has replaced.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"accelerate takes a loaded model, got {type(model).__name__}")
    mixers = {name: module for name, module in model.named_modules() if functions_of(module)}
    if not mixers:
        raise ValueError(
            f"{type(model).__name__} has no mixers that call transformers' Mamba functions; "
            "mambakit's own models need no acceleration"
        )
    for name, mixer in mixers.items():
        if "forward" in vars(mixer):
            raise ValueError(f"the forward of {name} is replaced already; undo that first, or accelerate before it")
    for mixer in mixers.values():
        mixer.forward = MethodType(rewritten(type(mixer)), mixer)
    used = sorted({name for mixer in mixers.values() for name in functions_of(mixer)})
    return Accelerated(mixers, used)


def functions_of(module: nn.Module) -> list[str]:
    """The functions to replace in a transformers mixer, none for any other module."""
    if not type(module).__module__.startswith("transformers."):
        return []
    forward = inspect.unwrap(type(module).forward)
    return [name for name in REPLACEMENTS if name in forward.__code__.co_names and name in forward.__globals__]


@functools.cache
def rewritten(kind: type[nn.Module]) -> FunctionType:
    """The forward of a mixer class with our functions in its globals, under the same decorators."""
    chain: list[Any] = [kind.forward]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    plain = chain.pop()
    ours = {name: known_arguments_only(ours) for name, ours in REPLACEMENTS.items()}
    inner = with_globals(plain, {**plain.__globals__, **ours}, plain.__closure__)
    for wrapper in reversed(chain):
        # A decorator holds what it wraps in a cell of its closure: the same decorator around the new function.
        wrapped = wrapper.__wrapped__
        cells = tuple(type(cell)(inner) if cell.cell_contents is wrapped else cell for cell in wrapper.__closure__)
        inner = with_globals(wrapper, wrapper.__globals__, cells)
    return inner


def with_globals(function: Any, names: dict[str, Any], closure: Any) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def known_arguments_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Drop keywords the official function does not have, as transformers does for the official packages.

    They are what a model was called with and hands down to every function, and transformers' own tuning switches.
    """
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **{name: value for name, value in options.items() if name in known})

    return call
