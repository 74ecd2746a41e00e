"""What B amounts to under a constant token: the geometric series of rotated, decayed writes, summed."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mambakit.ops.quaternion import conjugate, multiply, unit_quaternion
from mambakit.ops.rotation import wrap

if TYPE_CHECKING:
    from mambakit.blocks.mamba3 import Mamba3Config


def response(
    config: "Mamba3Config", b_bsmhr: Tensor, dt_bsh: Tensor, da_bsh: Tensor, lambda_bsh: Tensor, rot_bsR: Tensor
) -> Tensor:
    """`(gamma + beta P^-1) (1 - alpha P^-1)^-1 b` with `P^-1` one token's turn: a scalar where nothing turns."""
    alpha_bsh = da_bsh.exp()
    gamma_bsh, beta_bsh = lambda_bsh * dt_bsh, (1 - lambda_bsh) * dt_bsh * alpha_bsh
    # 1 - alpha by expm1: alpha is close to one when little is forgotten.
    still_bs1h1 = ((gamma_bsh + beta_bsh) / at_least_tiny(-torch.expm1(da_bsh)))[:, :, None, :, None]
    if config.rope_dim == 0:
        return still_bs1h1 * b_bsmhr
    if config.rotation == "quaternion":
        blocks = config.rope_dim // 4
        rot_bshj3 = rot_bsR.unflatten(-1, (config.nheads, blocks, 3))
        q_bshj4 = unit_quaternion(rot_bshj3, dt_bsh, config.rotation_range)
        factor = quaternion_factor(q_bshj4, alpha_bsh, beta_bsh, gamma_bsh)[:, :, None]
        turned, rest = b_bsmhr.split((4 * blocks, config.state_rank - 4 * blocks), dim=-1)
        turned = multiply(factor, turned.unflatten(-1, (blocks, 4))).flatten(-2)
        return torch.cat([turned, still_bs1h1 * rest], -1)
    rate_bs1a = config.rotation_range * torch.pi * torch.tanh(rot_bsR.to(dt_bsh.dtype))[:, :, None]
    real, imaginary = complex_factor(wrap(dt_bsh[..., None] * rate_bs1a), alpha_bsh, beta_bsh, gamma_bsh)
    first, second, rest, join = pairs(b_bsmhr, config.rope_dim // 2, config.pairing)
    turned_first = first * real - second * imaginary
    turned_second = first * imaginary + second * real
    return join(turned_first, turned_second, [still_bs1h1 * part for part in rest])


def complex_factor(theta_bsha: Tensor, alpha_bsh: Tensor, beta_bsh: Tensor, gamma_bsh: Tensor) -> tuple[Tensor, Tensor]:
    """`(gamma + beta e^{-i theta}) / (1 - alpha e^{-i theta})`, real and imaginary, with an axis for the ranks."""
    alpha, beta, gamma = (t[..., None] for t in (alpha_bsh, beta_bsh, gamma_bsh))
    cos, sin = torch.cos(theta_bsha), torch.sin(theta_bsha)
    top_real, top_imaginary = gamma + beta * cos, -beta * sin
    low_real, low_imaginary = 1 - alpha * cos, alpha * sin
    size = at_least_tiny(low_real.square() + low_imaginary.square())
    real = (top_real * low_real + top_imaginary * low_imaginary) / size
    imaginary = (top_imaginary * low_real - top_real * low_imaginary) / size
    return real[:, :, None], imaginary[:, :, None]


def quaternion_factor(q_bshj4: Tensor, alpha_bsh: Tensor, beta_bsh: Tensor, gamma_bsh: Tensor) -> Tensor:
    """`(gamma + beta q) (1 - alpha q)^-1`."""
    one = q_bshj4.new_tensor((1.0, 0.0, 0.0, 0.0))
    alpha, beta, gamma = (t[..., None, None] for t in (alpha_bsh, beta_bsh, gamma_bsh))
    low = one - alpha * q_bshj4
    inverse = conjugate(low) / at_least_tiny(low.square().sum(-1, keepdim=True))
    return multiply(gamma * one + beta * q_bshj4, inverse)


def pairs(x_bsmhr: Tensor, angles: int, pairing: str):
    """First and second halves of the rotated pairs, the rest, and the way to put them together again."""
    r = x_bsmhr.shape[-1]
    if pairing == "interleaved":
        turned, rest = x_bsmhr.split((2 * angles, r - 2 * angles), dim=-1)
        first, second = turned.unflatten(-1, (angles, 2)).unbind(-1)
        return first, second, [rest], lambda a, b, still: torch.cat([torch.stack([a, b], -1).flatten(-2), *still], -1)
    first, rest, second, other = x_bsmhr.split((angles, r // 2 - angles) * 2, dim=-1)
    return first, second, [rest, other], lambda a, b, still: torch.cat([a, still[0], b, still[1]], -1)


def at_least_tiny(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).tiny)
