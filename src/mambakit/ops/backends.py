"""Which implementation runs an operation: torch's operators ("torch"), or the fused CPU kernels ("cpu")."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mambakit.kernels.cpu.library import why_missing

BACKENDS = ("auto", "torch", "cpu", "triton")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_auto = "auto"


@contextmanager
def auto_means(backend: str) -> Iterator[None]:
    """Inside, `"auto"` is `backend`, for what has no argument to say so."""
    global _auto
    before, _auto = _auto, backend
    try:
        yield
    finally:
        _auto = before


def use_kernels(backend: str, *tensors: Tensor | None) -> bool:
    """Whether the fused CPU kernels run on `tensors`.

    `"auto"` takes them wherever they apply: on the CPU, in float32 or narrower, outside `torch.func`'s transforms and
    forward-mode derivatives. `"cpu"` takes them or raises `ValueError`, `"torch"` never.
    """
    if backend == "auto":
        backend = "torch" if _is_transformed() else _auto
    if backend == "torch":
        return False
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; choose from {', '.join(BACKENDS)}")
    if backend == "triton":
        raise ValueError('backend "triton" is not in this version of mambakit; "auto" and "torch" run anywhere')
    reason = why_missing()
    if reason is None:
        for tensor in tensors:
            if tensor is not None and (tensor.device.type != "cpu" or not _is_known(tensor.dtype)):
                reason = f"it got a tensor of {tensor.dtype} on {tensor.device}"
                break
    if reason is not None and backend == "cpu":
        raise ValueError(
            f'backend "cpu" needs the compiled kernels and float32, bfloat16 or float16 tensors on the CPU: {reason}; '
            '"torch" runs anywhere'
        )
    return reason is None


def _is_known(dtype: torch.dtype) -> bool:
    return dtype in KERNEL_DTYPES or not (dtype.is_floating_point or dtype.is_complex)


def _is_transformed() -> bool:
    """Whether `torch.func` or forward-mode derivatives look at every operation, which reaches past `torch.no_grad`."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
