"""Decoding steps as torch operators: everything between a block's two projections, for one token of every row.

The operators return new windows and states. The functions that do the work (`mamba2_step` and the like) write into
tensors they are given, which may be the ones that entered. float32 on the CPU only, and nothing here has a gradient:
`mambakit.ops.fused_step` says when they may be called.
"""

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
from mambakit.ops.fused_step import MAMBA1_STEP, MAMBA1_STEP_CONV, MAMBA2_STEP, MAMBA3_STEP, like


def check_numel(**counted: tuple[Tensor | None, int]) -> None:
    """The kernels trust the sizes they are told: a tensor of another one must not reach them."""
    for name, (tensor, count) in counted.items():
        if tensor is not None and tensor.numel() != count:
            raise ValueError(f"{name} has {tensor.numel()} elements, expected {count}")


def contiguous(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(tensor if tensor is None else tensor.contiguous() for tensor in tensors)


# Mamba-1


def mamba1_step_conv(
    projected_bX: Tensor, window_bik: Tensor, conv_weight_i1k: Tensor, conv_bias_i: Tensor | None
) -> list[Tensor]:
    """`silu` of the convolution at the newest token, which is the first half of `projected`."""
    b, i, k = window_bik.shape
    weight, bias, projected, window = contiguous(conv_weight_i1k, conv_bias_i, projected_bX, window_bik)
    check_numel(
        projected=(projected_bX, b * 2 * i),
        conv_weight=(conv_weight_i1k, i * k),
        conv_bias=(conv_bias_i, i),
    )
    x_bi, window_out = projected_bX.new_empty(b, i), *like(window_bik)
    run(
        Mamba1StepConv(
            step=Mamba1Step(channels=i, k=k, conv_weight=pointer(weight), conv_bias=pointer(bias)),
            batch=b,
            projected=pointer(projected),
            window_in=pointer(window),
            window_out=pointer(window_out),
            x=pointer(x_bi),
        )
    )
    return [x_bi, window_out]


def mamba1_step_scan(
    projected_bX: Tensor,
    x_bi: Tensor,
    dt_bi: Tensor,
    dt_b_c_bX: Tensor,
    state_bir: Tensor,
    A_log_ir: Tensor,
    D_i: Tensor,
) -> list[Tensor]:
    """The scan of one token with skip and gate. `dt_b_c` is what `x_proj` returns, `dt` what `dt_proj` makes of it."""
    b, i, r = state_bir.shape
    A_log, D, projected, x, dt, dt_b_c, state = contiguous(
        A_log_ir, D_i, projected_bX, x_bi, dt_bi, dt_b_c_bX, state_bir
    )
    check_numel(
        projected=(projected_bX, b * 2 * i),
        x=(x_bi, b * i),
        dt=(dt_bi, b * i),
        A_log=(A_log_ir, i * r),
        D=(D_i, i),
    )
    dt_rank = dt_b_c_bX.shape[1] - 2 * r
    check_numel(dt_b_c=(dt_b_c_bX, b * (max(dt_rank, 0) + 2 * r)))
    y_bi, state_out = like(x_bi, state_bir)
    run(
        Mamba1StepScan(
            step=Mamba1Step(channels=i, r=r, A_log=pointer(A_log), D=pointer(D)),
            batch=b,
            dt_rank=dt_rank,
            projected=pointer(projected),
            x=pointer(x),
            dt=pointer(dt),
            dt_b_c=pointer(dt_b_c),
            state_in=pointer(state),
            state_out=pointer(state_out),
            out=pointer(y_bi),
        )
    )
    return [y_bi, state_out]


# Mamba-2


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
    dt_low: float,
    dt_high: float,
    norm_before_gate: bool,
) -> list[Tensor]:
    """The step of every row. `norm_weight=None` is the gate alone; `D` has an entry per head or per channel."""
    b, h, p, r = state_bhpr.shape
    v, k = window_bvk.shape[1:]
    groups = (v - h * p) // (2 * r)
    mlp = (projected_bX.shape[1] - h * p - v - h) // 2
    parameters = contiguous(conv_weight_v1k, conv_bias_v, dt_bias_h, A_log_h, D, norm_weight_i)
    entering = contiguous(projected_bX, window_bvk, state_bhpr)
    check_numel(
        projected=(projected_bX, b * (2 * max(mlp, 0) + h * p + v + h)),
        window=(window_bvk, b * (h * p + 2 * groups * r) * k),
        conv_weight=(conv_weight_v1k, v * k),
        conv_bias=(conv_bias_v, v),
        dt_bias=(dt_bias_h, h),
        A_log=(A_log_h, h),
        D=(D, h if D.numel() == h else h * p),
        norm_weight=(norm_weight_i, h * p),
    )
    if norm_group < 1 or h * p % norm_group or groups < 1 or h % groups:
        raise ValueError(f"{h} heads of {p} channels do not fit {groups} groups or a norm over {norm_group} channels")
    out_bi = projected_bX.new_empty(b, mlp + h * p)
    window_out, state_out = like(window_bvk, state_bhpr)
    conv_weight, conv_bias, dt_bias, A_log, D_entries, norm_weight = map(pointer, parameters)
    step = Mamba2Step(
        heads=h,
        p=p,
        r=r,
        groups=groups,
        k=k,
        mlp=mlp,
        conv_weight=conv_weight,
        conv_bias=conv_bias,
        dt_bias=dt_bias,
        A_log=A_log,
        D=D_entries,
        norm_weight=norm_weight,
        norm_group=norm_group,
        norm_eps=norm_eps,
        dt_low=dt_low,
        dt_high=dt_high,
        D_per_channel=D.numel() != h,
        norm_before_gate=norm_before_gate,
    )
    projected, window_in, state_in = map(pointer, entering)
    run(
        Mamba2StepCall(
            step=step,
            batch=b,
            projected=projected,
            window_in=window_in,
            window_out=pointer(window_out),
            state_in=state_in,
            state_out=pointer(state_out),
            out=pointer(out_bi),
        )
    )
    return [out_bi, window_out, state_out]


