"""Rows that are multiplied by one of several matrices each: what the experts of a mixture compute."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.ops import few_rows
from mambakit.ops.backends import TORCH
from mambakit.ops.operation import TorchOperation
from mambakit.ops.shapes import bind, has_numbers, is_autocast

GROUPED_PRODUCT = TorchOperation(
    "grouped_product",
    "Tensor x_ni, Tensor weight_eoi, Tensor counts_e",
    lambda x_ni, weight_eoi, _: [(x_ni, (x_ni.shape[0], weight_eoi.shape[1]))],
    check=lambda x_ni, weight_eoi, counts_e: bind({"x_ni": x_ni, "weight_eoi": weight_eoi, "counts_e": counts_e}),
    floats=2,
    twin=lambda *inputs: [multiply(*inputs)],
)


def grouped_product(x_ni: Tensor, weight_eoi: Tensor, counts_e: Tensor) -> Tensor:
    """`weight[e] x` for every row `x`: the first `counts[0]` rows are matrix 0's, the next matrix 1's, and so on.

    Matrices without rows are not read. The operator hides from compilers and exporters that sizes depend on data.
    """
    if is_autocast(x_ni.device):
        dtype = torch.get_autocast_dtype(x_ni.device.type)
        x_ni, weight_eoi = x_ni.to(dtype), weight_eoi.to(dtype)
    if torch.is_grad_enabled() or not has_numbers(counts_e):
        return GROUPED_PRODUCT.run_plainly(x_ni, weight_eoi, counts_e)[0]
    return multiply(x_ni, weight_eoi, counts_e)


def multiply(x_ni: Tensor, weight_eoi: Tensor, counts_e: Tensor) -> Tensor:
    sizes = used_of(counts_e)
    if not sizes:
        return x_ni.new_empty(0, weight_eoi.shape[1])
    # Where gradients flow, all matrices are taken at once: their gradients then are put together only once.
    weights = weight_eoi.unbind() if torch.is_grad_enabled() else weight_eoi
    parts = x_ni.split([count for _, count in sizes])
    return torch.cat([product(part_ni, weights[e]) for part_ni, (e, _) in zip(parts, sizes, strict=True)])


def product(x_ni: Tensor, weight_oi: Tensor) -> Tensor:
    """By the decoding kernels for a few rows, where they apply."""
    y_no = None
    if x_ni.dtype == weight_oi.dtype:
        y_no = few_rows.multiply(x_ni, few_rows.Weights(few_rows.FLOAT32, weight_oi.shape[1], weight_oi))
    return F.linear(x_ni, weight_oi) if y_no is None else y_no


def multiply_backward(
    grads: Sequence[Tensor], x_ni: Tensor, weight_eoi: Tensor, counts_e: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    (d_y_no,) = grads
    d_x_ni = multiply(d_y_no, weight_eoi.mT, counts_e) if needs[0] else None
    if not needs[1]:
        return d_x_ni, None
    d_weight_eoi, start = torch.zeros_like(weight_eoi), 0
    for e, count in used_of(counts_e):
        rows = slice(start, start + count)
        torch.mm(d_y_no[rows].T, x_ni[rows], out=d_weight_eoi[e])
        start += count
    return d_x_ni, d_weight_eoi


def used_of(counts_e: Tensor) -> list[tuple[int, int]]:
    """The matrices that have rows, and how many."""
    return [(e, count) for e, count in enumerate(counts_e.tolist()) if count]


GROUPED_PRODUCT.implement(TORCH, lambda *inputs: [multiply(*inputs)], multiply_backward)
