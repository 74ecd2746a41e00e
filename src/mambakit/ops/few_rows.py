"""The product of a weight matrix with the rows of a decoding step or of a prompt, for every way to store weights.

Kernels run it at the speed of reading the weights, without gradients. Its plain form is whatever a module does when no
kernel takes the call. In the narrow formats the rows are rounded too, and multiplied as they are: bfloat16 with sums in
float32, integers of 8 bits with exact sums. They take any number of rows, the others the few of a step, or in float32
up to `MORE_ROWS` where the backend is faster with so many.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mambakit.ops.backends import PLAIN_TENSORS
from mambakit.ops.operation import TorchOperation

FLOAT32, BFLOAT16, INT8, NF4, BFLOAT16_NARROW, INT8_NARROW, INT4_NARROW = range(7)
NARROW = (BFLOAT16_NARROW, INT8_NARROW, INT4_NARROW)
MAX_ROWS = 16
"""Rows of x up to which the weights' bytes and not the products take the time, where both are float32."""
MORE_ROWS = 128
"""And those up to which a kernel may still be faster than torch's product, where both are float32."""
GROUP = 32
"""Groups of NF4 are multiples of this, those of INT4_NARROW are it."""
MAX_COLUMNS = 1 << 17
"""Of integers: their sums fit into 32 bits."""
# What the tensors of a format have to be, lest a model moved to another dtype be misread.
DTYPES = {
    FLOAT32: (torch.float32, None),
    BFLOAT16: (torch.bfloat16, None),
    INT8: (torch.int8, torch.float32),
    NF4: (torch.uint8, torch.bfloat16),
    BFLOAT16_NARROW: (torch.bfloat16, None),
    INT8_NARROW: (torch.int8, torch.float32),
    INT4_NARROW: (torch.uint8, torch.float32),
}
FEW_ROWS = TorchOperation(
    "few_rows",
    "Tensor x, Tensor weight, Tensor? scales, Tensor? bias, int format, int group",
    lambda x, weight, *_: [(x, (*x.shape[:-1], weight.shape[0]))],
    check=lambda *inputs: check_stored(*inputs),
)
"""`x @ weight.T + bias`, returned in float32."""


class Weights(NamedTuple):
    """A projection as it is stored."""

    format: int
    columns: int
    weight: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None
    group: int = 0


def most_rows(dtype: torch.dtype) -> int:
    """Rows of x up to which kernels are asked for a product with a weight that is not rounded."""
    return MORE_ROWS if dtype == torch.float32 else MAX_ROWS


def plain_format(weight: Tensor) -> int:
    """Of a parameter, that of a half-precision model meeting rows of its dtype."""
    return BFLOAT16_NARROW if weight.dtype == torch.bfloat16 else FLOAT32


def check_stored(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, format: int, group: int
) -> None:
    """Axes and dtypes as the format has them; sizes are for kernels to compare."""
    if format not in DTYPES:
        raise ValueError(f"format is {format}, expected one of {', '.join(map(str, DTYPES))}")
    if x.dim() < 1 or weight.dim() != 2:
        raise ValueError(f"x needs an axis and weight 2, got shapes {tuple(x.shape)} and {tuple(weight.shape)}")
    named = dict(zip(("weight", "scales"), zip((weight, scales), DTYPES[format], strict=True), strict=True))
    for name, (tensor, dtype) in {"x": (x, torch.float32), **named, "bias": (bias, torch.float32)}.items():
        given = None if tensor is None else tensor.dtype
        if given != dtype and (name, tensor) != ("bias", None):
            raise ValueError(f"{name} is {given}, expected {dtype} in format {format}")


def multiply(x: Tensor, weights: Weights) -> Tensor | None:
    """`x @ weight.T + bias` by a kernel, in the dtype of `x`; None where none takes it."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not x.numel() or not is_stored_well(weights):
        return None
    if weights.format not in NARROW and x.numel() > most_rows(weights.weight.dtype) * weights.columns:
        return None
    kernel = FEW_ROWS.offer(x, weights.weight, weights.scales, weights.bias)
    if kernel is None:
        return None
    bias = None if weights.bias is None else weights.bias.float()
    (y,) = kernel(x.float(), weights.weight, weights.scales, bias, weights.format, weights.group)
    return y.to(x.dtype)


def is_stored_well(weights: Weights) -> bool:
    """Whether kernels can read the tensors as they are."""
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
    return type(tensor) in PLAIN_TENSORS and tensor.is_contiguous() and tensor.device.type == "cpu"
