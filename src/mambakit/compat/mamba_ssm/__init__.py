"""Stands in for the package `mamba_ssm`; the version is that of the interface it follows."""

from mambakit.compat.mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mambakit.compat.mamba_ssm.modules.mamba2 import Mamba2
from mambakit.compat.mamba_ssm.modules.mamba3 import Mamba3
from mambakit.compat.mamba_ssm.modules.mamba_simple import Mamba
from mambakit.compat.mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn

__version__ = "2.3.2.post1"
__all__ = ["Mamba", "Mamba2", "Mamba3", "MambaLMHeadModel", "mamba_inner_fn", "selective_scan_fn"]
