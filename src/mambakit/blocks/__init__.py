"""Each of these files ends in the record of its family, which importing it makes known, the Mambas first."""

from mambakit.blocks import mamba1, mamba2, mamba3

# isort: split
from mambakit.blocks import attention, mlp, moe, parallel

__all__ = ["attention", "mamba1", "mamba2", "mamba3", "mlp", "moe", "parallel"]
