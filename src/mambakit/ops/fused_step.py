"""Decoding steps: everything between a block's two projections, for one token of every row.

Kernels only, without gradients: where none takes a call, a block goes the way of any other length. They read float32.

Rows of `reset`, where it is given, start afresh before the token: nothing that they carry is read, but `fresh_state` in
the place of their state, where it is not zeros.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mambakit.ops.backends import asked
from mambakit.ops.operation import Outputs, TorchOperation


def check_step(operation: TorchOperation, inputs: Sequence[Any], **axes: int) -> None:
    """That all tensors but flags are float32 and these have so many axes; sizes are for kernels to compare."""
    for name, tensor in zip(operation.names[: operation.tensors], inputs, strict=False):
        expected = torch.bool if name == "reset" else torch.float32
        if tensor is not None and tensor.dtype != expected:
            raise ValueError(f"{name} is {tensor.dtype}, expected {expected}")
        if tensor is not None and tensor.dim() != axes.get(name, tensor.dim()):
            raise ValueError(f"{name} needs {axes[name]} axes, got shape {tuple(tensor.shape)}")


def like(*tensors: Tensor) -> list[tuple[Tensor, Sequence[int]]]:
    """Outputs for the new value of each."""
    return [(tensor, tensor.shape) for tensor in tensors]


MAMBA1_STEP_CONV = TorchOperation(
    "mamba1_step_conv",
    "Tensor projected, Tensor window, Tensor conv_weight, Tensor? conv_bias, Tensor? reset",
    lambda projected_bX, window_bik, *_: [(projected_bX, window_bik.shape[:2]), *like(window_bik)],
    check=lambda *inputs: check_step(MAMBA1_STEP_CONV, inputs, projected=2, window=3),
)
"""`silu` of the convolution at the newest token, which is the first half of `projected`; the window."""

MAMBA1_STEP = TorchOperation(
    "mamba1_step",
    "Tensor projected, Tensor x, Tensor dt, Tensor dt_b_c, Tensor state, Tensor A_log, Tensor D, Tensor? reset",
    lambda projected_bX, x_bi, dt_bi, dt_b_c_bX, state_bir, *_: like(x_bi, state_bir),
    check=lambda *inputs: check_step(MAMBA1_STEP, inputs, projected=2, x=2, dt=2, dt_b_c=2, state=3, A_log=2),
)
"""The scan of one token with skip and gate; `dt_b_c` is what `x_proj` returns, `dt` what `dt_proj` makes of it."""


def _mamba2_outputs(projected_bX: Tensor, window_bvk: Tensor, state_bhpr: Tensor, *others: Any) -> Outputs:
    b, h, p, _ = state_bhpr.shape
    mlp = (projected_bX.shape[1] - h * p - window_bvk.shape[1] - h) // 2
    return [(projected_bX, (b, mlp + h * p)), *like(window_bvk, state_bhpr)]


MAMBA2_STEP = TorchOperation(
    "mamba2_step",
    "Tensor projected, Tensor window, Tensor state, Tensor conv_weight, Tensor? conv_bias, Tensor dt_bias, "
    "Tensor A_log, Tensor D, Tensor? norm_weight, Tensor? reset, Tensor? fresh_state, int norm_group, float norm_eps, "
    "float dt_low, float dt_high, bool norm_before_gate",
    _mamba2_outputs,
    check=lambda *inputs: check_step(MAMBA2_STEP, inputs, projected=2, window=3, state=4),
)
"""Outputs, window and state. `norm_weight=None` is the gate alone; `D` has an entry per head or per channel."""

MAMBA3_STEP = TorchOperation(
    "mamba3_step",
    "Tensor projected, Tensor state, Tensor k_state, Tensor v_state, Tensor angle, Tensor dt_bias, Tensor B_norm, "
    "Tensor C_norm, Tensor B_bias, Tensor C_bias, Tensor? mimo_x, Tensor? mimo_z, Tensor? mimo_o, Tensor D, "
    "Tensor? norm_weight, Tensor? reset, Tensor? fresh_state, int angles, bool quaternions, bool half, "
    "bool heavy_tail, float norm_eps, float dt_low, float dt_high, float a_floor, float rotation_range",
    lambda projected_bX, state_bhpr, k_state_bmhr, v_state_bhp, *rest: [
        (projected_bX, (state_bhpr.shape[0], state_bhpr.shape[1] * state_bhpr.shape[2])),
        *like(state_bhpr, k_state_bmhr, v_state_bhp, rest[0]),
    ],
    check=lambda *inputs: check_step(MAMBA3_STEP, inputs, projected=2, state=4, k_state=4, v_state=3),
)
"""Outputs, state, the last B, the last x and the angle. `angles` pairs rotate, by `half` or as neighbours; with
`quaternions`, so many blocks of four."""


def take_step(
    operation: TorchOperation,
    entering: Sequence[Tensor],
    fields: Mapping[str, Any],
    reset_b: Tensor | None = None,
    fresh_state: Tensor | None = None,
) -> list[Tensor] | None:
    """`operation` on what enters a step and, by name, what else it reads; None where no kernel takes it."""
    rows = {"reset": reset_b, "fresh_state": None if reset_b is None else fresh_state}
    inputs = [*entering, *[rows[name] if name in rows else fields[name] for name in operation.names[len(entering) :]]]
    for tensor in inputs[: operation.tensors]:
        if tensor is not None and tensor is not reset_b and tensor.dtype != torch.float32:
            return None
    kernel = operation.offer(*inputs[: operation.tensors])
    return None if kernel is None else kernel(*inputs)


def is_step(x_bsX: Tensor, segments_bs: Tensor | None, lengths_b: Tensor | None, parameters: Iterable[Tensor]) -> bool:
    """One token of every row, no gradients, and kernels not ruled out: what the fused steps take."""
    if x_bsX.shape[1] != 1 or segments_bs is not None or lengths_b is not None or asked() == "torch":
        return False
    return not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in parameters)
