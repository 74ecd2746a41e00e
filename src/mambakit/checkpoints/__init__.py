"""Models on disk: mambakit's own format, the official one, and that of transformers; see docs/checkpoints.md."""

from mambakit.checkpoints.models import load_model, save_model

__all__ = ["load_model", "save_model"]
