"""Decoding steps: everything between a block's two projections, for one token of every row."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.kernels.triton.backend import implement
from mambakit.kernels.triton.launch import launch, parts, power_of_two
from mambakit.kernels.triton.norm import finish
from mambakit.kernels.triton.tiles import why_refused
from mambakit.ops.fused_step import MAMBA1_STEP, MAMBA1_STEP_CONV, MAMBA2_STEP, MAMBA3_STEP
from mambakit.ops.norm import GATE_FIRST, NO_NORM, NORM_FIRST
from mambakit.ops.operation import TorchOperation

Inputs = dict[str, Any]
CHANNELS, ELEMENTS = 128, 1024
CARRIED = {"window", "state", "k_state", "v_state", "angle"}
STATE = 1 << 15
"""Most entries of one head's state: a program of Mamba-2 holds it, one of Mamba-3 goes through it in tiles."""
TILE = 1 << 13
"""Entries of such a tile."""


def by_name(operation: TorchOperation, inputs: tuple[Any, ...]) -> Inputs:
    values = [x.contiguous() if isinstance(x, Tensor) else x for x in inputs]
    found = dict(zip(operation.names, values, strict=True))
    reset, fresh_state = found.pop("reset"), found.pop("fresh_state", None)
    if reset is None:
        return found
    # What is carried is small beside a launch: rows that start afresh are so before it.
    for name in CARRIED & found.keys():
        fresh = fresh_state if name == "state" and fresh_state is not None else 0
        found[name] = torch.where(reset.view(-1, *[1] * (found[name].dim() - 1)), fresh, found[name])
    return found


def check_numel(inputs: Inputs, /, **counts: int) -> None:
    """The kernels trust the sizes they are told: a tensor of another one must not reach them."""
    for name, count in counts.items():
        tensor = inputs[name]
        if tensor is not None and tensor.numel() != count:
            raise ValueError(f"{name} has {tensor.numel()} elements, expected {count}")


def block(n: int) -> int:
    return max(power_of_two(n), 16)


def mamba1_step_conv(*inputs: Any) -> list[Tensor]:
    x = by_name(MAMBA1_STEP_CONV, inputs)
    window = x["window"]
    b, i, k = window.shape
    check_numel(x, projected=b * 2 * i, conv_weight=i * k, conv_bias=i)
    found = [window.new_empty(b, i), torch.empty_like(window)]
    tensors = (x["projected"], window, x["conv_weight"], x["conv_bias"], *found)
    launch("fused_step.mamba1_conv", b * parts(i, CHANNELS), *tensors, I=i, K=k, BI=CHANNELS)
    return found


