"""Finding and reading the files of a checkpoint. Nothing here runs what a file says."""

import json
import math
import os
import re
import reprlib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
MODEL, ADAPTER = "model", "adapter"
"""Where in its folder a training run keeps what it made."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In the order in which they are looked for; each may be in parts with an index."""
INDEX = ".index.json"
MAX_JSON_BYTES, MAX_DEPTH = 2**24, 32
MAX_TENSORS = 100_000
"""More than any model has, and few enough to be read in no time."""
MAPPINGS = 64
"""Of one file, at most twice as many."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PACKED = (*DTYPES, torch.int8, torch.uint8)
"""Of models with quantized weights."""


def find_directory(path_or_hub_name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """A directory that is there, or a copy of what the hub has under a name like `owner/model`, in some revision.

    In the folder of a training run it is that of the model, or of the adapter where no merged model was kept.
    """
    path = Path(path_or_hub_name)
    if path.is_dir():
        places = [(path, CONFIG), (path, ADAPTER_CONFIG), (path / MODEL, CONFIG), (path / ADAPTER, ADAPTER_CONFIG)]
        return next((place for place, name in places if (place / name).is_file()), path)
    if path.exists():
        raise ValueError(f"{path} is a file; give the directory that holds it and its {CONFIG}")
    name = str(path_or_hub_name)
    if not isinstance(path_or_hub_name, str) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ValueError(f"there is no directory {path}")
    return _download(name, revision)


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(
            f"there is no directory {name}; to get it from the hub, pip install huggingface_hub"
        ) from error
    directory = Path()
    version: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        for weights in WEIGHTS:
            stem, suffix = os.path.splitext(weights)
            # Descriptions too: how its text is written in tokens, and what its chats look like.
            patterns = ["*.json", "*.jinja", weights, f"{stem}-*{suffix}", "adapter_model.safetensors"]
            directory = Path(snapshot_download(name, allow_patterns=patterns, **version))
            if find_weights(directory):
                break
    except Exception as error:  # the hub's client raises its own and its transport's
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"there is no directory {name}, and the hub did not give it: {reason}") from error
    return directory


def find_weights(directory: Path) -> Path | None:
    """The file of weights, or the index of its parts."""
    candidates = [directory / (name + suffix) for name in WEIGHTS for suffix in ("", INDEX)]
    return next((path for path in candidates if path.is_file()), None)


def read_json(path: Path) -> dict[str, Any]:
    """An object of ordinary size and depth, with integers that could be sizes; anything else is a ValueError."""
    if not path.is_file():
        raise ValueError(f"there is no {path.name} in {path.parent}")
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{path} has {size:,} bytes, and descriptions of at most {MAX_JSON_BYTES:,} are read")
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        values = json.loads(content, object_hook=_tagged_float)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, expected an object")
    _check_tree(path, values)
    return values


def _check_tree(path: Path, values: dict[str, Any]) -> None:
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        beyond = next((item for item in level if isinstance(item, int) and not -(2**63) <= item < 2**63), None)
        if beyond is not None:
            raise ValueError(f"{path} has the number {reprlib.repr(beyond)}, which is no size of anything")
        inside = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inside for item in items]
        if not level:
            return
    raise ValueError(f"{path} is nested more than {MAX_DEPTH} levels deep")


def _tagged_float(values: dict[str, Any]) -> Any:
    """transformers 5 writes infinity as `{"__float__": "Infinity"}`, other versions as a bare `Infinity`."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def read_tensors(directory: Path, dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, Tensor]:
    """All weights by name, of these types. They stay in the files, mapped into memory, until they are copied."""
    path = find_weights(directory)
    if path is None:
        names = " or ".join(WEIGHTS)
        raise ValueError(f"there are no weights in {directory}: no {names}, nor an index of parts ({INDEX})")
    return _read_parts(path, dtypes) if path.name.endswith(INDEX) else _read_file(path, dtypes)


def _read_parts(index: Path, dtypes: Sequence[torch.dtype]) -> dict[str, Tensor]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(part, str) for part in places.values()):
        raise ValueError(f"{index} has no weight_map from names of tensors to names of files")
    parts = sorted(set(places.values()))
    outside = [part for part in parts if Path(part).name != part or not part.endswith((".safetensors", ".bin"))]
    if outside:
        raise ValueError(f"{index} names files that are not weights beside it: {', '.join(outside)}")
    absent = [part for part in parts if not _is_file(index.parent / part)]
    if absent:
        raise ValueError(f"{index} names files that are not there: {', '.join(absent)}")
    tensors: dict[str, Tensor] = {}
    wrong = []
    for part in parts:
        found = _read_file(index.parent / part, dtypes)
        listed = {name for name, place in places.items() if place == part}
        wrong += [f"{name} in {part}" for name in sorted(listed ^ found.keys())]
        tensors |= found
    if wrong:
        raise ValueError(f"{index} and its files disagree about {', '.join(wrong)}")
    return tensors


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name that a file could have
        return False


def _read_file(path: Path, dtypes: Sequence[torch.dtype]) -> dict[str, Tensor]:
    tensors = _read_safetensors(path) if path.suffix == ".safetensors" else _read_bin(path)
    if not isinstance(tensors, dict) or not all(
        isinstance(n, str) and isinstance(t, Tensor) for n, t in tensors.items()
    ):
        raise ValueError(f"{path} holds no plain mapping of names to tensors")
    odd = [
        f"{name} ({tensor.dtype}, {tensor.layout}, {tensor.device})"
        for name, tensor in tensors.items()
        if tensor.dtype not in dtypes or tensor.layout != torch.strided or not tensor.is_cpu
    ]
    if odd:
        raise ValueError(f"{path} holds tensors that are not plain floating-point ones: {', '.join(odd)}")
    # A view may repeat a few numbers without end. Twice: a tied head shares the embedding's.
    size, there = sum(tensor.nbytes for tensor in tensors.values()), path.stat().st_size
    if size > 2 * there:
        raise ValueError(f"{path} holds tensors of {size:,} bytes, but has only {there:,} itself")
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            sizes = [math.prod(file.get_slice(name).get_shape()) for name in names[: MAX_TENSORS + 1]]
        if len(names) <= MAX_TENSORS:
            tensors: dict[str, Tensor] = {}
            # Mapped anew for every few: the memory of those that were copied and dropped is free before the last is.
            for few in _in_few(names, sizes):
                with safe_open(path, framework="pt") as file:
                    tensors |= {name: file.get_tensor(name) for name in few}
            return tensors
    except Exception as error:  # SafetensorError, and what torch raises for types and shapes it does not have
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    raise ValueError(f"{path} holds {len(names)} tensors, and at most {MAX_TENSORS} are read")


def _in_few(names: list[str], sizes: list[int]) -> Iterator[list[str]]:
    """Those that are a good part of the whole alone, the others some at a time."""
    large = sum(sizes) // MAPPINGS
    small = [name for name, size in zip(names, sizes, strict=True) if size <= large]
    yield from ([name] for name, size in zip(names, sizes, strict=True) if size > large)
    few = max(1, -(-len(small) // MAPPINGS))
    yield from (small[start : start + few] for start in range(0, len(small), few))


def _read_bin(path: Path) -> Any:
    with open(path, "rb") as file:
        # Files from before torch 1.6 are no zip archives and cannot be mapped.
        can_be_mapped = zipfile.is_zipfile(file)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=can_be_mapped)
    except Exception as error:  # damaged pickles raise almost anything
        raise ValueError(
            f"{path} was refused: it is cut short, or holds more than tensors, which might run code. None of it was run"
        ) from error
