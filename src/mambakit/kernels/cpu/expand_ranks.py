"""One copy of a token per rank; see `ranks.h`."""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.norm import in_rows
from mambakit.kernels.cpu.pages import empty
from mambakit.kernels.cpu.structs import ExpandRanks, ExpandRanksBackward
from mambakit.ops.expand_ranks import EXPAND_RANKS


def expand(x_Ni: Tensor, weight_mi: Tensor) -> list[Tensor]:
    x_Ni, weight_mi = in_rows(x_Ni), weight_mi.contiguous()
    (n, i), m = x_Ni.shape, len(weight_mi)
    v_Nmi = empty(n, m, i)
    run(
        ExpandRanks(
            rows=n,
            ranks=m,
            width=i,
            x=pointer(x_Ni),
            x_row=x_Ni.stride(0),
            weight=pointer(weight_mi),
            v=pointer(v_Nmi),
        )
    )
    return [v_Nmi]


def expand_backward(grads: list[Tensor], x_Ni: Tensor, weight_mi: Tensor, needs: Any) -> list[Tensor]:
    d_v_Nmi, x_Ni, weight_mi = grads[0].contiguous(), in_rows(x_Ni), weight_mi.contiguous()
    n, m, i = d_v_Nmi.shape
    d_x_Ni, d_weight_mi = empty(n, i), torch.empty_like(weight_mi)
    run(
        ExpandRanksBackward(
            rows=n,
            ranks=m,
            width=i,
            x=pointer(x_Ni),
            x_row=x_Ni.stride(0),
            weight=pointer(weight_mi),
            d_v=pointer(d_v_Nmi),
            d_x=pointer(d_x_Ni),
            d_weight=pointer(d_weight_mi),
        )
    )
    return [d_x_Ni, d_weight_mi]


EXPAND_RANKS.implement(CPU, expand, expand_backward, casts=True)
