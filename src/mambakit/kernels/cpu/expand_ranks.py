"""One copy of a token per rank; see `ranks.h`."""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.norm import in_rows
from mambakit.kernels.cpu.pages import empty
from mambakit.kernels.cpu.structs import ExpandRanks, ExpandRanksBackward, Ranks
from mambakit.ops.expand_ranks import EXPAND_RANKS


def ranks(x_Ni: Tensor, weight_mi: Tensor) -> Ranks:
    (n, i), m = x_Ni.shape, len(weight_mi)
    return Ranks(
        rows=n,
        ranks=m,
        width=i,
        x=pointer(x_Ni),
        x_row=x_Ni.stride(0),
        weight=pointer(weight_mi),
        narrow=x_Ni.dtype == torch.bfloat16,
    )


def expand(x_Ni: Tensor, weight_mi: Tensor) -> list[Tensor]:
    x_Ni, weight_mi = in_rows(x_Ni), weight_mi.contiguous()
    v_Nmi = empty(len(x_Ni), *weight_mi.shape, dtype=x_Ni.dtype)
    run(ExpandRanks(inputs=ranks(x_Ni, weight_mi), v=pointer(v_Nmi)))
    return [v_Nmi]


def expand_backward(grads: list[Tensor], x_Ni: Tensor, weight_mi: Tensor, needs: Any) -> list[Tensor]:
    d_v_Nmi, x_Ni, weight_mi = grads[0].contiguous(), in_rows(x_Ni), weight_mi.contiguous()
    d_x_Ni, d_weight_mi = empty(*x_Ni.shape, dtype=x_Ni.dtype), torch.empty_like(weight_mi)
    d_v, d_x, d_weight = map(pointer, (d_v_Nmi, d_x_Ni, d_weight_mi))
    run(ExpandRanksBackward(inputs=ranks(x_Ni, weight_mi), d_v=d_v, d_x=d_x, d_weight=d_weight))
    return [d_x_Ni, d_weight_mi]


EXPAND_RANKS.implement(CPU, expand, expand_backward, casts=True, narrow=(0,))
