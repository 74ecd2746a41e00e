"""Writing a checkpoint so that its directory holds the old one or the new one, whole, whatever happens in between."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mambakit.checkpoints.files import INDEX
from mambakit.ops.shapes import check_numbers

OURS = re.compile(r"config\.json|(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
"""Files that belong to a checkpoint, and so are not kept from the one before."""


@contextmanager
def replacing(directory: Path, is_checkpoint: Callable[[Path], bool], ours: re.Pattern[str] = OURS) -> Iterator[Path]:
    """An empty directory to write to, which takes the place of `directory` when all went well.

    A `directory` with a checkpoint is replaced, which is files with names like `ours`; what else is in it, such as a
    tokenizer, is kept. One that is neither that nor empty raises ValueError.
    """
    directory = Path(os.path.realpath(directory))
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; give a directory to save to")
    if directory.exists() and any(directory.iterdir()) and not is_checkpoint(directory):
        raise ValueError(f"{directory} is not empty and holds no checkpoint; save to a new or an empty directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = directory.with_name(f".{directory.name}.{uuid4().hex}.tmp")
    fresh.mkdir()
    try:
        yield fresh
        if directory.exists():
            _keep_others(directory, fresh, ours)
        sync(fresh)
        _swap(fresh, directory)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    sync(path)


def write_tensors(directory: Path, tensors: dict[str, Tensor], name: str, max_bytes: int | None) -> None:
    """To the file `name`, or to several of at most `max_bytes` with an index; a tensor is never divided."""
    for key, tensor in tensors.items():
        check_numbers(key, tensor)
    parts = _divide(tensors, max_bytes)
    if len(parts) == 1:
        _write_file(directory / name, tensors)
        return
    stem, suffix = os.path.splitext(name)
    names = [f"{stem}-{i + 1:05}-of-{len(parts):05}{suffix}" for i in range(len(parts))]
    for part, file in zip(parts, names, strict=True):
        _write_file(directory / file, {key: tensors[key] for key in part})
    places = {key: file for part, file in zip(parts, names, strict=True) for key in part}
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(directory / (name + INDEX), {"metadata": {"total_size": total}, "weight_map": places})


def _divide(tensors: dict[str, Tensor], max_bytes: int | None) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and max_bytes is not None and size + tensor.nbytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    return parts


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    if path.suffix == ".safetensors":
        try:
            # transformers asks for this mark.
            save_file(plain, path, metadata={"format": "pt"})
        except SafetensorError as error:  # what the disk said
            raise OSError(f"{path}: {error}") from error
    else:
        write_pickle(plain, path)
    sync(path)


def write_pickle(values: dict[str, Any], path: Path) -> None:
    """By torch.save, for its weights-only loader. OSError as when the disk is full."""
    with open(path, "wb") as file:
        try:
            torch.save(values, file)
        except RuntimeError as error:
            # torch's writer hides what the file said, and that somebody pressed Ctrl-C.
            if isinstance(error.__context__, OSError | KeyboardInterrupt):
                raise error.__context__ from None
            raise


def _plain(tensor: Tensor) -> Tensor:
    """On the CPU, in order, and with no more memory than its own, which torch.save would store along."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _swap(fresh: Path, directory: Path) -> None:
    if not directory.exists():
        os.rename(fresh, directory)
    else:
        # Two renames: between them the old checkpoint is beside its place, but whole.
        old = fresh.with_suffix(".old")
        os.rename(directory, old)
        try:
            os.rename(fresh, directory)
        except BaseException:
            os.rename(old, directory)
            raise
        shutil.rmtree(old, ignore_errors=True)
    sync(directory.parent)


def _keep_others(old: Path, fresh: Path, ours: re.Pattern[str]) -> None:
    def replaced(where: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(where) == old and ours.fullmatch(name)]

    shutil.copytree(old, fresh, ignore=replaced, copy_function=_link, symlinks=True, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    """The same file under a second name, so that who has it open can go on; a copy where that is not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def sync(path: Path) -> None:
    """A file's contents, or a directory's names, are on the disk when it returns."""
    if path.is_dir() and os.name == "nt":
        return  # directories cannot be opened there
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
