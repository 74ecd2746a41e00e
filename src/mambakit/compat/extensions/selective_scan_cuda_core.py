"""VMamba's extension: Mamba-1's scan without a gate. `nrows` has no effect."""

from typing import Any

from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.extensions.scan_kernels import like, run, run_backward

__all__ = ["bwd", "fwd"]


@of_tensors
def fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    nrows: int,
) -> list[Tensor]:
    """`[out, x]`; `x[:, :, -1, 1::2]` is the last state."""
    y, x = run(u, delta, A, B, C, D, delta_bias, delta_softplus)
    return [like(y, delta), x]


@of_tensors
def bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    x: Tensor | None,
    delta_softplus: bool,
    nrows: int,
) -> list[Any]:
    """`[du, ddelta, dA, dB, dC, dD, ddelta_bias]`; `x` is not read."""
    return run_backward(u, delta, A, B, C, D, delta_bias, dout, delta_softplus)[:-1]
