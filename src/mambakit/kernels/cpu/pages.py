"""Memory in large pages: fresh for large results, and that of weights which are read again and again."""

import torch
from torch import Tensor

from mambakit.kernels.cpu.library import run
from mambakit.kernels.cpu.structs import LargePages

# Below it memory mostly comes from what was freed before.
LARGE = 4 << 20
# Below it weights are read too fast to be worth a call of the system.
GATHERED = 1 << 17
# And below it states that move are small: moving their pages takes as long as many tokens.
MOVED = 1 << 20


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`torch.empty` on the CPU, in large pages where the system has them."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= LARGE:
        run(LargePages(start=tensor.data_ptr(), bytes=tensor.nbytes))
    return tensor


def gather(tensor: Tensor, least: int = GATHERED) -> None:
    """What it holds in large pages from now on, where the system moves it there; it stays at its address."""
    if tensor.nbytes >= least:
        run(LargePages(start=tensor.data_ptr(), bytes=tensor.nbytes, touched=True))