# Mamba-3


def mamba3_step(
    projected_bX: Tensor,
    state_bhpr: Tensor,
    k_state_bmhr: Tensor,
    v_state_bhp: Tensor,
    angle_bha: Tensor,
    dt_bias_h: Tensor,
    B_norm_r: Tensor,
    C_norm_r: Tensor,
    B_bias_hmr: Tensor,
    C_bias_hmr: Tensor,
    mimo_x_hmp: Tensor | None,
    mimo_z_hmp: Tensor | None,
    mimo_o_hmp: Tensor | None,
    D_h: Tensor,
    norm_weight_i: Tensor | None,
    angles: int,
    half: bool,
    heavy_tail: bool,
    norm_eps: float,
    dt_low: float,
    dt_high: float,
    a_floor: float,
    rotation_range: float,
) -> list[Tensor]:
    b, h, p, r = state_bhpr.shape
    m, kept = k_state_bmhr.shape[1], angle_bha.shape[2]
    groups = (projected_bX.shape[1] - 2 * h * p - 3 * h - kept) // (2 * m * r)
    parameters = contiguous(
        *(dt_bias_h, B_norm_r, C_norm_r, B_bias_hmr, C_bias_hmr, mimo_x_hmp, mimo_z_hmp, mimo_o_hmp, D_h),
        norm_weight_i,
    )
    entering = contiguous(projected_bX, state_bhpr, k_state_bmhr, v_state_bhp, angle_bha)
    check_numel(
        projected=(projected_bX, b * (2 * h * p + 2 * m * groups * r + 3 * h + kept)),
        k_state=(k_state_bmhr, b * m * h * r),
        v_state=(v_state_bhp, b * h * p),
        angle=(angle_bha, b * h * max(angles, 1)),
        dt_bias=(dt_bias_h, h),
        B_norm=(B_norm_r, r),
        C_norm=(C_norm_r, r),
        B_bias=(B_bias_hmr, h * m * r),
        C_bias=(C_bias_hmr, h * m * r),
        mimo_x=(mimo_x_hmp, h * m * p),
        mimo_z=(mimo_z_hmp, h * m * p),
        mimo_o=(mimo_o_hmp, h * m * p),
        D=(D_h, h),
        norm_weight=(norm_weight_i, h * p),
    )
    if groups < 1 or h % groups or 2 * angles > r:
        raise ValueError(f"{h} heads with states of {r} do not fit {groups} groups or {angles} angles")
    y_bi, out = projected_bX.new_empty(b, h * p), like(*entering[1:])
    dt_bias, B_norm, C_norm, B_bias, C_bias, mimo_x, mimo_z, mimo_o, D, norm_weight = map(pointer, parameters)
    step = Mamba3Step(
        heads=h,
        p=p,
        r=r,
        groups=groups,
        ranks=m,
        angles=angles,
        half=half,
        heavy_tail=heavy_tail,
        dt_bias=dt_bias,
        B_norm=B_norm,
        C_norm=C_norm,
        B_bias=B_bias,
        C_bias=C_bias,
        mimo_x=mimo_x,
        mimo_z=mimo_z,
        mimo_o=mimo_o,
        D=D,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        dt_low=dt_low,
        dt_high=dt_high,
        a_floor=a_floor,
        rotation_range=rotation_range,
    )
    projected, *before = map(pointer, entering)
    run(
        Mamba3StepCall(
            step=step,
            batch=b,
            projected=projected,
            before=Mamba3Carried(*before),
            after=Mamba3Carried(*map(pointer, out)),
            out=pointer(y_bi),
        )
    )
    return [y_bi, *out]


MAMBA1_STEP_CONV.implement(CPU, mamba1_step_conv)
MAMBA1_STEP.implement(CPU, mamba1_step_scan)
MAMBA2_STEP.implement(CPU, mamba2_step)
MAMBA3_STEP.implement(CPU, mamba3_step)
