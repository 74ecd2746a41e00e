"""Products of a weight matrix with the few rows of a decoding step, for every way in which weights are stored.

They run at the speed of reading the weights, on the CPU, without gradients. `applies` says where.
"""

import torch
from torch import Tensor

from mambakit.kernels.cpu import matvec as kernels
from mambakit.kernels.cpu.matvec import BFLOAT16, FLOAT32, GROUP, INT8, MAX_ROWS, NF4, Weights
from mambakit.ops.backends import use_kernels

__all__ = ["BFLOAT16", "FLOAT32", "GROUP", "INT8", "MAX_ROWS", "NF4", "Weights", "applies", "multiply"]

# What the tensors of a format have to be, lest a model moved to another dtype be misread.
DTYPES = {
    FLOAT32: (torch.float32, None),
    BFLOAT16: (torch.bfloat16, None),
    INT8: (torch.int8, torch.float32),
    NF4: (torch.uint8, torch.bfloat16),
}


def applies(x: Tensor, weights: Weights) -> bool:
    """Whether the kernels can multiply these, and are the faster way."""
    if torch.is_grad_enabled() or not 0 < x.numel() <= MAX_ROWS * weights.columns:
        return False
    if type(x) is not Tensor:
        return False
    return is_stored_well(weights) and not torch.is_autocast_enabled("cpu") and use_kernels("auto", x, weights.weight)


def is_stored_well(weights: Weights) -> bool:
    """Whether the kernels can read the tensors as they are."""
    scales = None if weights.scales is None else weights.scales.dtype
    tensors = (weights.weight, weights.scales, weights.bias)
    return (
        (weights.weight.dtype, scales) == DTYPES[weights.format]
        and (weights.bias is None or weights.bias.dtype.is_floating_point)
        and weights.group % GROUP == 0
        and all(t is None or is_plain(t) for t in tensors)
    )


def is_plain(tensor: Tensor) -> bool:
    """Contiguous numbers in the CPU's memory, and no subclass with ideas of its own."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_contiguous() and tensor.device.type == "cpu"


def multiply(x: Tensor, weights: Weights) -> Tensor:
    """`x @ weight.T + bias` in float32, returned in the dtype of `x`."""
    bias = None if weights.bias is None else weights.bias.float()
    tensors = (weights.weight,) if weights.scales is None else (weights.weight, weights.scales)
    return OPERATORS[weights.format](x.float(), *tensors, bias).to(x.dtype)


OPERATORS = {
    FLOAT32: torch.ops.mambakit.matvec_float32.default,
    BFLOAT16: torch.ops.mambakit.matvec_bfloat16.default,
    INT8: torch.ops.mambakit.matvec_int8.default,
    NF4: torch.ops.mambakit.matvec_nf4.default,
}
assert kernels.LIBRARY is not None  # the import above defines the operators
