"""What the extensions for Mamba-1's scan have in common."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.compat.arguments import in_full_precision, step_size
from mambakit.compat.gradients import pulled_back
from mambakit.compat.mamba_ssm.ops.selective_scan_interface import scan_from

CHUNK = 2048
"""Tokens after which the official kernels keep an intermediate state."""


def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> Tensor:
    """`y` (b, i, s) in at least float32, from any of the official shapes, without a gate."""
    u, delta, A, B, C, D, delta_bias = in_full_precision(u, delta, A, B, C, D, delta_bias, may_be_complex=True)
    return scan_from(None, u, delta, A, B, C, D, None, delta_bias, delta_softplus)[0]


@torch.no_grad()
def run(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """`scan`, and the official intermediate result (b, i, chunks, 2 r).

    Of each chunk that holds, alternating, the product of all decays up to its end and the state there.
    """
    u, delta, A, B, C, D, delta_bias = in_full_precision(u, delta, A, B, C, D, delta_bias, may_be_complex=True)
    bias = None if delta_bias is None else delta_bias[:, None]
    total_bis = step_size(delta, bias, delta_softplus).cumsum(-1)
    state_bir, outputs, kept = None, [], []
    for start in range(0, max(u.shape[-1], 1), CHUNK):
        tokens, numbers = (slice(k * start, k * (start + CHUNK)) for k in (1, 2 if A.is_complex() else 1))
        B_now, C_now = (t if t.dim() == 2 else t[..., numbers] for t in (B, C))
        at = (u[..., tokens], delta[..., tokens], A, B_now, C_now)
        y, state_bir = scan_from(state_bir, *at, D, None, delta_bias, delta_softplus)
        decay_bir = torch.exp(total_bis[..., tokens][..., -1:] * A) if u.shape[-1] else torch.ones_like(state_bir)
        outputs.append(y)
        kept.append(torch.stack((decay_bir.to(state_bir.dtype), state_bir), dim=-1).flatten(-2))
    return torch.cat(outputs, dim=-1), torch.stack(kept, dim=2)


def like(values: Tensor, other: Tensor) -> Tensor:
    """In dtype and memory layout as `other`."""
    return torch.empty_like(other).copy_(values)


@torch.no_grad()
def gated(y: Tensor, z: Tensor) -> Tensor:
    return like(y * F.silu(z.to(y.dtype)), z)


def run_backward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    delta_softplus: bool,
    z: Tensor | None = None,
) -> list[Any]:
    """Gradients of u, delta, A, B, C, D, delta_bias and z, each in its input's dtype, None for what is None."""

    def forward(*inputs: Any) -> Tensor:
        *ungated, z = inputs
        y = scan(*ungated, delta_softplus)  # type: ignore[arg-type]
        return y if z is None else y * F.silu(z.to(y.dtype))

    return pulled_back(forward, (u, delta, A, B, C, D, delta_bias, z), (dout,))
