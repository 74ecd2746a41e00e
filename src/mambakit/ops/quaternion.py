"""Cumulative rotation of B and C by unit quaternions `(w, x, y, z)`, one per block of four state entries.

A quaternion axis is written `4`, a generator axis `3`, a block `j`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mambakit.ops.rotation import checked_range
from mambakit.ops.segments import before_segment
from mambakit.ops.shapes import bind, check_floats, check_segments

IDENTITY = (1.0, 0.0, 0.0, 0.0)


def unit_quaternion(rot_bshj3: Tensor, dt_bsh: Tensor, rotation_range: float = 1.0) -> Tensor:
    """The turn by `dt rotation_range pi tanh(|rot|)` about the axis `rot`, at least float32.

    A zero `rot` gives the identity, with a finite gradient.
    """
    bind({"rot_bshj3": rot_bshj3, "dt_bsh": dt_bsh})
    wide = check_floats({"rot_bshj3": rot_bshj3}, {"dt_bsh": dt_bsh})
    rot_bshj3, rotation_range = rot_bshj3.to(wide), checked_range(rotation_range)
    size_bshj1 = length(rot_bshj3)
    half_turn_bshj1 = dt_bsh.to(wide)[..., None, None] * (rotation_range * math.pi / 2) * torch.tanh(size_bshj1)
    # Sine over size first: both vanish with rot, their quotient does not.
    axis_part_bshj3 = (torch.sin(half_turn_bshj1) / size_bshj1) * rot_bshj3
    return torch.cat((torch.cos(half_turn_bshj1), axis_part_bshj3), dim=-1)


def length(x: Tensor) -> Tensor:
    """Euclidean norm of the last axis, at least 1e-9, without overflow or underflow of the squares."""
    # The square of the floor is below the precision of float64: beneath it sin(c n) / n is its limit c.
    largest = x.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1e-9)
    return largest * (x / largest).square().sum(dim=-1, keepdim=True).clamp(min=1).sqrt()


def running_quaternion(
    q_bshj4: Tensor, carry_bhj4: Tensor | None = None, *, segments_bs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`Q_t = q_t Q_{t-1}`, normalised, with `Q_{-1} = carry` (None: the identity); at least float32.

    Returns `Q_bshj4` and the last of it, the next call's carry. Each of `segments_bs` but the first starts from the
    identity.
    """
    size = bind({"q_bshj4": q_bshj4}, carry_bhj4=carry_bhj4, segments_bs=segments_bs)
    wide = check_floats({"q_bshj4": q_bshj4}, {"carry_bhj4": carry_bhj4})
    identity_4 = torch.tensor(IDENTITY, dtype=wide, device=q_bshj4.device)
    if carry_bhj4 is None:
        carry_bhj4 = identity_4.expand(size.b, size.h, size.j, 4)
    total_bshj4 = quaternion_product(q_bshj4.to(wide), carry_bhj4.to(wide))
    if segments_bs is not None:
        check_segments(segments_bs)
        total_bshj4 = multiply(total_bshj4, conjugate(before_segment(total_bshj4, segments_bs, identity_4)))
    if size.s:
        return total_bshj4, total_bshj4[:, -1].clone()
    return total_bshj4, normalise(carry_bhj4.to(wide))


def rotate_quaternion(x_bsmhr: Tensor, q_bshj4: Tensor) -> Tensor:
    """`conj(q) x` in the first `j` blocks of four state entries, the same for every rank; the rest passes through.

    Computed in at least float32, returned in the dtype of `x`.
    """
    size = bind({"x_bsmhr": x_bsmhr, "q_bshj4": q_bshj4})
    check_floats({"x_bsmhr": x_bsmhr}, {"q_bshj4": q_bshj4})
    check_blocks(size.j, size.r)
    q_bs1hj4 = q_bshj4.to(torch.promote_types(q_bshj4.dtype, torch.float32))[:, :, None]
    blocks, rest = x_bsmhr.split((4 * size.j, size.r - 4 * size.j), dim=-1)
    turned = multiply(conjugate(q_bs1hj4), blocks.unflatten(-1, (size.j, 4)))
    return torch.cat((turned.flatten(-2).to(x_bsmhr.dtype), rest), dim=-1)


