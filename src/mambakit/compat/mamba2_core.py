"""Mamba-2's filling of the core, for sequences in rows and for packed ones."""

import torch
from torch import Tensor

from mambakit.compat.packing import from_rows, packed, segments_of, to_rows
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
    """Every packed sequence in a row of its own, beyond whose end a step size of zero changes nothing.

    Tokens after the last one are sequences without states, if `seq_idx` says which; else their outputs are zero.
    """
    length = sequence[0].shape[1]
    layout = packed(sequence[0], cu_seqlens, seq_idx)
    if state_1hpr is not None:
        first_r = torch.arange(len(layout.lengths_r), device=state_1hpr.device) == 0
        state_1hpr = state_1hpr * first_r[:, None, None, None]
    y_rlhp, state_rhpr = scan(*(to_rows(layout, t) for t in sequence), state_1hpr)  # type: ignore[misc]
    y_1shp, last_1hpr = from_rows(layout, y_rlhp, length), state_rhpr[-1:]
    end = len(layout.back_n)
    if seq_idx is not None and end < length:
        segments_bs = segments_of(seq_idx[:, end:], 1, length - end)
        rest_1shp, last_1hpr = scan(*(t[:, end:] for t in sequence), None, segments_bs)  # type: ignore[misc]
        y_1shp = torch.cat((y_1shp[:, :end], rest_1shp), dim=1)
    return y_1shp, last_1hpr, state_rhpr
