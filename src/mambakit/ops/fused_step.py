"""Decoding steps: everything between a block's two projections, for one token of every row.

Kernels only, without gradients: where none takes a call, a block goes the way of any other length. They read float32.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mambakit.ops.operation import TorchOperation


def like(*tensors: Tensor) -> list[Tensor]:
    """Room for the new value of each, contiguous."""
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


MAMBA1_STEP_CONV = TorchOperation(
    "mamba1_step_conv",
    "Tensor projected, Tensor window, Tensor conv_weight, Tensor? conv_bias",
    lambda projected_bX, window_bik, *_: [projected_bX.new_empty(window_bik.shape[:2]), *like(window_bik)],
)
"""`silu` of the convolution at the newest token, which is the first half of `projected`; the window."""

MAMBA1_STEP = TorchOperation(
    "mamba1_step",
    "Tensor projected, Tensor x, Tensor dt, Tensor dt_b_c, Tensor state, Tensor A_log, Tensor D",
    lambda projected_bX, x_bi, dt_bi, dt_b_c_bX, state_bir, *_: like(x_bi, state_bir),
)
"""The scan of one token with skip and gate; `dt_b_c` is what `x_proj` returns, `dt` what `dt_proj` makes of it."""


def _fake_mamba2(projected_bX: Tensor, window_bvk: Tensor, state_bhpr: Tensor, *others: Any) -> list[Tensor]:
    b, h, p, _ = state_bhpr.shape
    mlp = (projected_bX.shape[1] - h * p - window_bvk.shape[1] - h) // 2
    return [projected_bX.new_empty(b, mlp + h * p), *like(window_bvk, state_bhpr)]


MAMBA2_STEP = TorchOperation(
    "mamba2_step",
    "Tensor projected, Tensor window, Tensor state, Tensor conv_weight, Tensor? conv_bias, Tensor dt_bias, "
    "Tensor A_log, Tensor D, Tensor? norm_weight, int norm_group, float norm_eps, float dt_low, float dt_high, "
    "bool norm_before_gate",
    _fake_mamba2,
)
"""Outputs, window and state. `norm_weight=None` is the gate alone; `D` has an entry per head or per channel."""

MAMBA3_STEP = TorchOperation(
    "mamba3_step",
    "Tensor projected, Tensor state, Tensor k_state, Tensor v_state, Tensor angle, Tensor dt_bias, Tensor B_norm, "
    "Tensor C_norm, Tensor B_bias, Tensor C_bias, Tensor? mimo_x, Tensor? mimo_z, Tensor? mimo_o, Tensor D, "
    "Tensor? norm_weight, int angles, bool half, bool heavy_tail, float norm_eps, float dt_low, float dt_high, "
    "float a_floor, float rotation_range",
    lambda projected_bX, state_bhpr, k_state_bmhr, v_state_bhp, *rest: [
        projected_bX.new_empty(v_state_bhp.shape).flatten(1),
        *like(state_bhpr, k_state_bmhr, v_state_bhp, rest[0]),
    ],
)
"""Outputs, state, the last B, the last x and the angle. `angles` pairs rotate, by `half` or as neighbours."""


def take_step(operation: TorchOperation, entering: Sequence[Tensor], fields: Mapping[str, Any]) -> list[Tensor] | None:
    """`operation` on what enters a step and, by name, what else it reads; None where no kernel takes it."""
    inputs = [*entering, *(fields[name] for name in operation.names[len(entering) :])]
    for tensor in inputs[: operation.tensors]:
        if tensor is not None and tensor.dtype != torch.float32:
            return None
    kernel = operation.offer(*inputs[: operation.tensors])
    return None if kernel is None else kernel(*inputs)
