"""The scans' and experts' operators in terms of ordinary ones, for runtimes that know no others.

`torch.export` keeps each as one operator of ours; `program.run_decompositions(DECOMPOSITIONS)` replaces it.
"""

from typing import Any

import torch
from torch import Tensor

from mambakit.ops.grouped_product import GROUPED_PRODUCT
from mambakit.ops.selective_scan import SELECTIVE_SCAN
from mambakit.ops.ssd import SSD, in_chunks
from mambakit.ops.ssd_chunked import ssd_minimal


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
    """`scan_tokens` by doubling: after step k every state holds the writes of the last 2^k tokens."""
    *_, fresh_bs, _, _ = others
    width = x_bsi.shape[2] // b_bsgr.shape[2]
    x, dt, b, c = (tensor.to(a_ir.dtype) for tensor in (x_bsi, dt_bsi, b_bsgr, c_bsgr))
    b_bsir, c_bsir = (t.repeat_interleave(width, 2) for t in (b, c))
    decay_bsir = torch.exp(dt[..., None] * a_ir)
    if fresh_bs is not None:
        decay_bsir = torch.where(fresh_bs[..., None, None], 0, decay_bsir)
    state_bsir = (dt * x)[..., None] * b_bsir
    entering_b1ir = decay_bsir[:, :1] * state_bir[:, None]
    state_bsir = torch.cat([state_bsir[:, :1] + entering_b1ir, state_bsir[:, 1:]], 1)
    shift, length = 1, x_bsi.shape[1]
    while shift < length:
        earlier, later = slice(None, length - shift), slice(shift, None)
        state_bsir = torch.cat(
            [state_bsir[:, :shift], state_bsir[:, later] + decay_bsir[:, later] * state_bsir[:, earlier]], 1
        )
        decay_bsir = torch.cat([decay_bsir[:, :shift], decay_bsir[:, later] * decay_bsir[:, earlier]], 1)
        shift *= 2
    y_bsi = (state_bsir * c_bsir).sum(-1)
    return [y_bsi.to(x_bsi.dtype), state_bsir[:, -1].contiguous()]


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
