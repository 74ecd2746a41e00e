"""Mamba-3's rotation and step, pair by pair and rank by rank."""

import math

import torch
from torch import Tensor

from mambakit.compat.references.convolution import activated


def apply_rotary_qk_inference_reference(
    q: Tensor,
    k: Tensor,
    angle_state: Tensor,
    angle_proj: Tensor,
    dt: Tensor,
    bias_q: Tensor | None = None,
    bias_k: Tensor | None = None,
    conjugate: bool = False,
    rotate_pairwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`q` and `k` (b, m, h, r), plus biases, turned by the next angle, and that angle (b, h, a)."""
    angle_bha = angle_state + math.pi * torch.tanh(angle_proj) * dt[..., None]
    angles, entries = angle_bha.shape[-1], q.shape[-1]
    turned = []
    for x, bias in ((q, bias_q), (k, bias_k)):
        parts = list((x if bias is None else x + bias).unbind(-1))
        for a in range(angles):
            i, j = (2 * a, 2 * a + 1) if rotate_pairwise else (a, a + entries // 2)
            angle = (-angle_bha if conjugate else angle_bha)[:, None, :, a]
            first, second = parts[i], parts[j]
            parts[i] = first * torch.cos(angle) - second * torch.sin(angle)
            parts[j] = first * torch.sin(angle) + second * torch.cos(angle)
        turned.append(torch.stack(parts, dim=-1))
    return turned[0], turned[1], angle_bha


def selective_state_update_fused_ref_v2(
    state: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    xproj: Tensor,
    x: Tensor,
    zproj: Tensor | None,
    z: Tensor | None,
    dt: Tensor,
    B_state: Tensor,
    x_state: Tensor,
    trap: Tensor,
    D: Tensor,
    outproj: Tensor | None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """`mamba3_step_fn` that returns the output and the new state instead of writing them."""
    dt, trap, after = dt.to(compute_dtype), trap.to(compute_dtype), state.to(compute_dtype)
    decay = torch.exp(A.to(compute_dtype) * dt)
    after = decay[..., None, None] * after
    for weight, values, keys in ((trap * dt, x, B), ((1 - trap) * dt * decay, x_state, B_state)):
        for m in range(len(xproj)):
            value = (values * xproj[m]).to(compute_dtype)
            after = after + weight[..., None, None] * value[..., None] * keys[:, m].to(compute_dtype)[:, :, None]
    outputs = []
    for m in range(len(xproj)):
        y = (after * C[:, m].to(compute_dtype)[:, :, None]).sum(-1) + D[:, None] * (x * xproj[m]).to(compute_dtype)
        y = y if z is None or zproj is None else y * activated((z * zproj[m]).to(compute_dtype), "silu")
        outputs.append(y if outproj is None else y * outproj[m])
    out = torch.stack(outputs, dim=1)
    return (out if outproj is None else out.sum(1)).to(state.dtype), after.to(state.dtype)
