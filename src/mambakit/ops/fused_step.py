"""One token: which calls a fused kernel may take, the operators that do, and which states may be overwritten."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mambakit.kernels.cpu import step as _cpu  # noqa: F401 - defines the operators
from mambakit.ops.backends import use_kernels

mamba1_step_conv = torch.ops.mambakit.mamba1_step_conv_cpu.default
mamba1_step = torch.ops.mambakit.mamba1_step_cpu.default
mamba2_step = torch.ops.mambakit.mamba2_step_cpu.default
mamba3_step = torch.ops.mambakit.mamba3_step_cpu.default


def can_fuse(backend: str, tensors: tuple[Tensor | None, ...], trained: Iterable[Tensor]) -> bool:
    """Whether a step kernel may run on `tensors`, of which some may be None.

    They are float32 on the CPU, and neither they nor `trained` (what else takes part) need a gradient: the kernels have
    none.
    """
    with_gradients, traced = torch.is_grad_enabled(), torch.compiler.is_compiling()
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or (with_gradients and tensor.requires_grad):
            return False
        # A subclass may not know what to do with our operators. A tracer's own does.
        if not traced and type(tensor) not in (Tensor, torch.nn.Parameter):
            return False
    if with_gradients and any(tensor.requires_grad for tensor in trained):
        return False
    return use_kernels(backend, *tensors)


def let_overwrite(state: Tensor) -> Tensor:
    """`state`, which a step may from now on turn into the next one instead of making a new tensor.

    A model's states are too large for the allocator to keep at hand: a new one costs more in fresh pages than the step.
    """
    state._may_overwrite = True  # type: ignore[attr-defined]
    return state


def may_overwrite(state: Tensor) -> bool:
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return getattr(state, "_may_overwrite", False)
