"""VMamba's extension whose output may stay in float32."""

from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.extensions.scan_kernels import run
from mambakit.compat.extensions.selective_scan_cuda_core import bwd

__all__ = ["bwd", "fwd"]


@of_tensors
def fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    nrows: int,
    out_float: bool,
) -> list[Tensor]:
    """`[out, x]`, `out` in at least float32 with `out_float`, else in the dtype of `u`."""
    y, x = run(u, delta, A, B, C, D, delta_bias, delta_softplus)
    return [y if out_float else y.to(u.dtype), x]
