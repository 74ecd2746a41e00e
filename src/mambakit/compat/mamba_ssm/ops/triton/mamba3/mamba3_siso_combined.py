"""Mamba-3's scan with one rank."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mambakit.compat import mamba3_core
from mambakit.compat.arguments import of_tensors
from mambakit.compat.gpu_only import gpu_only

__all__ = ["mamba3_siso_combined"]

__getattr__ = gpu_only(__name__, tiles="_triton_alloc_fn", partial="_Mamba3Function Mamba3Output")


@of_tensors
def mamba3_siso_combined(
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
    chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Any:
    """`out` (b, s, h, p), or with `return_final_states` a tuple of it and the final states.

    `Q`, `K` are (b, s, g, r), `V`, `Z` (b, s, h, p), `ADT`, `DT`, `Trap` (b, h, s), biases (h, r), `Angles`
    (b, s, h, a), `D` (h). States are angle (n, h, a), ssm (n, h, p, r), k (n, h, r), v (n, h, p): one for each of the
    `n` rows, or of the sequences that `cu_seqlens` packs into a batch of one.
    It computes in the dtype of `V`, where the official kernel computes in bfloat16. `chunk_size` has no effect.
    """
    states = mamba3_core.read_states(Input_States, "Input_States")
    if states is not None:
        states = (states[0], states[1], states[2][:, None], states[3])
    per_rank = (Q[:, :, None], K[:, :, None], V, ADT, DT, Trap, Q_bias[:, None], K_bias[:, None], None, Angles, D)
    y_bsmhp, after = mamba3_core.scan(per_rank, states, cu_seqlens, "interleaved")
    out = y_bsmhp[:, :, 0]
    out = (out if Z is None else out * F.silu(Z.to(out.dtype))).to(V.dtype)
    return (out, after.angle_bha, after.ssm_bhpr, after.k_bmhr[:, 0], after.v_bhp) if return_final_states else out
