"""What the official Mamba-3 functions, SISO and MIMO, whole sequences and single tokens, have in common."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.compat.arguments import in_full_precision, in_one_precision
from mambakit.compat.packing import from_rows, last_in_rows, packed, to_rows
from mambakit.ops.rotation import rotate, running_angle
from mambakit.ops.shapes import bind
from mambakit.ops.trapezoid import trapezoid


class States(NamedTuple):
    """In the official order. Angles lie in [0, 2 pi)."""

    angle_bha: Tensor
    ssm_bhpr: Tensor
    k_bmhr: Tensor
    v_bhp: Tensor


def read_states(states: Any, owner: str) -> Any:
    """The four official states, or None if there are none of them."""
    states = (None,) * 4 if states is None else tuple(states)
    if len(states) != 4 or len({state is None for state in states}) != 1:
        raise ValueError(f"{owner} takes all four states (angle, ssm, k, v) or none of them")
    return None if states[0] is None else states


def turned_by(angles_bsha: Tensor, dt_bsh: Tensor, state_bha: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cumulative angles and the last ones. Official ones come per head: a row of the batch for each."""
    b, _, h, _ = angles_bsha.shape
    rate_BsA, dt_Bs = angles_bsha.transpose(1, 2).flatten(0, 1), dt_bsh.transpose(1, 2).flatten(0, 1)
    state_B1a = None if state_bha is None else state_bha.flatten(0, 1)[:, None]
    angle_Bs1a, last_B1a = running_angle(rate_BsA, dt_Bs[..., None], 1.0, state_B1a)
    angle_bsha = angle_Bs1a[:, :, 0].unflatten(0, (b, h)).transpose(1, 2)
    return angle_bsha, last_B1a[:, 0].unflatten(0, (b, h))


def biased(x_bsmgr: Tensor, bias_hmr: Tensor) -> Tensor:
    """Groups repeated to heads, plus a bias per head and rank, in at least float32."""
    heads, groups = bias_hmr.shape[0], x_bsmgr.shape[3]
    if heads % groups:
        raise ValueError(f"{heads} heads are not a multiple of the {groups} groups of Q and K")
    wide = torch.promote_types(x_bsmgr.dtype, torch.float32)
    return x_bsmgr.to(wide).repeat_interleave(heads // groups, dim=3) + bias_hmr.transpose(0, 1)


def expand(x_XXhp: Tensor, weight_hmp: Tensor | None) -> Tensor:
    """`[.., h, p]` to one copy per rank, each with its own weights; without weights there is one rank."""
    copies = x_XXhp[..., None, :, :]
    return copies if weight_hmp is None else (copies * weight_hmp.transpose(0, 1)).to(x_XXhp.dtype)


def scan(inputs: tuple[Any, ...], states: Any, cu_seqlens: Tensor | None, pairing: str) -> tuple[Tensor, States]:
    """Bias, rotate, scan, skip: `y_bsmhp` in at least float32 and the states after each row or packed sequence.

    `inputs` are, in this order, `Q`, `K` (b, s, m, g, r), `V` (b, s, h, p), `ADT`, `DT`, `Trap` (b, h, s), `Q_bias`,
    `K_bias` (h, m, r), `MIMO_V` (h, m, p), `Angles` (b, s, h, a) and `D` (h).
    """
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, MIMO_V, Angles, D = inputs
    size = bind(V_bshp=V, Q_bsmgr=Q, K_bsmgr=K, ADT_bhs=ADT, DT_bhs=DT, Trap_bhs=Trap, Angles_bsha=Angles, D_h=D)
    bind(V_bshp=V, Q_bsmgr=Q, Q_bias_hmr=Q_bias, K_bias_hmr=K_bias, MIMO_V_hmp=MIMO_V)
    dtype = V.dtype
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, MIMO_V, Angles, D = in_one_precision(*inputs)
    sequence = (Q, K, V, ADT.mT, DT.mT, Trap.mT, Angles)
    layout = None
    if cu_seqlens is not None:
        layout = packed(V, cu_seqlens)
        sequence = tuple(to_rows(layout, t) for t in sequence)
    Q, K, V, da_bsh, dt_bsh, trap_bsh, Angles = sequence
    lambda_bsh = torch.sigmoid(trap_bsh.to(torch.promote_types(trap_bsh.dtype, torch.float32)))
    if states is not None:
        rows, m = len(V), size.m
        named = dict(zip(("angle_state_bha", "ssm_state_bhpr", "k_state_bmhr", "v_state_bhp"), states, strict=True))
        bind(V_bshp=V, Q_bsmgr=Q, Angles_bsha=Angles, **named)
        assert states[2].shape[:2] == (rows, m)
        wide = torch.promote_types(V.dtype, torch.float32)
        states = States(states[0].to(wide), states[1].to(wide), states[2].to(V.dtype), states[3].to(V.dtype))
    angle_bsha, last_bha = turned_by(Angles.to(V.dtype), dt_bsh, None if states is None else states.angle_bha)
    c_bsmhr, b_bsmhr = (
        rotate(biased(t, bias), angle_bsha, pairing).to(V.dtype) for t, bias in ((Q, Q_bias), (K, K_bias))
    )
    carried = () if states is None else (states.ssm_bhpr, expand(states.v_bhp, MIMO_V), states.k_bmhr)
    # In float32 from here on: the output is rounded once, after skip and gate.
    v_bsmhp, b_wide, c_wide, *carried = in_full_precision(expand(V, MIMO_V), b_bsmhr, c_bsmhr, *carried)
    y_bsmhp, state_bhpr = trapezoid(v_bsmhp, b_wide, c_wide, da_bsh, dt_bsh, lambda_bsh, *carried)
    if D is not None:
        y_bsmhp = y_bsmhp + D[:, None] * v_bsmhp
    if layout is None:
        k_bmhr, v_bhp = b_bsmhr[:, -1], V[:, -1]
    else:
        k_bmhr, v_bhp = last_in_rows(layout, b_bsmhr), last_in_rows(layout, V)
        y_bsmhp = from_rows(layout, y_bsmhp, size.s)
    return y_bsmhp, States(last_bha.remainder(2 * math.pi), state_bhpr, k_bmhr.to(dtype), v_bhp.to(dtype))
