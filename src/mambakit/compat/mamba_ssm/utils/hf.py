"""A checkpoint's config and weights, from a directory or the hub."""

import os
from typing import Any

import torch
from torch import Tensor

from mambakit.checkpoints.files import CONFIG, find_directory, read_json, read_tensors

__all__ = ["load_config_hf", "load_state_dict_hf"]


def load_config_hf(model_name: str | os.PathLike[str]) -> dict[str, Any]:
    return read_json(find_directory(model_name) / CONFIG)


def load_state_dict_hf(
    model_name: str | os.PathLike[str], device: Any = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """All weights by name, on `device` and in `dtype` if given. Safetensors are read too, pickled code is refused."""
    tensors = read_tensors(find_directory(model_name))
    return {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
