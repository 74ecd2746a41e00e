"""A modified copy of a package, as repositories of vision models bring one along."""

from mamba_ssm.modules.mamba_simple import Mamba

__all__ = ["Mamba"]
