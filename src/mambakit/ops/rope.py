"""Rotary positions: pairs of channels turned by angles that grow with a token's position."""

import torch
from torch import Tensor

from mambakit.ops.rotation import turn_pairs


def rates(width: int, theta: float, device: torch.device | None = None) -> Tensor:
    """By how much a position turns each pair of channels, `theta ** (-2 a / width)` for `a` from 0 to `width / 2`.

    In float64: at position 100,000 an angle in float32 is off by 0.004.
    """
    return theta ** (torch.arange(0, width, 2, device=device, dtype=torch.float64) / -width)


def turns(position_bs: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a position's angles, with an axis for heads.

    In `dtype`, at least float32.
    """
    angle_bs1a = position_bs[..., None, None] * rates(width, theta, position_bs.device)
    wide = torch.promote_types(dtype, torch.float32)
    return angle_bs1a.cos().to(wide), angle_bs1a.sin().to(wide)


def turn(x_bshp: Tensor, cos_bs1a: Tensor, sin_bs1a: Tensor) -> Tensor:
    """Channels `q` and `q + a` turned by angle `q`, `a` being the number of angles; those beyond `2 a` stay."""
    a, p = cos_bs1a.shape[-1], x_bshp.shape[-1]
    first, second, rest = x_bshp.split((a, a, p - 2 * a), dim=-1)
    turned = turn_pairs(first, second, cos_bs1a, sin_bs1a)
    return torch.cat((*(t.to(x_bshp.dtype) for t in turned), rest), dim=-1)
