"""Each of these files ends in the record of its family, which importing it makes known."""

from mambakit.blocks import mamba1, mamba2, mamba3, mlp, moe, parallel

__all__ = ["mamba1", "mamba2", "mamba3", "mlp", "moe", "parallel"]
