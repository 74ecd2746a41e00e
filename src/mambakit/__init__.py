"""mambakit: Mamba-1, Mamba-2 and Mamba-3 state-space models for PyTorch, on any device."""

from mambakit import caches
from mambakit.blocks.mamba1 import Mamba1, Mamba1Cache, Mamba1Config
from mambakit.blocks.mamba2 import Mamba2, Mamba2Cache, Mamba2Config
from mambakit.blocks.mamba3 import Mamba3, Mamba3Cache, Mamba3Config
from mambakit.ops.causal_conv import causal_conv
from mambakit.ops.selective_scan import selective_scan
from mambakit.ops.ssd import ssd
from mambakit.ops.ssd_inputs import Mamba2SsdInput, Mamba3DoubleSsdInput, Mamba3SingleSsdInput
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.trapezoid import trapezoid

Mamba2SsdPath = SsdPath
Mamba3SsdPath = SsdPath

__version__ = "0.1.0"

__all__ = [
    "Mamba1",
    "Mamba1Cache",
    "Mamba1Config",
    "Mamba2",
    "Mamba2Cache",
    "Mamba2Config",
    "Mamba2SsdInput",
    "Mamba2SsdPath",
    "Mamba3",
    "Mamba3Cache",
    "Mamba3Config",
    "Mamba3DoubleSsdInput",
    "Mamba3SingleSsdInput",
    "Mamba3SsdPath",
    "SsdPath",
    "caches",
    "causal_conv",
    "selective_scan",
    "ssd",
    "trapezoid",
]
