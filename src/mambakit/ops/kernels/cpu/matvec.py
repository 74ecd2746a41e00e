"""Products of a weight matrix with the few rows of a decoding step, in four weight formats, as torch operators.

Without gradients: they are for decoding. `fits` says which inputs the kernels are for.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from mambakit.ops.kernels.cpu.library import kernel, pointer

MAX_ROWS = 16
"""Beyond this many rows of x, torch's products are faster than reading the weights."""
GROUP = 32
"""Groups of NF4 are multiples of this."""


class Matrix(ctypes.Structure):
    """`Matrix` of csrc/weights.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("format", "rows", "columns", "group")),
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "bias")),
    ]


FLOAT32, BFLOAT16, INT8, NF4 = range(4)


class Weights(NamedTuple):
    """A projection as it is stored; `csrc/weights.h` says what the tensors hold."""

    format: int
    columns: int
    weight: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None
    group: int = 0

    def matrix(self) -> Matrix:
        """Its addresses, good for as long as the tensors live where they are."""
        tensors = (pointer(t) for t in (self.weight, self.scales, self.bias))
        return Matrix(self.format, self.weight.shape[0], self.columns, self.group, *tensors)


def multiply(x: Tensor, weights: Weights) -> Tensor:
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"x is {x.dtype} on {x.device}, expected float32 on the CPU")
    if x.shape[-1] != weights.columns:
        raise ValueError(f"x is {x.shape[-1]} wide, but the weight has {weights.columns} columns")
    x, matrix = x.contiguous(), weights.matrix()
    y = x.new_empty(*x.shape[:-1], matrix.rows)
    kernel("matvec", "pppi")(ctypes.addressof(matrix), pointer(x), pointer(y), x.numel() // max(1, matrix.columns))
    return y
