"""VMamba's extension for states of one entry: `A` (i), `B` and `C` (b, g, s)."""

from typing import Any

from torch import Tensor

from mambakit.compat.extensions import selective_scan_cuda_core as core

__all__ = ["bwd", "fwd"]


def fwd(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any) -> list[Tensor]:
    """`[out, x]`, as those of the core with an axis of one for the state."""
    return core.fwd(u, delta, *with_state(A, B, C), *rest)


def bwd(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any) -> list[Any]:
    du, ddelta, dA, dB, dC, *others = core.bwd(u, delta, *with_state(A, B, C), *rest)
    return [du, ddelta, dA[:, 0], dB[:, :, 0], dC[:, :, 0], *others]


def with_state(A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if (A.dim(), B.dim(), C.dim()) != (1, 3, 3):
        shapes = f"A {tuple(A.shape)}, B {tuple(B.shape)} and C {tuple(C.shape)}"
        raise ValueError(f"{shapes} were given, expected axes (i), (b, g, s) and (b, g, s): the state has one entry")
    return A[:, None], B[:, :, None], C[:, :, None]
