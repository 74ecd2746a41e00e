"""Decoding steps: everything between a block's two projections, for one token of every row."""

from typing import Any

from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.structs import (
    Mamba1Step,
    Mamba1StepConv,
    Mamba1StepScan,
    Mamba2Step,
    Mamba2StepCall,
    Mamba3Carried,
    Mamba3Step,
    Mamba3StepCall,
)
from mambakit.ops.fused_step import MAMBA1_STEP, MAMBA1_STEP_CONV, MAMBA2_STEP, MAMBA3_STEP
from mambakit.ops.operation import TorchOperation

Inputs = dict[str, Any]


def by_name(operation: TorchOperation, inputs: tuple[Any, ...]) -> Inputs:
    """The inputs of an operation, tensors as the kernels read them."""
    values = [x.contiguous() if isinstance(x, Tensor) else x for x in inputs]
    return dict(zip(operation.names, values, strict=True))


def filled(struct: Any, x: Inputs, /, **more: Any) -> Any:
    """The struct with the inputs that it has fields for, and `more`."""
    for name, _ in struct._fields_:
        if name in x and name not in more:
            value = x[name]
            more[name] = value.data_ptr() if isinstance(value, Tensor) else value
    return struct(**more)


def like(*tensors: Tensor) -> list[Tensor]:
    """Room for the new value of each, contiguous."""
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


def check_numel(inputs: Inputs, /, **counts: int) -> None:
    """The kernels trust the sizes they are told: a tensor of another one must not reach them."""
    for name, count in counts.items():
        tensor = inputs[name]
        if tensor is not None and tensor.numel() != count:
            raise ValueError(f"{name} has {tensor.numel()} elements, expected {count}")


def mamba1_step_conv(*inputs: Any) -> list[Tensor]:
    x = by_name(MAMBA1_STEP_CONV, inputs)
    window = x["window"]
    b, i, k = window.shape
    check_numel(x, projected=b * 2 * i, conv_weight=i * k, conv_bias=i, reset=b)
    x_bi, window_out = window.new_empty(b, i), *like(window)
    step = filled(Mamba1Step, x, channels=i, k=k)
    windows = {"window_in": pointer(window), "window_out": pointer(window_out)}
    run(filled(Mamba1StepConv, x, step=step, batch=b, x=pointer(x_bi), **windows))
    return [x_bi, window_out]


def mamba1_step_scan(*inputs: Any) -> list[Tensor]:
    x = by_name(MAMBA1_STEP, inputs)
    state = x["state"]
    b, i, r = state.shape
    dt_rank = x["dt_b_c"].shape[1] - 2 * r
    bc = b * (max(dt_rank, 0) + 2 * r)
    check_numel(x, projected=b * 2 * i, x=b * i, dt=b * i, A_log=i * r, D=i, dt_b_c=bc, reset=b)
    y_bi, state_out = like(x["x"], state)
    step = filled(Mamba1Step, x, channels=i, r=r)
    states = {"state_in": pointer(state), "state_out": pointer(state_out)}
    run(filled(Mamba1StepScan, x, step=step, batch=b, dt_rank=dt_rank, out=pointer(y_bi), **states))
    return [y_bi, state_out]


def mamba2_step(*inputs: Any) -> list[Tensor]:
    x = by_name(MAMBA2_STEP, inputs)
    projected, window, state, norm_group = x["projected"], x["window"], x["state"], x["norm_group"]
    (b, h, p, r), (_, v, k) = state.shape, window.shape
    groups = (v - h * p) // max(2 * r, 1)
    mlp = (projected.shape[1] - h * p - v - h) // 2
    D_per_channel = x["D"].numel() != h
    check_numel(
        x,
        projected=b * (2 * max(mlp, 0) + h * p + v + h),
        window=b * (h * p + 2 * groups * r) * k,
        conv_weight=v * k,
        conv_bias=v,
        dt_bias=h,
        A_log=h,
        D=h * p if D_per_channel else h,
        norm_weight=h * p,
        reset=b,
        fresh_state=h * p * r,
    )
    if norm_group < 1 or h * p % norm_group or groups < 1 or h % groups or r < 1 or mlp < 0:
        raise ValueError(f"{h} heads of {p} channels do not fit {groups} groups or a norm over {norm_group} channels")
    out = [projected.new_empty(b, mlp + h * p), *like(window, state)]
    sizes = {"heads": h, "p": p, "r": r, "groups": groups, "k": k, "mlp": mlp}
    y_out, window_out, state_out = map(pointer, out)
    run(
        Mamba2StepCall(
            step=filled(Mamba2Step, x, D_per_channel=D_per_channel, **sizes),
            batch=b,
            projected=pointer(projected),
            window_in=pointer(window),
            window_out=window_out,
            state_in=pointer(state),
            state_out=state_out,
            out=y_out,
            reset=pointer(x["reset"]),
            fresh_state=pointer(x["fresh_state"]),
        )
    )
    return out


def mamba3_step(*inputs: Any) -> list[Tensor]:
    x = by_name(MAMBA3_STEP, inputs)
    projected, angles = x["projected"], x["angles"]
    before = [x[name] for name in ("state", "k_state", "v_state", "angle")]
    (b, h, p, r), m, kept = before[0].shape, before[1].shape[1], max(angles, 1)
    # A quaternion keeps four numbers and comes from three, for each head its own.
    turns, kept, size = (3 * h * kept, 4 * kept, 4) if x["quaternions"] else (kept, kept, 2)
    groups = (projected.shape[1] - 2 * h * p - 3 * h - turns) // max(2 * m * r, 1)
    if groups < 1 or h % groups or not 0 <= size * angles <= r or m * r < 1:
        raise ValueError(f"{h} heads with states of {r} do not fit {groups} groups or {angles} angles")
    check_numel(
        x,
        projected=b * (2 * h * p + 2 * m * groups * r + 3 * h + turns),
        **{"k_state": b * m * h * r, "v_state": b * h * p, "angle": b * h * kept, "reset": b},
        fresh_state=h * p * r,
        **{"dt_bias": h, "D": h, "B_norm": r, "C_norm": r, "B_bias": h * m * r, "C_bias": h * m * r},
        **{"mimo_x": h * m * p, "mimo_z": h * m * p, "mimo_o": h * m * p, "norm_weight": h * p},
    )
    y_bi, after = projected.new_empty(b, h * p), like(*before)
    run(
        Mamba3StepCall(
            step=filled(Mamba3Step, x, heads=h, p=p, r=r, groups=groups, ranks=m),
            batch=b,
            projected=pointer(projected),
            before=Mamba3Carried(*map(pointer, before)),
            after=Mamba3Carried(*map(pointer, after)),
            out=pointer(y_bi),
            reset=pointer(x["reset"]),
            fresh_state=pointer(x["fresh_state"]),
        )
    )
    return [y_bi, *after]


MAMBA1_STEP_CONV.implement(CPU, mamba1_step_conv)
MAMBA1_STEP.implement(CPU, mamba1_step_scan)
MAMBA2_STEP.implement(CPU, mamba2_step)
MAMBA3_STEP.implement(CPU, mamba3_step)
