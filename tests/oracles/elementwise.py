"""Convolution, rotation and norm as plain loops in float64, written from the formulas alone."""

import math

import torch
from torch import Tensor


def conv_loop(
    x_bsv: Tensor, weight_vk: Tensor, bias_v: Tensor | None = None, window_bvk: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    b, s, v = x_bsv.shape
    k = weight_vk.shape[1]
    past = list(window_bvk.unbind(2)) if window_bvk is not None else [x_bsv.new_zeros(b, v)] * k
    y = []
    for t in range(s):
        past = [*past[1:], x_bsv[:, t]]
        total_bv = x_bsv.new_zeros(b, v) if bias_v is None else bias_v.expand(b, v)
        for q in range(k):
            total_bv = total_bv + weight_vk[:, q] * past[q]
        y.append(total_bv)
    return torch.stack(y, dim=1) if y else x_bsv * 1, torch.stack(past, dim=2)


def angle_loop(
    rot_bsa: Tensor, dt_bsh: Tensor, rotation_range: float, angle_bha: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Not wrapped: compare through cos and sin."""
    b, s, a = rot_bsa.shape
    theta_bha = rot_bsa.new_zeros(b, dt_bsh.shape[2], a) if angle_bha is None else angle_bha
    angles = []
    for t in range(s):
        rate_b1a = rotation_range * math.pi * torch.tanh(rot_bsa[:, t, None])
        theta_bha = theta_bha + dt_bsh[:, t, :, None] * rate_b1a
        angles.append(theta_bha)
    return torch.stack(angles, dim=1) if angles else dt_bsh[..., None] * rot_bsa[:, :, None], theta_bha


def rotate_loop(x_bsmhr: Tensor, angle_bsha: Tensor, pairing: str) -> Tensor:
    columns = list(x_bsmhr.unbind(-1))
    for q in range(angle_bsha.shape[-1]):
        first, second = (2 * q, 2 * q + 1) if pairing == "interleaved" else (q, q + x_bsmhr.shape[-1] // 2)
        cos_bs1h, sin_bs1h = torch.cos(angle_bsha[:, :, None, :, q]), torch.sin(angle_bsha[:, :, None, :, q])
        x0, x1 = x_bsmhr[..., first], x_bsmhr[..., second]
        columns[first], columns[second] = x0 * cos_bs1h - x1 * sin_bs1h, x0 * sin_bs1h + x1 * cos_bs1h
    return torch.stack(columns, dim=-1)


def multiply_loop(left: Tensor, right: Tensor) -> Tensor:
    """Hamilton product from the table of the units: `e_i e_j = sign e_k`."""
    table = [
        [(0, 1), (1, 1), (2, 1), (3, 1)],
        [(1, 1), (0, -1), (3, 1), (2, -1)],
        [(2, 1), (3, -1), (0, -1), (1, 1)],
        [(3, 1), (2, 1), (1, -1), (0, -1)],
    ]
    parts = [torch.zeros_like(left[..., 0] * right[..., 0]) for _ in range(4)]
    for i in range(4):
        for j in range(4):
            unit, sign = table[i][j]
            parts[unit] = parts[unit] + sign * left[..., i] * right[..., j]
    return torch.stack(parts, dim=-1)


def conjugate_loop(q: Tensor) -> Tensor:
    return q * q.new_tensor([1, -1, -1, -1])


def unit_quaternion_loop(rot_bshj3: Tensor, dt_bsh: Tensor, rotation_range: float) -> Tensor:
    """Needs a nonzero `rot` and `dt`."""
    norm_bshj1 = rot_bshj3.square().sum(-1, keepdim=True).sqrt()
    generator_bshj3 = rotation_range * math.pi * torch.tanh(norm_bshj1) * rot_bshj3 / norm_bshj1
    phi_bshj3 = dt_bsh[..., None, None] * generator_bshj3
    turn_bshj1 = phi_bshj3.square().sum(-1, keepdim=True).sqrt()
    q_bshj4 = torch.cat((torch.cos(turn_bshj1 / 2), phi_bshj3 * torch.sin(turn_bshj1 / 2) / turn_bshj1), dim=-1)
    return q_bshj4 / q_bshj4.square().sum(-1, keepdim=True).sqrt()


def quaternion_loop(q_bshj4: Tensor, carry_bhj4: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total_bhj4 = carry_bhj4
    if total_bhj4 is None:
        b, _, h, j, _ = q_bshj4.shape
        total_bhj4 = q_bshj4.new_tensor([1.0, 0, 0, 0]).expand(b, h, j, 4)
    totals = []
    for q_bhj4 in q_bshj4.unbind(1):
        total_bhj4 = multiply_loop(q_bhj4, total_bhj4)
        total_bhj4 = total_bhj4 / total_bhj4.square().sum(-1, keepdim=True).sqrt()
        totals.append(total_bhj4)
    return torch.stack(totals, dim=1) if totals else q_bshj4 * 1, total_bhj4


def rotate_quaternion_loop(x_bsmhr: Tensor, q_bshj4: Tensor) -> Tensor:
    columns = list(x_bsmhr.unbind(-1))
    for j in range(q_bshj4.shape[-2]):
        block_bsmh4 = x_bsmhr[..., 4 * j : 4 * j + 4]
        turned_bsmh4 = multiply_loop(conjugate_loop(q_bshj4[:, :, None, :, j]), block_bsmh4)
        columns[4 * j : 4 * j + 4] = turned_bsmh4.unbind(-1)
    return torch.stack(columns, dim=-1)


def norm_loop(
    x: Tensor,
    z: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Tensor:
    gate = 1.0 if z is None else z / (1 + torch.exp(-z))
    if not norm_before_gate:
        x = x * gate
    width = x.shape[-1]
    group_size = group_size or width
    groups = []
    for start in range(0, width, group_size):
        group = x[..., start : start + group_size]
        groups.append(group / (group.square().sum(-1, keepdim=True) / group_size + eps).sqrt())
    y = torch.cat(groups, dim=-1)
    if weight is not None:
        y = y * weight
    return y * gate if norm_before_gate else y


def softplus_loop(x: Tensor) -> Tensor:
    values = [math.log1p(math.exp(-abs(v))) + max(v, 0.0) for v in x.double().tolist()]
    return torch.tensor(values, dtype=torch.float64)


def heavy_tail_loop(x: Tensor) -> Tensor:
    values = [1 + v if v >= 0 else 1 / (1 - v) for v in x.double().tolist()]
    return torch.tensor(values, dtype=torch.float64)
