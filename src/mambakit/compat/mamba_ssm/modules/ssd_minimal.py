"""The scan of Mamba-2 from decays and inputs that are already discrete."""

import torch
from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.gpu_only import gpu_only
from mambakit.ops.shapes import bind
from mambakit.ops.ssd import ssd
from mambakit.ops.ssd_path import SsdPath

__all__ = ["segsum", "segsum_unstable", "ssd_minimal_discrete"]

__getattr__ = gpu_only(__name__, tests="test_correctness")


@of_tensors
def segsum(x: Tensor) -> Tensor:
    """`out[.., t, s]`: the sum of `x` over the entries after `s` up to `t`, minus infinity where `s` is after `t`."""
    length = x.shape[-1]
    ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
    # Summed down the columns instead of taking differences of running sums, which would lose digits.
    sums = x[..., None].expand(*x.shape, length).masked_fill(~ones.tril(-1), 0).cumsum(-2)
    return sums.masked_fill(~ones.tril(), float("-inf"))


@of_tensors
def segsum_unstable(x: Tensor) -> Tensor:
    """`segsum` by differences of running sums, which lose digits where sums are large."""
    sums = x.cumsum(-1)
    ones = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device)
    return (sums[..., :, None] - sums[..., None, :]).masked_fill(~ones.tril(), float("-inf"))


@of_tensors
def ssd_minimal_discrete(
    X: Tensor, A: Tensor, B: Tensor, C: Tensor, block_len: int, initial_states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`Y` (b, s, h, p) and the last state (b, h, p, r) of h_t = exp(A_t) h_{t-1} + X_t B_t^T, y_t = h_t C_t.

    `X` is (b, s, h, p), `A` (b, s, h), `B` and `C` (b, s, h, r), `initial_states` (b, 1, h, p, r) or (b, h, p, r).
    Unlike officially, `block_len` need not divide the length.
    """
    if initial_states is not None and initial_states.dim() == 5:
        bind(X_bshp=X, initial_states_b1hpr=initial_states)
        initial_states = initial_states[:, 0]
    bind(X_bshp=X, A_bsh=A, B_bshr=B, C_bshr=C, initial_states_bhpr=initial_states)
    one_bsh = torch.ones_like(A)
    path = SsdPath.minimal(block_len)
    v_bsmhp, b_bsmhr, c_bsmhr = (t[:, :, None] for t in (X, B, C))
    y_bsmhp, state_bhpr = ssd(v_bsmhp, b_bsmhr, c_bsmhr, A, one_bsh, one_bsh, initial_states, path=path)
    return y_bsmhp[:, :, 0], state_bhpr
