"""The scans' and experts' operators in terms of ordinary ones, for runtimes that know no others.

`torch.export` keeps each as one operator of ours; `program.run_decompositions(DECOMPOSITIONS)` replaces it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.ops.grouped_product import GROUPED_PRODUCT
from mambakit.ops.selective_scan import SELECTIVE_SCAN
from mambakit.ops.ssd import SSD, in_chunks
from mambakit.ops.ssd_chunked import ssd_minimal, sums_between

CHUNK = 128
"""Tokens, where the length is free: the decays between all pairs of chunks are fewer than the states up to 128^2."""


def plain_ssd(*inputs_and_backend: Any) -> list[Tensor]:
    """`SSD` as `ssd_minimal`."""
    return [tensor.contiguous() for tensor in in_chunks(ssd_minimal, *inputs_and_backend[:-1])]


def plain_selective_scan(
    x_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b_bsgr: Tensor,
    c_bsgr: Tensor,
    state_bir: Tensor,
    *others: Any,
) -> list[Tensor]:
    """`scan_tokens` in chunks, each by doubling: after step k every state holds the writes of the last 2^k tokens.

    A length that is known is one chunk; one that is free is filled up with tokens that change nothing.
    """
    *_, fresh_bs, _, _ = others
    length, width = x_bsi.shape[1], x_bsi.shape[2] // b_bsgr.shape[2]
    chunk = length if isinstance(length, int) else CHUNK
    x, dt, b, c = (tensor.to(a_ir.dtype) for tensor in (x_bsi, dt_bsi, b_bsgr, c_bsgr))
    b_bsir, c_bsir = (t.repeat_interleave(width, 2) for t in (b, c))
    gap_bsir = dt[..., None] * a_ir
    if fresh_bs is not None:
        gap_bsir = gap_bsir.masked_fill(fresh_bs[..., None, None], -torch.inf)

    def chunked(tensor_bsir: Tensor) -> Tensor:
        return F.pad(tensor_bsir, (0, 0, 0, 0, 0, -length % chunk)).unflatten(1, (-1, chunk))

    gap_bnlir, state_bnlir = chunked(gap_bsir), chunked((dt * x)[..., None] * b_bsir)
    decay_bnlir, shift = gap_bnlir.exp(), 1
    while shift < chunk:
        earlier, later = slice(None, chunk - shift), slice(shift, None)
        held_bnlir = state_bnlir[:, :, later] + decay_bnlir[:, :, later] * state_bnlir[:, :, earlier]
        state_bnlir = torch.cat([state_bnlir[:, :, :shift], held_bnlir], 2)
        both_bnlir = decay_bnlir[:, :, later] * decay_bnlir[:, :, earlier]
        decay_bnlir = torch.cat([decay_bnlir[:, :, :shift], both_bnlir], 2)
        shift *= 2
    # From chunk to chunk as `pass_states_at_once` does it.
    ends_bNir = torch.cat([state_bir[:, None], state_bnlir[:, :, -1]], 1)
    gap_birN = F.pad(gap_bnlir.sum(2).permute(0, 2, 3, 1), (1, 0))
    entering_bNir = torch.einsum("birNM,bMir->bNir", sums_between(gap_birN).exp(), ends_bNir)
    state_bnlir = state_bnlir + decay_bnlir * entering_bNir[:, :-1, None]
    y_bsi = (state_bnlir.flatten(1, 2)[:, :length] * c_bsir).sum(-1)
    return [y_bsi.to(x_bsi.dtype), entering_bNir[:, -1].contiguous()]


def plain_grouped_product(x_ni: Tensor, weight_eoi: Tensor, counts_e: Tensor, backend: str) -> list[Tensor]:
    """A copy of its matrix for every row: sizes do not depend on data."""
    rows_n = torch.arange(x_ni.shape[0], device=x_ni.device)
    # Of so many experts all rows come before this one.
    expert_n = (counts_e.cumsum(0) <= rows_n[:, None]).sum(1)
    return [(weight_eoi[expert_n] @ x_ni[..., None])[..., 0]]


DECOMPOSITIONS: dict[Any, Any] = {
    SSD.operator: plain_ssd,
    SELECTIVE_SCAN.operator: plain_selective_scan,
    GROUPED_PRODUCT.operator: plain_grouped_product,
}
