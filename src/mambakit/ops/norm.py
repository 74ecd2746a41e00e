"""RMSNorm and gated RMSNorm over the last axis, alone and at the end of a scan."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.arguments import check_flag, number
from mambakit.ops.operation import TorchOperation
from mambakit.ops.shapes import bind, cast, check_beside, check_floats, check_tensors


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`, the mean over consecutive groups of `group_size` channels (None: all).

    `weight` spans the whole last axis. Computed in at least float32, returned in the dtype of `x`. torch's operators
    need squares that float32 holds, `x` below 1e19 or so; kernels scale before they square.
    """
    return gated_rms_norm(x, None, weight, eps, group_size=group_size, backend=backend)


def gated_rms_norm(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    eps: float = 1e-5,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`rms_norm(x * silu(z))`, or `rms_norm(x) * silu(z)` with `norm_before_gate`; `z=None` is no gate."""
    optional = {"z": z, "weight": weight}
    check_tensors({"x": x, **{name: tensor for name, tensor in optional.items() if tensor is not None}})
    for name, tensor in optional.items():
        if tensor is not None:
            check_beside("x", x, name, tensor)
    check_floats({"x": x}, optional)
    width = x.shape[-1] if x.dim() else 0
    if width < 1:
        raise ValueError(f"x needs a last axis of at least one channel, got shape {tuple(x.shape)}")
    group_size, eps = check_group_size(group_size, width), number("eps", eps)
    check_flag("norm_before_gate", norm_before_gate)
    if z is not None and z.shape != x.shape:
        raise ValueError(f"z has shape {tuple(z.shape)} but x has {tuple(x.shape)}")
    if weight is not None and weight.shape != (width,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected ({width},)")
    kernel = FINISH.choose(backend, x, z, weight)
    if kernel is not None:
        x_N1i, z_Ni = x.reshape(-1, 1, width), None if z is None else z.reshape(-1, width)
        order = NORM_FIRST if norm_before_gate else GATE_FIRST
        (y,) = kernel(x_N1i, None, None, z_Ni, None, None, None, weight, group_size, order, eps)
        return y.view(x.shape).to(x.dtype)
    return plain_norm(x, z, weight, eps, group_size, norm_before_gate)


def plain_norm(
    x: Tensor, z: Tensor | None, weight: Tensor | None, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    """`gated_rms_norm` in torch's operators."""
    wide = torch.promote_types(x.dtype, torch.float32)
    gate = None if z is None else F.silu(cast(z, wide))
    y = cast(x, wide) if gate is None or norm_before_gate else x * gate
    if torch.is_grad_enabled() or group_size != x.shape[-1]:
        scale = None if weight is None else weight.unflatten(0, (-1, group_size))
        y = Norm.apply(y.unflatten(-1, (-1, group_size)), scale, eps).flatten(-2)
    else:
        # The function's bookkeeping takes longer than a token's norm; without gradients it is not needed.
        y = F.rms_norm(y, (group_size,), None if weight is None else cast(weight, wide), eps)
    return cast(y if gate is None or not norm_before_gate else y * gate, x.dtype)


def finish(
    y_bsmi: Tensor,
    x_bsi: Tensor,
    skip_i: Tensor,
    z_bsi: Tensor,
    weight_i: Tensor | None = None,
    eps: float = 1e-5,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    mimo_x_mi: Tensor | None = None,
    mimo_z_mi: Tensor | None = None,
    mimo_o_mi: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """What follows a scan: skip, gate and norm of every rank, and their sum, `[b, s, i]` in the dtype of `z`.

        u_m = y_m + skip x mimo_x_m,    g_m = z mimo_z_m,    sum_m mimo_o_m gated_rms_norm(u_m, g_m, weight)

    Without `weight_i` there is no norm, only the gate: `u_m silu(g_m)`.
    """
    data = {"y_bsmi": y_bsmi, "x_bsi": x_bsi, "z_bsi": z_bsi}
    optional = {"weight_i": weight_i, "mimo_x_mi": mimo_x_mi, "mimo_z_mi": mimo_z_mi, "mimo_o_mi": mimo_o_mi}
    bind({**data, "skip_i": skip_i}, **optional)
    check_floats({**data}, {"skip_i": skip_i, **optional})
    group_size, eps = check_group_size(group_size, z_bsi.shape[-1]), number("eps", eps)
    check_flag("norm_before_gate", norm_before_gate)
    order = NORM_FIRST if norm_before_gate else GATE_FIRST
    inputs = (
        y_bsmi.flatten(0, 1),
        x_bsi.flatten(0, 1),
        skip_i,
        z_bsi.flatten(0, 1),
        *(mimo_x_mi, mimo_z_mi, mimo_o_mi, weight_i),
        *(group_size, NO_NORM if weight_i is None else order, eps),
    )
    kernel = FINISH.choose(backend, *data.values(), skip_i, *optional.values())
    (out_Ni,) = plain_finish(*inputs) if kernel is None else kernel(*inputs)
    return cast(out_Ni.view(z_bsi.shape), z_bsi.dtype)


def plain_finish(
    y_Nmi: Tensor,
    x_Ni: Tensor | None,
    skip_i: Tensor | None,
    z_Ni: Tensor | None,
    mimo_x_mi: Tensor | None,
    mimo_z_mi: Tensor | None,
    mimo_o_mi: Tensor | None,
    weight_i: Tensor | None,
    group: int,
    order: int,
    eps: float,
) -> list[Tensor]:
    """`FINISH` in torch's operators."""
    if x_Ni is not None and skip_i is not None:
        x_N1i = x_Ni[:, None]
        y_Nmi = torch.addcmul(y_Nmi, skip_i, x_N1i if mimo_x_mi is None else x_N1i * mimo_x_mi)
    gate_Nmi = None
    if z_Ni is not None:
        z_N1i = z_Ni[:, None]
        gate_Nmi = cast(z_N1i if mimo_z_mi is None else z_N1i * mimo_z_mi, y_Nmi.dtype)
    if order != NO_NORM:
        y_Nmi = plain_norm(y_Nmi, gate_Nmi, weight_i, eps, group, order == NORM_FIRST)
    elif gate_Nmi is not None:
        y_Nmi = y_Nmi * F.silu(gate_Nmi)
    if mimo_o_mi is None and y_Nmi.shape[1] == 1:
        return [y_Nmi[:, 0]]
    return [(y_Nmi if mimo_o_mi is None else y_Nmi * mimo_o_mi).sum(1)]


def check_rows(
    y_Nmi: Tensor,
    x_Ni: Tensor | None,
    skip_i: Tensor | None,
    z_Ni: Tensor | None,
    mimo_x_mi: Tensor | None,
    mimo_z_mi: Tensor | None,
    mimo_o_mi: Tensor | None,
    weight_i: Tensor | None,
    group: int,
    order: int,
    eps: float,
) -> None:
    given = {"x_Ni": x_Ni, "skip_i": skip_i, "z_Ni": z_Ni, "weight_i": weight_i}
    size = bind({"y_Nmi": y_Nmi}, **given, mimo_x_mi=mimo_x_mi, mimo_z_mi=mimo_z_mi, mimo_o_mi=mimo_o_mi)
    check_group_size(group, size.i)
    if (x_Ni is None) != (skip_i is None):
        raise ValueError("x_Ni and skip_i are one term: give both or neither")
    if order not in (NO_NORM, GATE_FIRST, NORM_FIRST):
        raise ValueError(f"order is {order}, expected 0 (no norm), 1 (gate first) or 2 (norm first)")


NO_NORM, GATE_FIRST, NORM_FIRST = range(3)
FINISH = TorchOperation(
    "finish",
    "Tensor y_Nmi, Tensor? x_Ni, Tensor? skip_i, Tensor? z_Ni, Tensor? mimo_x_mi, Tensor? mimo_z_mi, "
    "Tensor? mimo_o_mi, Tensor? weight_i, int group, int order, float eps",
    lambda y_Nmi, *_: [(y_Nmi, (y_Nmi.shape[0], y_Nmi.shape[2]))],
    check=check_rows,
    floats=8,
    twin=plain_finish,
)
"""Skip, gate, norm and the sum over ranks, in rows of channels; absent parts are None."""


def check_group_size(group_size: int | None, width: int) -> int:
    group_size = width if group_size is None else group_size
    if type(group_size) is not int or group_size < 1 or width % group_size:
        raise ValueError(f"group_size = {group_size} does not divide the {width} channels of x")
    return group_size


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    # Not x.square().mean(): the norm needs no copy of x.
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)


class Norm(torch.autograd.Function):
    """`x * inverse_rms(x) * weight`, keeping only the inputs for the backward."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        y = x * inverse_rms(x, eps)
        return y if weight is None else y.mul_(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] - one output
        x, weight = ctx.saved_tensors
        inverse = inverse_rms(x, ctx.eps)
        normed = x * inverse
        d_normed, d_weight = d_y, None
        if weight is not None:
            d_weight = (d_y * normed).sum_to_size(weight.shape).to(weight.dtype)
            d_normed = d_y * weight
        if x.shape[-1] == 1:
            # All but a sign: 1 - normed^2, which would leave no digit of it.
            return d_normed * (ctx.eps * inverse.square()) * inverse, d_weight, None
        shared = (d_normed * normed).mean(dim=-1, keepdim=True)
        return torch.addcmul(d_normed, normed, shared, value=-1) * inverse, d_weight, None
