"""Fresh memory for large results."""

import torch
from torch import Tensor

from mambakit.kernels.cpu.library import kernel

# Below it memory mostly comes from what was freed before.
LARGE = 4 << 20


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`torch.empty` on the CPU, in large pages where the system has them."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= LARGE:
        kernel("large_pages", "pi")(tensor.data_ptr(), tensor.nbytes)
    return tensor
