"""Products of a weight matrix with rows, in every weight format; csrc/weights.h says what their tensors hold."""

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.structs import Matrix, Matvec
from mambakit.ops.few_rows import FEW_ROWS, GROUP, INT4_NARROW, MAX_COLUMNS, NARROW, NF4, Weights


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
    groups = -(-columns // group) if group > 0 else 1
    halves = weights.format in (NF4, INT4_NARROW)
    wide = groups * group // 2 if halves else columns
    if weights.format == INT4_NARROW:
        wide, groups = -(-columns // 64) * 34, 1
    if group % GROUP or halves != (group > 0) or (weights.format == INT4_NARROW and group != GROUP) or stored != wide:
        shape = tuple(weights.weight.shape)
        raise ValueError(f"weight of shape {shape} does not hold {columns} columns in groups of {group}")
    if weights.format in NARROW and columns > MAX_COLUMNS:
        raise ValueError(f"weight has {columns} columns, expected at most {MAX_COLUMNS} in format {weights.format}")
    for name, tensor, count in (("scales", weights.scales, rows * groups), ("bias", weights.bias, rows)):
        if tensor is not None and tensor.numel() != count:
            raise ValueError(f"{name} has {tensor.numel()} elements, expected {count}")


def multiply(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, format: int, group: int
) -> list[Tensor]:
    """`x @ weight.T + bias`; what is not contiguous is copied first."""
    columns = x.shape[-1] if format in (NF4, INT4_NARROW) else weight.shape[1]
    if x.dtype != torch.float32 or x.shape[-1] != columns:
        raise ValueError(f"x is {x.dtype} and {x.shape[-1]} wide, expected float32 and {columns}")
    tensors = [t if t is None else t.contiguous() for t in (weight, scales, bias)]
    stored = matrix(Weights(format, columns, *tensors, group))  # type: ignore[arg-type]
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], stored.rows)
    run(Matvec(matrix=stored, batch=y.numel() // max(1, stored.rows), x=pointer(x), y=pointer(y)))
    return [y]


FEW_ROWS.implement(CPU, multiply)
