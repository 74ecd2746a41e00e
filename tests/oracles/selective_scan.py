"""Mamba-1's scan as its textbook recurrence: one token after the other, nothing from `ops`."""

import torch
from torch import Tensor


def selective_scan_loop(
    x_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b_bsgr: Tensor,
    c_bsgr: Tensor,
    state_bir: Tensor | None = None,
    segments_bs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t a) h_{t-1} + dt_t b_t x_t, y_t = sum_r h_t c_t; zero state at a new segment."""
    batch, length, channels = x_bsi.shape
    b_bsir, c_bsir = (t.repeat_interleave(channels // t.shape[2], dim=2) for t in (b_bsgr, c_bsgr))
    state = a_ir.new_zeros(batch, *a_ir.shape) if state_bir is None else state_bir * 1
    y = []
    for t in range(length):
        if segments_bs is not None and t > 0:
            goes_on_b = segments_bs[:, t] == segments_bs[:, t - 1]
            state = torch.where(goes_on_b[:, None, None], state, torch.zeros_like(state))
        dt = dt_bsi[:, t, :, None]
        state = torch.exp(dt * a_ir) * state + dt * b_bsir[:, t] * x_bsi[:, t, :, None]
        read = (state * c_bsir[:, t]).sum(dim=-1)
        y.append(2 * read.real if read.is_complex() else read)
    return (torch.stack(y, dim=1) if y else x_bsi * 1), state
