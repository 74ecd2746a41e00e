"""One copy of a token per rank, each with its own weights: Mamba-3's values with several ranks."""

from torch import Tensor

from mambakit.ops.operation import TorchOperation
from mambakit.ops.shapes import bind, check_floats

EXPAND_RANKS = TorchOperation(
    "expand_ranks",
    "Tensor x_Ni, Tensor weight_mi",
    lambda x_Ni, weight_mi: [(x_Ni, (x_Ni.shape[0], *weight_mi.shape))],
    check=lambda x_Ni, weight_mi: bind({"x_Ni": x_Ni, "weight_mi": weight_mi}),
    floats=2,
)


def expand_ranks(x_bshp: Tensor, weight_hmp: Tensor, *, backend: str = "auto") -> Tensor:
    """`v_bsmhp`: `x weight[m]` for every rank, in the dtype of `x`."""
    size = bind({"x_bshp": x_bshp, "weight_hmp": weight_hmp})
    check_floats({"x_bshp": x_bshp}, {"weight_hmp": weight_hmp})
    weight_mhp = weight_hmp.transpose(0, 1)
    kernel = EXPAND_RANKS.choose(backend, x_bshp, weight_hmp)
    if kernel is None:
        return (x_bshp[:, :, None] * weight_mhp).to(x_bshp.dtype)
    (v_Nmi,) = kernel(x_bshp.flatten(2).flatten(0, 1), weight_mhp.flatten(1))
    return v_Nmi.view(size.b, size.s, size.m, size.h, size.p).to(x_bshp.dtype)
