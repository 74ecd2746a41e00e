"""Adapters on disk: a small folder in the format of the peft package, beside the model or far from it."""

import math
import os
import re
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mambakit.arguments import check_kind, find_path, shown
from mambakit.checkpoints.files import ADAPTER_CONFIG as CONFIG
from mambakit.checkpoints.files import CONFIG as MODEL_CONFIG
from mambakit.checkpoints.files import DTYPES, find_directory, read_json
from mambakit.checkpoints.writing import replacing, write_json, write_tensors
from mambakit.models.lora import adapters, wrap

Model = TypeVar("Model", bound=nn.Module)

WEIGHTS = "adapter_model.safetensors"
MAX_ADAPTERS = 8
"""On the way from an adapter to the model."""
PREFIX = "base_model.model."
"""peft's names of tensors begin with how it wraps a model."""
OURS = re.compile(r"adapter_(config\.json|model\.(safetensors|bin))")
PLAIN = {"use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "bias": "none", "lora_bias": False}
"""Fields that change what is computed, with the only value that is read; others of that kind have to be empty."""
EMPTY = ("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters", "trainable_token_indices")


def save_lora(model: nn.Module, directory: str | os.PathLike[str], *, base: str | os.PathLike[str] = "") -> None:
    """Write the model's adapters, and nothing else of it, for `load_lora` or peft to read.

    `base` says where the model itself is to be found: with it, `load_model(directory)` gives the merged model.

        mk.save_lora(model, "adapter", base="run/model")

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=257))
        >>> mk.save_lora(mk.add_lora(model, rank=4), "adapter")
    """
    found = dict(adapters(model))
    if not found:
        raise ValueError("the model has no adapters to save; add_lora(model, rank) makes them")
    (rank, alpha), *others = {(adapter.rank, adapter.alpha) for adapter in found.values()}
    if others:
        raise ValueError("the adapters have several ranks, and the file names one")
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(find_path("base", base)) if base != "" else "",
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({path.rpartition(".")[2] for path in found}),
        "inference_mode": True,
        **PLAIN,
    }
    with replacing(find_path("directory", directory), is_adapter, OURS) as fresh:
        write_tensors(fresh, {PREFIX + name: tensor for name, tensor in _tensors(model).items()}, WEIGHTS, None)
        write_json(fresh / CONFIG, values)


def load_lora(model: Model, directory: str | os.PathLike[str]) -> Model:
    """Put the adapters of a folder on the model they were made for; changes the model itself and returns it.

    model = mk.load_lora(mk.load_model("base"), "run/adapter")
    merged = mk.merge_lora(model)

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=257))
        >>> mk.save_lora(mk.add_lora(model, rank=4), "adapter")
        >>> again = mk.load_lora(mk.LanguageModel(model.config), "adapter")
    """
    place = find_path("directory", directory)
    check_kind("model", model, nn.Module, "a model")
    values = _read_config(place)
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in _read_tensors(place / WEIGHTS).items()}
    paths = list(dict.fromkeys(re.sub(r"\.lora_[AB]\.weight$", "", name) for name in stored))
    known: dict[str, Any] = {path: module for path, module in model.named_modules() if hasattr(module, "in_features")}
    strange = [path for path in paths if path not in known]
    if strange or not paths:
        raise ValueError(
            f"the adapter in {place} is for another model, which has {', '.join(strange[:5]) or 'nothing'}"
        )
    # Compared before anything is made: a rank is only a number, and the model stays as it is.
    shapes = {f"{path}.lora_A.weight": (values["r"], known[path].in_features) for path in paths}
    shapes |= {f"{path}.lora_B.weight": (known[path].out_features, values["r"]) for path in paths}
    wrong = [
        f"{name} {_told(stored.get(name))} for {_told(shapes.get(name))}"
        for name in sorted(stored.keys() | shapes.keys())
        if name not in stored or stored[name].dtype not in DTYPES or tuple(stored[name].shape) != shapes.get(name)
    ]
    if wrong:
        raise ValueError(f"the adapter in {place} does not fit the model: {', '.join(wrong[:5])}")
    wrap(model, paths, values["r"], values["lora_alpha"])
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            tensor.copy_(stored[name])
    return model


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def is_alone(directory: Path) -> bool:
    """Whether there is an adapter and no model."""
    return is_adapter(directory) and not (directory / MODEL_CONFIG).is_file()


def base_of(directory: Path) -> str:
    """Where the model is that an adapter belongs to, or another adapter that in the end belongs to one."""
    first, place = _named_base(directory), directory
    for _ in range(MAX_ADAPTERS):
        base = _named_base(place)
        if not Path(base).is_dir() or not is_alone(place := find_directory(base)):
            return first
    raise ValueError(f"the adapter in {directory} belongs to itself, or to more than {MAX_ADAPTERS} others")


def _named_base(directory: Path) -> str:
    base = _read_config(directory).get("base_model_name_or_path")
    if not isinstance(base, str) or not base or "\0" in base:
        raise ValueError(
            f"{directory / CONFIG} does not name its model; load_lora(load_model(...), {str(directory)!r})"
        )
    return base


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{path}.{name}.weight": getattr(adapter, name).weight
        for path, adapter in adapters(model)
        for name in ("lora_A", "lora_B")
    }


def _told(given: Tensor | tuple[int, ...] | None) -> str:
    if given is None:
        return "nothing"
    kind = f" of {given.dtype}" if isinstance(given, Tensor) and given.dtype not in DTYPES else ""
    return "x".join(map(str, given.shape if isinstance(given, Tensor) else given)) + kind


def _read_config(directory: Path) -> dict[str, Any]:
    values, path = read_json(directory / CONFIG), directory / CONFIG
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if values.get("peft_type") != "LORA":
        raise ValueError(f"{path} has peft_type = {shown(values.get('peft_type'))}, and only LORA is read")
    fits = type(rank) is int and rank > 0 and isinstance(alpha, int | float) and 0 < alpha < math.inf
    if not fits or isinstance(alpha, bool):
        raise ValueError(f"{path} has r = {shown(rank)} and lora_alpha = {shown(alpha)}, expected positive numbers")
    odd = [name for name, value in PLAIN.items() if values.get(name, value) != value]
    odd += [name for name in EMPTY if values.get(name)]
    if odd:
        raise ValueError(f"{path} sets {', '.join(odd)}, which is not read here; merge the adapter with peft")
    return values


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"there is no {path.name} in {path.parent}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    except Exception as error:  # SafetensorError, and what torch raises for types it does not have
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
