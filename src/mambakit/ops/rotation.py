"""Cumulative rotation of B and C in planes; `quaternion` is the same in blocks of four."""

import math

import torch
from torch import Tensor

from mambakit.ops.segments import before_segment
from mambakit.ops.shapes import bind, check_floats, check_segments


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
    size = bind(rot_bsa=rot_bsa, dt_bsh=dt_bsh, angle_bha=angle_bha, segments_bs=segments_bs)
    dtype = check_floats({"rot_bsa": rot_bsa}, {"dt_bsh": dt_bsh, "angle_bha": angle_bha})
    # An angle is used modulo a turn while its sum grows with the sequence: float32 would lose its digits.
    wide = torch.float32 if rot_bsa.device.type == "mps" else torch.float64
    rate_bsa = rotation_range * math.pi * torch.tanh(rot_bsa.to(wide))
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
    size = bind(x_bsmhr=x_bsmhr, angle_bsha=angle_bsha)
    check_floats({"x_bsmhr": x_bsmhr}, {"angle_bsha": angle_bsha})
    if pairing not in ("interleaved", "half"):
        raise ValueError(f'pairing = {pairing!r} is unknown; use "interleaved" or "half"')
    if size.r % 2 or 2 * size.a > size.r:
        raise ValueError(f"{size.a} angles need an even state axis of at least {2 * size.a} entries, got {size.r}")
    angle_bs1ha = angle_bsha.to(torch.promote_types(angle_bsha.dtype, torch.float32))[:, :, None]
    cos_bs1ha, sin_bs1ha = torch.cos(angle_bs1ha), torch.sin(angle_bs1ha)

    def turn(first_bsmha: Tensor, second_bsmha: Tensor) -> tuple[Tensor, Tensor]:
        turned_first = first_bsmha * cos_bs1ha - second_bsmha * sin_bs1ha
        turned_second = first_bsmha * sin_bs1ha + second_bsmha * cos_bs1ha
        return turned_first.to(x_bsmhr.dtype), turned_second.to(x_bsmhr.dtype)

    if pairing == "interleaved":
        turned, rest = x_bsmhr.split((2 * size.a, size.r - 2 * size.a), dim=-1)
        pairs = turn(*turned.unflatten(-1, (size.a, 2)).unbind(-1))
        return torch.cat((torch.stack(pairs, dim=-1).flatten(-2), rest), dim=-1)
    sizes = (size.a, size.r // 2 - size.a) * 2
    first, rest_first, second, rest_second = x_bsmhr.split(sizes, dim=-1)
    first, second = turn(first, second)
    return torch.cat((first, rest_first, second, rest_second), dim=-1)
