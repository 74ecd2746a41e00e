"""Cumulative rotation of B and C in planes; `quaternion` is the same in blocks of four."""

import math

import torch
from torch import Tensor

from mambakit.arguments import number, shown
from mambakit.ops.segments import before_segment
from mambakit.ops.shapes import bind, check_floats, check_segments

MOST_HALF_TURNS = 1e4
"""Of a step size of 1: float32 keeps three digits of such an angle after its whole turns, and none of much larger."""


def checked_range(rotation_range: float) -> float:
    value = number("rotation_range", rotation_range)
    if abs(value) > MOST_HALF_TURNS:
        raise ValueError(f"rotation_range is {shown(rotation_range)}, expected at most {MOST_HALF_TURNS:g} half turns")
    return value


def running_angle(
    rot_bsa: Tensor,
    dt_bsh: Tensor,
    rotation_range: float = 1.0,
    angle_bha: Tensor | None = None,
    *,
    segments_bs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`theta_t = theta_{t-1} + dt_t rotation_range pi tanh(rot_t)`, wrapped to [-pi, pi].

    `angle_bha` is the angle before the first token (None: zeros). Returns `angle_bsha`, at least float32, and the angle
    after the last token. Each of `segments_bs` but the first starts from zero.
    """
    size = bind({"rot_bsa": rot_bsa, "dt_bsh": dt_bsh}, angle_bha=angle_bha, segments_bs=segments_bs)
    dtype = check_floats({"rot_bsa": rot_bsa}, {"dt_bsh": dt_bsh, "angle_bha": angle_bha})
    # An angle is used modulo a turn while its sum grows with the sequence: float32 would lose its digits.
    wide = torch.float32 if rot_bsa.device.type == "mps" else torch.float64
    rate_bsa = checked_range(rotation_range) * math.pi * torch.tanh(rot_bsa.to(wide))
    total_bsha = (dt_bsh.to(wide)[..., None] * rate_bsa[:, :, None]).cumsum(dim=1)
    if angle_bha is not None:
        total_bsha = total_bsha + angle_bha[:, None]
    if segments_bs is not None:
        check_segments(segments_bs)
        total_bsha = total_bsha - before_segment(total_bsha, segments_bs, total_bsha.new_zeros(()))
    wrapped_bsha = wrap(total_bsha).to(dtype)
    if size.s:
        return wrapped_bsha, wrapped_bsha[:, -1].clone()
    if angle_bha is None:
        return wrapped_bsha, wrapped_bsha.new_zeros(size.b, size.h, size.a)
    return wrapped_bsha, wrap(angle_bha.to(dtype))


def wrap(angle: Tensor) -> Tensor:
    """The same direction in [-pi, pi]. The number of turns is a constant to the gradient."""
    return angle - 2 * math.pi * torch.round(angle.detach() / (2 * math.pi))


def rotate(x_bsmhr: Tensor, angle_bsha: Tensor, pairing: str = "interleaved") -> Tensor:
    """Turn pair `q` of the state axis by `angle[q]`, the same for every rank; the other entries pass through.

    Pairs are `(2q, 2q + 1)` when `"interleaved"` and `(q, q + r / 2)` when `"half"`. Computed in at least float32,
    returned in the dtype of `x`.
    """
    return rotate_all((x_bsmhr,), angle_bsha, pairing)[0]


def rotate_all(xs_bsmhr: tuple[Tensor, ...], angle_bsha: Tensor, pairing: str = "interleaved") -> tuple[Tensor, ...]:
    """`rotate` for several tensors and one sine and cosine."""
    for x_bsmhr in xs_bsmhr:
        size = bind({"x_bsmhr": x_bsmhr, "angle_bsha": angle_bsha})
        check_floats({"x_bsmhr": x_bsmhr}, {"angle_bsha": angle_bsha})
        check_pairs(size.a, size.r)
    check_pairing(pairing)
    angle_bs1ha = angle_bsha.to(torch.promote_types(angle_bsha.dtype, torch.float32))[:, :, None]
    cos_bs1ha, sin_bs1ha = torch.cos(angle_bs1ha), torch.sin(angle_bs1ha)
    turn = turn_neighbours if pairing == "interleaved" else turn_halves
    return tuple(turn(x_bsmhr, cos_bs1ha, sin_bs1ha) for x_bsmhr in xs_bsmhr)


def check_pairing(pairing: str) -> None:
    if pairing not in ("interleaved", "half"):
        raise ValueError(f'pairing = {shown(pairing)} is unknown; use "interleaved" or "half"')


def check_pairs(angles: int, state_rank: int) -> None:
    if state_rank % 2 or 2 * angles > state_rank:
        raise ValueError(f"{angles} angles need an even state axis of at least {2 * angles} entries, got {state_rank}")


def turn_neighbours(x_bsmhr: Tensor, cos_bs1ha: Tensor, sin_bs1ha: Tensor) -> Tensor:
    angles, r = cos_bs1ha.shape[-1], x_bsmhr.shape[-1]
    turned, rest = x_bsmhr.split((2 * angles, r - 2 * angles), dim=-1)
    first, second = turned.unflatten(-1, (angles, 2)).unbind(-1)
    pairs = torch.stack(turn_pairs(first, second, cos_bs1ha, sin_bs1ha), dim=-1).flatten(-2)
    return torch.cat((pairs.to(x_bsmhr.dtype), rest), dim=-1)


def turn_halves(x_bsmhr: Tensor, cos_bs1ha: Tensor, sin_bs1ha: Tensor) -> Tensor:
    angles, half = cos_bs1ha.shape[-1], x_bsmhr.shape[-1] // 2
    first, rest_first, second, rest_second = x_bsmhr.split((angles, half - angles) * 2, dim=-1)
    first, second = (t.to(x_bsmhr.dtype) for t in turn_pairs(first, second, cos_bs1ha, sin_bs1ha))
    return torch.cat((first, rest_first, second, rest_second), dim=-1)


def turn_pairs(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(first * sin, second, cos)
