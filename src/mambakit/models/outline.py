"""A model without memory: its names, shapes and types, and nothing drawn."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mambakit.models.language_model import LanguageModel, ModelConfig

DRAWING = {"uniform_", "normal_", "kaiming_uniform_", "trunc_normal_", "zeros_", "ones_", "constant_"}
DRAWING |= {"fill_", "zero_", "copy_", "log_", "exp_", "__itruediv__", "div_"}
"""What initialises parameters, by the names that torch gives it."""


def outline(config: ModelConfig, dtype: torch.dtype | None = None) -> LanguageModel:
    """On the meta device. For its numbers alone, which nobody reads, torch would load 150 MB of shape reasoning."""
    with _NothingDrawn():
        return LanguageModel(config, device="meta", dtype=dtype)


class _NothingDrawn(TorchFunctionMode):
    """Tensors without memory stay as they are."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if isinstance(target, Tensor) and target.is_meta and getattr(func, "__name__", "") in DRAWING:
            return target
        return func(*args, **kwargs)
