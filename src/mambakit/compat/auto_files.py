"""transformers' ways to name what to load and where to save, turned into calls of `load_model` and `save_model`."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from mambakit.checkpoints import save_model
from mambakit.checkpoints.files import CONFIG
from mambakit.checkpoints.writing import OURS
from mambakit.models.language_model import LanguageModel

GENERATION = "generation_config.json"
OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision")
WITHOUT_EFFECT = ("_from_auto", "_from_pipeline", "trust_remote_code", "weights_only", "use_safetensors")
"""transformers hands these to models of all kinds. Nothing in our files is run, whatever they say."""


def find(name: str | os.PathLike[str], options: dict[str, Any]) -> Path:
    """The directory, or a copy of what the hub has. Takes the hub's options out of `options`; others raise."""
    hub = {option: options.pop(option) for option in OF_THE_HUB if option in options}
    if (options.pop("adapter_kwargs", None) or {}).get("_adapter_model_path"):
        raise ValueError(f"{name} holds an adapter: load its base model, then peft.PeftModel.from_pretrained")
    unknown = [option for option, value in options.items() if value is not None and option not in WITHOUT_EFFECT]
    if unknown:
        raise ValueError(f"a mambakit model has no use for {', '.join(sorted(unknown))}")
    if Path(name).is_dir():
        return Path(name)
    patterns = [CONFIG, GENERATION, "model*.safetensors", "model.safetensors.index.json"]
    return Path(snapshot_download(str(name), allow_patterns=patterns, **hub))


def read_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """None is that of the file, which transformers calls "auto"."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if dtype != "auto" and not isinstance(found, torch.dtype):
        raise ValueError(f'dtype = {dtype!r} is neither "auto" nor a dtype of torch')
    return found if isinstance(found, torch.dtype) else None


def one_device(device_map: Any) -> Any:
    """The device of a model that is in one piece."""
    if isinstance(device_map, dict) and device_map.keys() == {""}:
        device_map = device_map[""]
    if isinstance(device_map, dict) or device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        raise ValueError(f"device_map = {device_map!r}: a mambakit model is on one device; name it")
    return device_map


def write_among_others(model: LanguageModel, directory: Path, max_shard_bytes: int | None) -> None:
    """`save_model` into a directory that may hold other things, as those of `Trainer` do.

    The config is replaced last. Unlike a directory of `save_model`, this one is not replaced as a whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".saving-") as fresh:
        save_model(model, Path(fresh), max_shard_bytes=max_shard_bytes)
        written = sorted(Path(fresh).iterdir(), key=lambda path: path.name == CONFIG)
        names = {path.name for path in written}
        stale = [path for path in directory.iterdir() if OURS.fullmatch(path.name) and path.name not in names]
        for path in written:
            os.replace(path, directory / path.name)
        for path in stale:
            path.unlink()
