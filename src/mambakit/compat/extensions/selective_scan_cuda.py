"""Mamba-1's scan, as the official package's extension has it: `u`, `delta`, `z` (b, i, s), `A` (i, r)."""

from typing import Any

from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.extensions.scan_kernels import gated, like, run, run_backward
from mambakit.compat.gradients import written

__all__ = ["bwd", "fwd"]


@of_tensors
def fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> list[Tensor]:
    """`[out, x]` and, with a gate, `out_z`; `out` is without the gate, and `x[:, :, -1, 1::2]` the last state."""
    y, x = run(u, delta, A, B, C, D, delta_bias, delta_softplus)
    return [like(y, delta), x] if z is None else [like(y, delta), x, gated(y, z)]


@of_tensors
def bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    x: Tensor | None,
    out: Tensor | None,
    dz: Tensor | None,
    delta_softplus: bool,
    recompute_out_z: bool,
) -> list[Any]:
    """`[du, ddelta, dA, dB, dC, dD, ddelta_bias]`, with a gate `dz`, and if asked for the gated output once more.

    `dz` is written into the tensor given for it. `x` and `out` are not read.
    """
    *grads, d_z = run_backward(u, delta, A, B, C, D, delta_bias, dout, delta_softplus, z)
    if z is None:
        return grads
    grads.append(written(d_z, dz))
    if recompute_out_z:
        grads.append(gated(run(u, delta, A, B, C, D, delta_bias, delta_softplus)[0], z))
    return grads
