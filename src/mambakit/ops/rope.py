"""Rotary positions: pairs of channels turned by angles that grow with a token's position."""

import torch
from torch import Tensor

from mambakit.ops.rotation import turn_pairs


def turns(position_bs: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `position * theta ** (-2 a / width)`, `a` from 0 to `width / 2`, with an axis for heads.

    In `dtype`, at least float32.
    """
    # In float64: at position 100,000 an angle in float32 is off by 0.004.
    power_a = torch.arange(0, width, 2, device=position_bs.device, dtype=torch.float64) / -width
    angle_bs1a = position_bs[..., None, None] * theta**power_a
    wide = torch.promote_types(dtype, torch.float32)
    return angle_bs1a.cos().to(wide), angle_bs1a.sin().to(wide)


def turn(x_bshp: Tensor, cos_bs1a: Tensor, sin_bs1a: Tensor) -> Tensor:
    """Channels `q` and `q + a` turned by angle `q`, `a` being the number of angles; those beyond `2 a` stay."""
    a, p = cos_bs1a.shape[-1], x_bshp.shape[-1]
    first, second, rest = x_bshp.split((a, a, p - 2 * a), dim=-1)
    turned = turn_pairs(first, second, cos_bs1a, sin_bs1a)
    return torch.cat((*(t.to(x_bshp.dtype) for t in turned), rest), dim=-1)
