"""Mamba-2's filling of the core, for sequences in rows and for packed ones."""

import torch
from torch import Tensor

from mambakit.compat.packing import from_rows, packed, to_rows
from mambakit.ops.ssd import ssd


def scan(
    x_bshp: Tensor,
    b_bsgr: Tensor,
    c_bsgr: Tensor,
    da_bsh: Tensor,
    dt_bsh: Tensor,
    state_bhpr: Tensor | None,
    segments_bs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's filling of the core."""
    v_bsmhp, b_bsmgr, c_bsmgr = (t[:, :, None] for t in (x_bshp, b_bsgr, c_bsgr))
    entering = (da_bsh, dt_bsh, dt_bsh, state_bhpr)
    y_bsmhp, leaving_bhpr = ssd(v_bsmhp, b_bsmgr, c_bsmgr, *entering, segments_bs=segments_bs)
    return y_bsmhp[:, :, 0], leaving_bhpr


def scan_packed(
    sequence: tuple[Tensor, ...], state_1hpr: Tensor | None, cu_seqlens: Tensor, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Every packed sequence in a row of its own, beyond whose end a step size of zero changes nothing."""
    layout = packed(sequence[0], cu_seqlens, seq_idx)
    if state_1hpr is not None:
        first_r = torch.arange(len(layout.lengths_r), device=state_1hpr.device) == 0
        state_1hpr = state_1hpr * first_r[:, None, None, None]
    y_rlhp, state_rhpr = scan(*(to_rows(layout, t) for t in sequence), state_1hpr)  # type: ignore[misc]
    return from_rows(layout, y_rlhp, sequence[0].shape[1]), state_rhpr[-1:], state_rhpr
