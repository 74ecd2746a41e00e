"""Mamba-3's scan with several ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.compat import mamba3_core
from mambakit.compat.arguments import of_tensors
from mambakit.compat.gpu_only import gpu_only
from mambakit.ops.norm import rms_norm

__all__ = ["mamba3_mimo"]

__getattr__ = gpu_only(__name__, partial="_Mamba3Function")


@of_tensors
def mamba3_mimo(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor,
    MIMO_Z: Tensor | None,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor | None,
    Z: Tensor | None,
    chunk_size: int,
    rotary_dim_divisor: int,
    dtype: torch.dtype,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    fuse_pregate_headwise_rms_norm: bool = False,
    outproj_norm_weight: Tensor | None = None,
    outproj_norm_eps: float = 1e-5,
) -> Any:
    """`out` (b, s, h, p), without `MIMO_Out` (b, s, m, h, p); with `return_state` a tuple of it and the final states.

    `Q`, `K` are (b, s, m, g, r), `V`, `Z` (b, s, h, p), `ADT`, `DT`, `Trap` (b, h, s), biases (h, m, r), `MIMO_*`
    (h, m, p), `Angles` (b, s, h, r / rotary_dim_divisor), `D` (h), `outproj_norm_weight` (h, p) or flat. States are
    angle (n, h, a), ssm (n, h, p, r), k (n, m, h, r), v (n, h, p). `out` is of `dtype`. `chunk_size` has no effect.
    """
    r, a = Q.shape[-1], Angles.shape[-1]
    if rotary_dim_divisor not in (2, 4) or r // rotary_dim_divisor != a:
        raise ValueError(
            f"rotary_dim_divisor = {rotary_dim_divisor} has to be 2 or 4 and to turn {r} state entries by {a} angles"
        )
    if Z is not None and MIMO_Z is None:
        raise ValueError("Z was given without MIMO_Z")
    if fuse_pregate_headwise_rms_norm != (outproj_norm_weight is not None):
        raise ValueError("fuse_pregate_headwise_rms_norm and outproj_norm_weight go together: give both or neither")
    inputs = (Q, K, V, ADT, DT, Trap, Q_bias, K_bias, MIMO_V, Angles, D)
    y_bsmhp, after = mamba3_core.scan(inputs, None, cu_seqlens, "half")
    if outproj_norm_weight is not None:
        y_bsmhp = rms_norm(y_bsmhp, eps=outproj_norm_eps) * outproj_norm_weight.view(y_bsmhp.shape[-2:])
    if Z is not None:
        y_bsmhp = y_bsmhp * F.silu(mamba3_core.expand(Z.to(y_bsmhp.dtype), MIMO_Z))
    out = y_bsmhp if MIMO_Out is None else (y_bsmhp * MIMO_Out.transpose(0, 1)).sum(2)
    return (out.to(dtype), *after) if return_state else out.to(dtype)
