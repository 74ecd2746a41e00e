"""Decoding steps as torch operators: everything between a block's two projections, for one token of every row.

The operators return new windows and states; the functions behind them (`mamba2_step` and the like) write into tensors
they are given, which may be those that entered. float32 on the CPU only, and without gradients: the blocks see to that.
"""

import torch
from torch import Tensor

from mambakit.ops.kernels.cpu.library import kernel, pointer

LIBRARY = torch.library.Library("mambakit", "FRAGMENT")


def mamba2_step(
    projected_bX: Tensor,
    window_bvk: Tensor,
    state_bhpr: Tensor,
    conv_weight_v1k: Tensor,
    conv_bias_v: Tensor | None,
    dt_bias_h: Tensor,
    A_log_h: Tensor,
    D: Tensor,
    norm_weight_i: Tensor | None,
    norm_group: int,
    norm_eps: float,
    norm_before_gate: bool,
    dt_low: float,
    dt_high: float,
    *,
    window_out: Tensor,
    state_out: Tensor,
) -> Tensor:
    """Writes the new window and state, contiguous tensors like the old ones or these themselves; returns the output."""
    b, h, p, r = state_bhpr.shape
    v, k = window_bvk.shape[1:]
    mlp = (projected_bX.shape[1] - h - v - h * p) // 2
    out_bi = projected_bX.new_empty(b, mlp + h * p)
    kernel("mamba2_step", "iiiiiii" + "pppppp" + "ifffii" + "pppppp")(
        *(b, h, p, r, (v - h * p) // (2 * r), k, mlp),
        *map(pointer, (conv_weight_v1k, conv_bias_v, dt_bias_h, A_log_h, D, norm_weight_i)),
        *(norm_group, norm_eps, dt_low, dt_high, D.numel() != h, norm_before_gate),
        *map(pointer, (projected_bX, window_bvk, window_out, state_bhpr, state_out, out_bi)),
    )
    return out_bi
