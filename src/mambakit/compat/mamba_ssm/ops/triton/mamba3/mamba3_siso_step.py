"""One token of Mamba-3's scan with one rank."""

from typing import Any

from torch import Tensor

from mambakit.compat.mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

__all__ = ["mamba3_siso_step"]


def mamba3_siso_step(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: Any = None,
) -> tuple[Tensor, list[Tensor]]:
    """`out` (b, h, p) and the new states, in the shapes of `mamba3_siso_combined` without the axis of time."""
    Q, K, V, Angles = (t[:, None] for t in (Q, K, V, Angles))
    ADT, DT, Trap = (t[..., None] for t in (ADT, DT, Trap))
    Z = None if Z is None else Z[:, None]
    args = (Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, Input_States)
    out, *states = mamba3_siso_combined(*args, return_final_states=True)
    return out[:, 0], states
