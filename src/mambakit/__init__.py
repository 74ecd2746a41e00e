"""mambakit: Mamba-1, Mamba-2 and Mamba-3 state-space models for PyTorch, on any device."""

from mambakit.ops.ssd import ssd
from mambakit.ops.ssd_inputs import Mamba2SsdInput, Mamba3DoubleSsdInput, Mamba3SingleSsdInput
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.trapezoid import trapezoid

Mamba2SsdPath = SsdPath
Mamba3SsdPath = SsdPath

__version__ = "0.1.0"

__all__ = [
    "Mamba2SsdInput",
    "Mamba2SsdPath",
    "Mamba3DoubleSsdInput",
    "Mamba3SingleSsdInput",
    "Mamba3SsdPath",
    "SsdPath",
    "ssd",
    "trapezoid",
]