def check_blocks(blocks: int, state_rank: int) -> None:
    if 4 * blocks > state_rank:
        raise ValueError(f"{blocks} quaternions need a state axis of at least {4 * blocks} entries, got {state_rank}")


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Hamilton product over the last axis."""
    aw, ax, ay, az = left.unbind(-1)
    bw, bx, by, bz = right.unbind(-1)
    parts = (
        aw * bw - ax * bx - ay * by - az * bz,
        aw * bx + ax * bw + ay * bz - az * by,
        aw * by - ax * bz + ay * bw + az * bx,
        aw * bz + ax * by - ay * bx + az * bw,
    )
    return torch.stack(parts, dim=-1)


def conjugate(q: Tensor) -> Tensor:
    w, axis = q.split((1, 3), dim=-1)
    return torch.cat((w, -axis), dim=-1)


def normalise(q: Tensor) -> Tensor:
    return q / length(q)


def multiply_up(q_bshj4: Tensor) -> Tensor:
    """`P_t = q_t ... q_0`: halve the sequence by multiplying neighbours, solve that, fill in the tokens between."""
    s = q_bshj4.shape[1]
    if s < 2:
        return q_bshj4
    even_bShj4, odd_bShj4 = q_bshj4[:, 0::2], q_bshj4[:, 1::2]
    at_odd_bShj4 = multiply_up(multiply(odd_bShj4, even_bShj4[:, : s // 2]))
    total_bshj4 = torch.empty_like(q_bshj4)
    total_bshj4[:, 0] = q_bshj4[:, 0]
    total_bshj4[:, 1::2] = at_odd_bShj4
    total_bshj4[:, 2::2] = multiply(even_bShj4[:, 1:], at_odd_bShj4[:, : (s - 1) // 2])
    return total_bshj4


@torch.library.custom_op("mambakit::quaternion_product", mutates_args=())
def quaternion_product(q_bshj4: Tensor, carry_bhj4: Tensor) -> Tensor:
    """`Q_t = q_t ... q_0 carry`, normalised. Keeps its inputs for the backward, none of the products."""
    return normalise(multiply(multiply_up(q_bshj4), carry_bhj4[:, None]))


@quaternion_product.register_fake
def _(q_bshj4: Tensor, carry_bhj4: Tensor) -> Tensor:
    return q_bshj4.new_empty(q_bshj4.shape)


def keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def quaternion_product_backward(ctx: Any, d_total_bshj4: Tensor) -> tuple[Tensor, Tensor]:
    """`dq_t = Q_t S_t conj(Q_{t-1})` and `dcarry = carry S_0`, where `S_t = sum_{s>=t} conj(Q_s) dQ_s`.

    Follows from `da = do conj(b)`, `db = conj(a) do` for `o = a b`, and `Q conj(Q) = 1`. Written in differentiable
    operations, the product among them, so higher derivatives exist.
    """
    q_bshj4, carry_bhj4 = ctx.saved_tensors
    total_bshj4 = quaternion_product(q_bshj4, carry_bhj4)
    first_b1hj4 = normalise(carry_bhj4)[:, None]
    previous_bshj4 = torch.cat((first_b1hj4, total_bshj4), dim=1)[:, :-1]
    share_bshj4 = multiply(conjugate(total_bshj4), d_total_bshj4)
    # Lengths are normalised away: only the turning part, without w, has an effect.
    share_bshj4 = share_bshj4 * share_bshj4.new_tensor((0.0, 1.0, 1.0, 1.0))
    later_bshj4 = share_bshj4.flip(1).cumsum(dim=1).flip(1)
    d_q_bshj4 = multiply(multiply(total_bshj4, later_bshj4), conjugate(previous_bshj4)) / length(q_bshj4)
    all_bhj4 = share_bshj4.sum(dim=1)
    return d_q_bshj4, multiply(first_b1hj4[:, 0], all_bhj4) / length(carry_bhj4)


quaternion_product.register_autograd(quaternion_product_backward, setup_context=keep_inputs)
