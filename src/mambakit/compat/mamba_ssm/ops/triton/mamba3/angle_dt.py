"""Cumulative angles of Mamba-3."""

import math
from typing import Any

import torch
from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.gradients import pulled_back
from mambakit.compat.mamba3_core import turned_by
from mambakit.compat.packing import from_rows, packed, to_rows
from mambakit.ops.shapes import bind

__all__ = ["angle_dt_bwd", "angle_dt_fwd"]

__getattr__ = gpu_only(__name__, kernels="angle_dt_fwd_kernel angle_dt_bwd_kernel")


@of_tensors
def angle_dt_fwd(
    angle: Tensor,
    dt: Tensor,
    init_state: Tensor | None = None,
    chunk_size: int = 64,
    return_output_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Any:
    """The running sum of `pi tanh(angle) dt`, in [0, 2 pi), (b, s, h, a); with `return_output_state` also the last one.

    `angle` is (b, s, h, a) and `dt` (b, h, s); states are (n, h, a), one per row or packed sequence. Differentiable.
    """
    bind(angle_bsha=angle, dt_bhs=dt)
    dt_bsh, length = dt.mT, angle.shape[1]
    layout = None if cu_seqlens is None else packed(angle, cu_seqlens)
    if layout is not None:
        angle, dt_bsh = to_rows(layout, angle), to_rows(layout, dt_bsh)
    bind(angle_bsha=angle, init_state_bha=init_state)
    out, last = (t.remainder(2 * math.pi) for t in turned_by(angle, dt_bsh, init_state))
    out = out if layout is None else from_rows(layout, out, length)
    return (out, last) if return_output_state else out


@of_tensors
def angle_dt_bwd(
    grad_out: Tensor,
    angle: Tensor,
    dt: Tensor,
    has_init_state: bool = False,
    chunk_size: int = 64,
    grad_output_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `angle`, `dt` and, if there was one, of the state that `angle_dt_fwd` was given."""
    rows = len(angle) if cu_seqlens is None else len(cu_seqlens) - 1
    state = angle.new_zeros(rows, *angle.shape[2:], dtype=torch.promote_types(angle.dtype, torch.float32))

    def forward(angle: Tensor, dt: Tensor, state: Tensor) -> Any:
        return angle_dt_fwd(angle, dt, state, chunk_size, True, cu_seqlens)

    d_angle, d_dt, d_state = pulled_back(forward, (angle, dt, state), (grad_out, grad_output_state))
    return d_angle, d_dt, d_state if has_init_state else None
