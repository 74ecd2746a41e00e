"""mambakit's scans inside transformers' own models.

transformers writes its mixers against the official functions and calls slow stand-ins where those are not installed. A
mixer's `forward` gets new globals in which these names are ours: the code that runs is transformers', caches and hooks
are as before, and no other model is touched. Norms and plain `nn.Linear` modules get a `forward` that takes a kernel
where there is one and is their own otherwise.
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mambakit.compat.mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mambakit.compat.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mambakit.compat.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from mambakit.ops import few_rows
from mambakit.ops.backends import PLAIN_TENSORS, asked
from mambakit.ops.norm import gated_rms_norm

REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "mamba_selective_scan": selective_scan_fn,
    "mamba_selective_state_update": selective_state_update,
    "mamba2_chunk_scan": mamba_chunk_scan_combined,
    "mamba2_selective_state_update": selective_state_update,
}
"""transformers' names, and the official functions they stand for."""


GATED = ("Mamba", "Bamba", "GraniteMoeHybrid", "NemotronH", "Zamba2")
UNGATED = (*GATED, "FalconH1", "FalconMamba", "Jamba", "Mamba2", "Zamba")
NORMS = {f"{family}RMSNorm" for family in UNGATED} | {f"{family}RMSNormGated" for family in GATED}
"""Norms of transformers' Mamba models that are one function: gate, root mean square per `group_size`, weight."""


class Accelerated:
    """What was replaced: `mixers`, by their names in the model, and `functions`, by transformers' names for them."""

    def __init__(self, mixers: list[str], functions: list[str], modules: list[nn.Module]):
        self.mixers, self.functions, self._modules = mixers, functions, modules

    def undo(self) -> None:
        """Give every module its own forward back. A second call does nothing."""
        for module in self._modules:
            del module.forward
        self._modules.clear()

    def __repr__(self) -> str:
        return f"Accelerated({len(self.mixers)} mixers, {', '.join(self.functions)})"


def accelerate(model: nn.Module) -> Accelerated:
    """Let the Mamba mixers of a transformers model compute with mambakit: the same outputs and caches, sooner.

    Works for every model whose mixers call transformers' Mamba functions: mamba, mamba2, falcon_mamba, and hybrids such
    as jamba, bamba, zamba2. Raises `ValueError` for a model without such mixers, for one that is accelerated already,
    and for mixers whose `forward` something else has replaced.

    Examples:
        >>> from transformers import Mamba2Config, Mamba2ForCausalLM
        >>> sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8}
        >>> config = Mamba2Config(vocab_size=64, num_hidden_layers=2, **sizes)
        >>> model = Mamba2ForCausalLM(config).eval()
        >>> replaced = mk.accelerate(model)
        >>> logits_bsw = model(torch.tensor([[1, 2, 3]])).logits
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
    forwards = {mixer: rewritten(type(mixer)) for mixer in mixers.values()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        if "forward" not in vars(module) and (forward := kernel_first(module, module is head)):
            forwards[module] = forward
    for module, forward in forwards.items():
        module.forward = MethodType(forward, module)
    used = sorted({name for mixer in mixers.values() for name in functions_of(mixer)})
    return Accelerated(list(mixers), used, list(forwards))


def kernel_first(module: nn.Module, is_head: bool) -> Callable[..., Tensor] | None:
    """The forward of a norm or linear layer that takes a kernel where there is one; None for any other module."""
    if type(module) is nn.Linear:
        return multiply_last if is_head else multiply
    if type(module).__module__.startswith("transformers.") and type(module).__name__ in NORMS:
        return normalize
    return None


def multiply(self: nn.Linear, input: Tensor) -> Tensor:
    """Few rows, as in decoding, at the speed of reading the weight; many as torch multiplies them."""
    y = by_few_rows(self, input)
    return F.linear(input, self.weight, self.bias) if y is None else y


def multiply_last(self: nn.Linear, input: Tensor) -> Tensor:
    """The head's many rows by oneDNN, which is ahead of torch's BLAS but rounds in another order.

    Not in the layers before it: over many layers two roundings grow apart.
    """
    y = by_few_rows(self, input)
    if y is None and input.numel() and is_plain_inference(input, self.weight, self.bias):
        return torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
    return F.linear(input, self.weight, self.bias) if y is None else y


def by_few_rows(linear: nn.Linear, input: Tensor) -> Tensor | None:
    if torch.compiler.is_compiling() or input.dtype != torch.float32:
        return None
    return few_rows.multiply(
        input, few_rows.Weights(few_rows.FLOAT32, linear.in_features, linear.weight, None, linear.bias)
    )


def is_plain_inference(*tensors: Tensor | None) -> bool:
    """oneDNN, float32 on the CPU and no gradient wanted. A compiler has its own way with a torch operator."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    if asked() == "torch" or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    given = [t for t in tensors if t is not None]
    return all(t.dtype == torch.float32 and t.is_cpu and type(t) in PLAIN_TENSORS for t in given)


def normalize(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    # Narrower dtypes are transformers' own: where it rounds is part of the result.
    if any(t is not None and t.dtype != torch.float32 for t in (hidden_states, gate, self.weight)):
        return type(self).forward(self, hidden_states, *([] if gate is None else [gate]))
    group_size = getattr(self, "group_size", None)
    return gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, group_size=group_size)


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
    inner = steps_channels_last(with_globals(plain, {**plain.__globals__, **ours}, plain.__closure__))
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


def steps_channels_last(forward: FunctionType) -> Callable[..., Tensor]:
    """The forward of a Mamba-1 mixer with step sizes in the order that the scan reads, every other one as it is."""
    if "dt_proj" not in forward.__code__.co_names:
        return forward

    def call(self: nn.Module, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        # On other devices transformers may hand the weight to kernels of its own.
        on_cpu = type(self.dt_proj) is nn.Linear and hidden_states.device.type == "cpu"
        return forward(MixerView(self) if on_cpu else self, hidden_states, *args, **options)

    return call


class MixerView:
    """A mixer but for its `dt_proj.weight`, with which its forward multiplies `b R s` from the left.

    In that order torch copies the product, and the scan would have to copy it back.
    """

    def __init__(self, mixer: Any):
        self.mixer, self.dt_proj = mixer, StepProjection(mixer.dt_proj)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mixer, name)


class StepProjection:
    def __init__(self, linear: nn.Linear):
        self.weight, self.bias, self.linear = self, linear.bias, linear

    def __call__(self, dt_bsR: Tensor) -> Tensor:
        return self.linear(dt_bsR)

    def __matmul__(self, dt_bRs: Tensor) -> Tensor:
        return F.linear(dt_bRs.mT, self.linear.weight).mT


def known_arguments_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Drop keywords the official function does not have, as transformers does for the official packages.

    They are what a model was called with and hands down to every function, and transformers' own tuning switches.
    """
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **{name: value for name, value in options.items() if name in known})

    return call
