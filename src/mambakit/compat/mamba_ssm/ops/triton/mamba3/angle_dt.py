"""Cumulative angles of Mamba-3."""

import math
from typing import Any

from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.mamba3_core import turned_by
from mambakit.compat.packing import from_rows, packed, to_rows
from mambakit.ops.shapes import bind

__all__ = ["angle_dt_fwd"]


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