def mamba1_step(*inputs: Any) -> list[Tensor]:
    x = by_name(MAMBA1_STEP, inputs)
    b, i, r = x["state"].shape
    rank = x["dt_b_c"].shape[1] - 2 * r
    check_numel(x, projected=b * 2 * i, x=b * i, dt=b * i, A_log=i * r, D=i, dt_b_c=b * (max(rank, 0) + 2 * r))
    found = [torch.empty_like(x["x"]), torch.empty_like(x["state"])]
    channels = max(ELEMENTS // block(r), 4)
    sizes = {"I": i, "R": r, "DT": rank, "BI": channels, "BR": block(r)}
    launch("fused_step.mamba1_scan", b * parts(i, channels), *x.values(), *found, **sizes)
    return found


def mamba2_step(*inputs: Any) -> list[Tensor]:
    x = by_name(MAMBA2_STEP, inputs)
    projected, window, state, weight, group = (
        x[n] for n in ("projected", "window", "state", "norm_weight", "norm_group")
    )
    (b, h, p, r), (_, v, k) = state.shape, window.shape
    groups, mlp = (v - h * p) // max(2 * r, 1), (projected.shape[1] - h * p - v - h) // 2
    per_channel = x["D"].numel() != h
    check_numel(
        x,
        projected=b * (2 * max(mlp, 0) + h * p + v + h),
        window=b * (h * p + 2 * groups * r) * k,
        **{"conv_weight": v * k, "conv_bias": v, "dt_bias": h, "A_log": h, "norm_weight": h * p},
        D=h * p if per_channel else h,
    )
    if group < 1 or h * p % group or groups < 1 or h % groups or r < 1 or mlp < 0:
        raise ValueError(f"{h} heads of {p} channels do not fit {groups} groups or a norm over {group} channels")
    y_bi, after = state.new_empty(b, h * p), [torch.empty_like(window), torch.empty_like(state)]
    read = [x[n] for n in ("conv_weight", "conv_bias", "dt_bias", "A_log", "D")]
    sizes = {"H": h, "P": p, "R": r, "G": groups, "K": k, "MLP": mlp, "D_PER_CHANNEL": per_channel}
    tensors = (projected, window, state, *read, y_bi, *after)
    limits = (x["dt_low"], x["dt_high"])
    launch("fused_step.mamba2", b * h, *tensors, *limits, **sizes, BP=block(p), BR=block(r), warps=8)
    order = NO_NORM if weight is None else NORM_FIRST if x["norm_before_gate"] else GATE_FIRST
    z_bi = projected[:, 2 * mlp : 2 * mlp + h * p]
    (out,) = finish(y_bi[:, None], None, None, z_bi, None, None, None, weight, group, order, x["norm_eps"])
    if mlp:
        gate, value = projected[:, : 2 * mlp].chunk(2, dim=1)
        out = torch.cat((F.silu(gate) * value, out), dim=1)
    return [out, *after]


def mamba3_step(*inputs: Any) -> list[Tensor]:
    x = by_name(MAMBA3_STEP, inputs)
    projected, angles = x["projected"], x["angles"]
    before = [x[name] for name in ("state", "k_state", "v_state", "angle")]
    (b, h, p, r), m, kept = before[0].shape, before[1].shape[1], before[3].shape[2]
    groups = (projected.shape[1] - 2 * h * p - 3 * h - kept) // max(2 * m * r, 1)
    if groups < 1 or h % groups or not 0 <= 2 * angles <= r or m * r < 1:
        raise ValueError(f"{h} heads with states of {r} do not fit {groups} groups or {angles} angles")
    check_numel(
        x,
        projected=b * (2 * h * p + 2 * m * groups * r + 3 * h + kept),
        **{"k_state": b * m * h * r, "v_state": b * h * p, "angle": b * h * max(angles, 1), "dt_bias": h, "D": h},
        **{"B_norm": r, "C_norm": r, "B_bias": h * m * r, "C_bias": h * m * r, "norm_weight": h * p},
        **{"mimo_x": h * m * p, "mimo_z": h * m * p, "mimo_o": h * m * p},
    )
    found = [projected.new_empty(b, h * p), *(torch.empty_like(t) for t in before)]
    tensors = [x[name] for name in MAMBA3_STEP.names[: MAMBA3_STEP.tensors] if name in x]
    numbers = (x["norm_eps"], x["dt_low"], x["dt_high"], x["a_floor"], x["rotation_range"] * math.pi)
    sizes = {"H": h, "P": p, "R": r, "G": groups, "M": m, "A": angles, "KEPT": kept, "NEIGHBOURS": not x["half"]}
    sizes |= {"HEAVY": x["heavy_tail"], "BP": block(p), "BR": max(min(block(r), TILE // block(p)), 16)}
    sizes |= {"BA": block(kept), "BM": power_of_two(m), "BLOCK": block(r)}
    launch("fused_step.mamba3", b * h, *tensors, *found, *numbers, **sizes, warps=8)
    return found


def why_not(state: Tensor, name: str) -> str | None:
    p, r = state.shape[-2:]
    if state.dim() == 4 and block(p) * block(r) > STATE:
        return f"it got a state of {p} x {r} per head, at most {STATE} fit"
    return why_refused(name, torch.float32, state.device)


def why_not_mamba1(*tensors: Tensor | None) -> str | None:
    # A block asks with a few of them before it has the others; the state alone has three axes.
    state = next(tensor for tensor in tensors if tensor is not None and tensor.dim() == 3)
    return why_not(state, f"mamba1_step {state.shape[2]}")


def why_not_mamba2(projected: Tensor, window: Tensor, state: Tensor, *_: Any) -> str | None:
    return why_not(state, f"mamba2_step {state.shape[2]}x{state.shape[3]}")


def why_not_mamba3(
    projected: Tensor, state: Tensor, k_state: Tensor, v_state: Tensor, rotation: Tensor, *_: Any
) -> str | None:
    if rotation.dim() == 4:
        return "it has no rotation by quaternions"
    return why_not(state, f"mamba3_step {state.shape[2]}x{state.shape[3]}, ranks {k_state.shape[1]}")


implement(MAMBA1_STEP_CONV, mamba1_step_conv, why_not=lambda projected, window, *_: why_not(window, "mamba1_step_conv"))
implement(MAMBA1_STEP, mamba1_step, why_not=why_not_mamba1)
implement(MAMBA2_STEP, mamba2_step, why_not=why_not_mamba2)
implement(MAMBA3_STEP, mamba3_step, why_not=why_not_mamba3)
