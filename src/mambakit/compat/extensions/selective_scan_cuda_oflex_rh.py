"""Spatial-Mamba's extension, which returns the states of all tokens instead of reading them."""

from typing import Any

import torch
from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.extensions.scan_kernels import run, scan
from mambakit.compat.gradients import pulled_back

__all__ = ["bwd", "fwd"]


@of_tensors
def fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    nrows: int,
    out_float: bool,
) -> list[Tensor]:
    """`[out, x]` with the states `out` (b, i, r, s). As officially, `D` has no effect."""
    with torch.no_grad():
        states_birs = all_states(u, delta, A, B, delta_bias, delta_softplus)
    x = run(u, delta, A, B, B, None, delta_bias, delta_softplus)[1]
    return [states_birs if out_float else states_birs.to(u.dtype), x]


@of_tensors
def bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    x: Tensor | None,
    delta_softplus: bool,
    nrows: int,
) -> list[Any]:
    """`[du, ddelta, dA, dB, dD, ddelta_bias]`; `x` is not read."""

    def forward(*inputs: Any) -> Tensor:
        return all_states(*inputs, delta_softplus)  # type: ignore[arg-type]

    *grads, d_bias = pulled_back(forward, (u, delta, A, B, delta_bias), (dout,))
    return [*grads, None if D is None else torch.zeros_like(D), d_bias]


def all_states(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, delta_bias: Tensor | None, delta_softplus: bool
) -> Tensor:
    """(b, i, r, s): every entry of a channel's state is the state of a channel with one."""
    b, i, s = u.shape
    r = A.shape[1]
    u, delta = (t.repeat(1, r, 1) for t in (u, delta))
    B_bG1s = B.transpose(1, 2).flatten(1, 2)[:, :, None]
    delta_bias = None if delta_bias is None else delta_bias.repeat(r)
    y = scan(u, delta, A.t().reshape(-1, 1), B_bG1s, torch.ones_like(B_bG1s), None, delta_bias, delta_softplus)
    return y.view(b, r, i, s).transpose(1, 2)
