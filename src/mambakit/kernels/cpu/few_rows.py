"""Products of a weight matrix with few rows, in four weight formats; csrc/weights.h says what their tensors hold."""

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.structs import Matrix, Matvec
from mambakit.ops.few_rows import FEW_ROWS, GROUP, NF4, Weights


def matrix(weights: Weights) -> Matrix:
    """Its addresses, good for as long as the tensors live where they are. ValueError for sizes that do not fit."""
    check_sizes(weights)
    return Matrix(
        format=weights.format,
        rows=weights.weight.shape[0],
        columns=weights.columns,
        group=weights.group,
        weight=pointer(weights.weight),
        scales=pointer(weights.scales),
        bias=pointer(weights.bias),
    )


def check_sizes(weights: Weights) -> None:
    (rows, stored), columns, group = weights.weight.shape, weights.columns, weights.group
    groups = -(-columns // group) if group else 1
    halves = weights.format == NF4
    if group % GROUP or halves != (group > 0) or stored != (groups * group // 2 if halves else columns):
        shape = tuple(weights.weight.shape)
        raise ValueError(f"weight of shape {shape} does not hold {columns} columns in groups of {group}")
    for name, tensor, count in (("scales", weights.scales, rows * groups), ("bias", weights.bias, rows)):
        if tensor is not None and tensor.numel() != count:
            raise ValueError(f"{name} has {tensor.numel()} elements, expected {count}")


def multiply(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, format: int, group: int
) -> list[Tensor]:
    """`x @ weight.T + bias`; what is not contiguous is copied first."""
    columns = x.shape[-1] if format == NF4 else weight.shape[1]
    if x.dtype != torch.float32 or x.shape[-1] != columns:
        raise ValueError(f"x is {x.dtype} and {x.shape[-1]} wide, expected float32 and {columns}")
    tensors = [t if t is None else t.contiguous() for t in (weight, scales, bias)]
    stored = matrix(Weights(format, columns, *tensors, group))  # type: ignore[arg-type]
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], stored.rows)
    run(Matvec(matrix=stored, batch=y.numel() // max(1, stored.rows), x=pointer(x), y=pointer(y)))
    return [y]


FEW_ROWS.implement(CPU, multiply)
