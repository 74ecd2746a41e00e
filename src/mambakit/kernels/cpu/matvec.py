"""Products of a weight matrix with the few rows of a decoding step, in four weight formats, as torch operators.

For decoding: float32 rows on the CPU, and no gradients. csrc/weights.h says what the tensors of a format hold.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from mambakit.kernels.cpu.library import kernel, pointer

LIBRARY = torch.library.Library("mambakit", "FRAGMENT")
FLOAT32, BFLOAT16, INT8, NF4 = range(4)
MAX_ROWS = 16
"""Rows of x up to which the weights' bytes and not the products take the time."""
GROUP = 32
"""Groups of NF4 are multiples of this."""


class Matrix(ctypes.Structure):
    """`Matrix` of csrc/weights.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("format", "rows", "columns", "group")),
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "bias")),
    ]


class Weights(NamedTuple):
    """A projection as it is stored."""

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
    """`x @ weight.T + bias`; what is not contiguous is copied first."""
    if x.dtype != torch.float32 or x.shape[-1] != weights.columns:
        raise ValueError(f"x is {x.dtype} and {x.shape[-1]} wide, expected float32 and {weights.columns}")
    tensors = (t if t is None else t.contiguous() for t in (weights.weight, weights.scales, weights.bias))
    weights = Weights(weights.format, weights.columns, *tensors, weights.group)  # type: ignore[arg-type]
    x, matrix = x.contiguous(), weights.matrix()
    y = x.new_empty(*x.shape[:-1], matrix.rows)
    kernel("matvec", "pppi")(ctypes.addressof(matrix), pointer(x), pointer(y), y.numel() // max(1, matrix.rows))
    return y


def matvec_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return multiply(x, Weights(FLOAT32, weight.shape[1], weight, None, bias))


def matvec_bfloat16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return multiply(x, Weights(BFLOAT16, weight.shape[1], weight, None, bias))


def matvec_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return multiply(x, Weights(INT8, weight.shape[1], weight, scales, bias))


def matvec_nf4(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    group = 2 * weight.shape[1] // scales.shape[1]
    return multiply(x, Weights(NF4, x.shape[-1], weight, scales, bias, group))


def fake(x: Tensor, weight: Tensor, *others: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


for function in (matvec_float32, matvec_bfloat16, matvec_int8, matvec_nf4):
    scales = "Tensor scales, " if "scales" in function.__annotations__ else ""
    LIBRARY.define(f"{function.__name__}(Tensor x, Tensor weight, {scales}Tensor? bias) -> Tensor")
    LIBRARY.impl(function.__name__, function, "CPU")
    torch.library.register_fake(f"mambakit::{function.__name__}", fake, lib=LIBRARY)
