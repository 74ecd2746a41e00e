"""Run code written for `mamba_ssm` and `causal_conv1d` on mambakit; see docs/compat.md."""

from mambakit.compat.finder import install, uninstall
from mambakit.compat.on_cpu import cuda_on_cpu

__all__ = ["cuda_on_cpu", "install", "uninstall"]
