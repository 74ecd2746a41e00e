"""Stands in for the package `causal_conv1d`; the version is that of the interface it follows."""

from mambakit.compat.causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update

__version__ = "1.6.1"
__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]
