"""Fresh memory for large results."""

import torch
from torch import Tensor

from mambakit.kernels.cpu.library import run
from mambakit.kernels.cpu.structs import LargePages

# Below it memory mostly comes from what was freed before.
LARGE = 4 << 20


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`torch.empty` on the CPU, in large pages where the system has them."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= LARGE:
        run(LargePages(start=tensor.data_ptr(), bytes=tensor.nbytes))
    return tensor
