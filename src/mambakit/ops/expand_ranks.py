"""One copy of a token per rank, each with its own weights: Mamba-3's values with several ranks."""

from torch import Tensor

from mambakit.kernels.cpu.ranks import expand_ranks_cpu
from mambakit.ops.backends import use_kernels
from mambakit.ops.shapes import bind, check_floats


def expand_ranks(x_bshp: Tensor, weight_hmp: Tensor, *, backend: str = "auto") -> Tensor:
    """`v_bsmhp`: `x weight[m]` for every rank, in the dtype of `x`."""
    size = bind(x_bshp=x_bshp, weight_hmp=weight_hmp)
    check_floats({"x_bshp": x_bshp}, {"weight_hmp": weight_hmp})
    weight_mhp = weight_hmp.transpose(0, 1)
    if not use_kernels(backend, x_bshp, weight_hmp):
        return (x_bshp[:, :, None] * weight_mhp).to(x_bshp.dtype)
    x_Ni, weight_mi = x_bshp.flatten(2).flatten(0, 1), weight_mhp.flatten(1)
    v_Nmi = expand_ranks_cpu(x_Ni.float(), weight_mi.float())
    return v_Nmi.view(size.b, size.s, size.m, size.h, size.p).to(x_bshp.dtype)
