"""The backends of the Triton kernels: `"triton"`, and `"triton_fast"` with fewer digits."""

import importlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.ops.backends import Backend, register_backend
from mambakit.ops.operation import TorchOperation, WhyNot

FIRST, END = (3, 7, 1), (3, 10)
"""The versions of Triton that may be used: earlier ones compile a gated backward wrongly, later ones are not known."""


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _why_missing() -> str | None:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "Triton is not installed: pip install 'mambakit[gpu]'"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not FIRST <= numbers < END:
        first, end = (".".join(map(str, v)) for v in (FIRST, END))
        return f"Triton is {version}, expected at least {first} and below {end}"
    if not interpreted() and not torch.cuda.is_available():
        return "torch finds no GPU here"
    return None


def why_missing() -> str | None:
    return _why_missing()


# A compiler asks once, as for the CPU kernels.
why_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def about() -> dict[str, Any]:
    return {"triton": importlib.metadata.version("triton"), "interpreted": interpreted()}


def why_not_auto(operation: str, tensors: Sequence[Tensor | None]) -> str | None:
    if interpreted():
        return "Triton's interpreter is for tests"
    return caution(operation, tensors)


def caution(operation: str, tensors: Sequence[Tensor | None]) -> str | None:
    """What the proof on the device says against a kernel, which it runs if nobody has."""
    if interpreted():
        return None
    first = next(t for t in tensors if t is not None and t.is_floating_point())
    return verdict(operation, str(first.device), first.dtype)


def warn(operation: str, tensors: Sequence[Tensor | None]) -> None:
    against = caution(operation, tensors)
    if against is not None:
        warnings.warn(f'backend "triton" runs {operation} because it was asked for: {against}', stacklevel=3)


def verdict(operation: str, device: str, dtype: torch.dtype) -> str | None:
    proof = importlib.import_module("mambakit.kernels.triton.prove")
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing and not proof.is_known(operation, device, dtype):
        return "it has not proved itself on this device, which a graph's capture cannot wait for: run mambakit doctor"
    return proof.verdict(operation, device, dtype)


# A compiler asks once, as above.
verdict._dynamo_marked_constant = True  # type: ignore[attr-defined]


def prove() -> list[dict[str, Any]]:
    """Every kernel on every device here, for `mambakit doctor`."""
    proof = importlib.import_module("mambakit.kernels.triton.prove")
    devices = [torch.device("cuda", i) for i in range(0 if interpreted() else torch.cuda.device_count())]
    return [
        {"device": str(device), **row._asdict(), "passed": row.passed}
        for device in devices
        for row in proof.all_findings(device)
    ]


def tune() -> list[dict[str, Any]]:
    if interpreted():
        raise ValueError("Triton's interpreter has no times worth comparing; unset TRITON_INTERPRET")
    return importlib.import_module("mambakit.kernels.triton.tune").tune()


def by_name_only(operation: str, tensors: Sequence[Tensor | None]) -> str | None:
    return "its fewer digits have to be asked for"


def _backend(name: str, why_not_auto: Callable[[str, Sequence[Tensor | None]], str | None]) -> Backend:
    return register_backend(
        Backend(
            name=name,
            device="cpu" if interpreted() else "cuda",
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            why_missing=why_missing,
            about=about,
            why_not_auto=why_not_auto,
            warn=warn,
            prove=prove if name == "triton" else list,
            tune=tune if name == "triton" else None,
        )
    )


class Precision(NamedTuple):
    """How many bfloat16 numbers stand for one operand of a matrix product."""

    inputs: dict[torch.dtype, int]
    computed: int
    states: torch.dtype
    """In which states between chunks are stored."""


EXACT = Precision({torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}, 3, torch.float32)
"""As many as hold the operand: results are those of float32 products."""
FAST = Precision({torch.bfloat16: 1, torch.float16: 1, torch.float32: 2}, 1, torch.bfloat16)
"""One for everything computed, as other implementations have it; docs/gpu.md, "Precision", says what it costs."""

TRITON = _backend("triton", why_not_auto)
TRITON_FAST = _backend("triton_fast", by_name_only)
MODES = ((TRITON, EXACT), (TRITON_FAST, FAST))


def implement(
    operation: TorchOperation,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    why_not: WhyNot | None = None,
) -> None:
    """Register one kernel for both modes: for what has no matrix products they are the same."""
    for backend, _ in MODES:
        operation.implement(backend, forward, backward, why_not)
