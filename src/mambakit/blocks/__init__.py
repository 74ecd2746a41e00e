"""Each of these files ends in the record of its family, which importing it makes known."""

from mambakit.blocks import mamba1, mamba2, mamba3

# isort: split
from mambakit.blocks import attention, mlp

__all__ = ["attention", "mamba1", "mamba2", "mamba3", "mlp"]
