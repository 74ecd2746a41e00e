"""Run code written for `mamba_ssm` and `causal_conv1d` on mambakit; see docs/compat.md."""

from mambakit.compat.finder import install, uninstall

__all__ = ["install", "uninstall"]
