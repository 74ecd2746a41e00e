"""Products of two sequences inside of chunks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.gradients import written

__all__ = ["_bmm_chunk_bwd", "_bmm_chunk_fwd"]

__getattr__ = gpu_only(__name__, kernels="_bmm_chunk_fwd_kernel _bmm_chunk_bwd_kernel", tiles="init_to_zero")


@of_tensors
def _bmm_chunk_fwd(
    a: Tensor,
    b: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    causal: bool = False,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """`a_l . b_t` of the tokens of each chunk: (b, n, l, t) from (b, s, k), (b, n, g, l, t) from (b, s, g, k).

    Zero between tokens of different `seq_idx` and of padding. `causal` has no effect: all products are right.
    """
    has_groups = a.dim() == 4
    wide = torch.promote_types(a.dtype, torch.float32)
    a_bnlgk, b_bntgk = (in_chunks(t if has_groups else t[:, :, None], chunk_size).to(wide) for t in (a, b))
    out = torch.einsum("bnlgk,bntgk->bnglt", a_bnlgk, b_bntgk)
    if seq_idx is not None:
        out = out * of_one_sequence(seq_idx, chunk_size)[:, :, None]
    return (out if has_groups else out[:, :, 0]).to(output_dtype or a.dtype)


@of_tensors
def _bmm_chunk_bwd(a: Tensor, dout: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The gradient of `b` from that of `_bmm_chunk_fwd(a, b)`, plus `residual`; it has the shape of `a`."""
    has_groups, wide = a.dim() == 4, torch.promote_types(a.dtype, torch.float32)
    a_bnlgk = in_chunks(a if has_groups else a[:, :, None], dout.shape[-1]).to(wide)
    d_b = torch.einsum("bnglt,bnlgk->bntgk", (dout if has_groups else dout[:, :, None]).to(wide), a_bnlgk)
    d_b = d_b.flatten(1, 2)[:, : a.shape[1]]
    d_b = d_b if has_groups else d_b[:, :, 0]
    return written((d_b if residual is None else d_b + residual).to(a.dtype), out)


def of_one_sequence(seq_idx: Tensor, chunk_size: int) -> Tensor:
    """Which two tokens of a chunk belong to one sequence, (b, n, l, t); padding belongs to none."""
    ids_bnl = in_chunks(seq_idx, chunk_size, -1)
    return (ids_bnl[..., :, None] == ids_bnl[..., None, :]) & (ids_bnl >= 0)[..., None]


def in_chunks(x_bsX: Tensor, chunk_size: int, padding: float = 0) -> Tensor:
    """`bnlX`, padded behind the last token."""
    missing = -x_bsX.shape[1] % chunk_size
    return F.pad(x_bsX, (*[0, 0] * (x_bsX.dim() - 2), 0, missing), value=padding).unflatten(1, (-1, chunk_size))
