"""GGUF, the files of llama.cpp: metadata and weights in one file, which its converter made of transformers' models."""

import os
from pathlib import Path

from torch import Tensor

from mambakit.checkpoints.fields import shown
from mambakit.checkpoints.files import CONFIG
from mambakit.checkpoints.formats import Read
from mambakit.checkpoints.gguf.container import read_header, stored
from mambakit.checkpoints.gguf.described import Described
from mambakit.checkpoints.gguf.hybrids import HYBRIDS
from mambakit.checkpoints.gguf.mamba import ARCHITECTURES
from mambakit.checkpoints.gguf.tensors import named
from mambakit.optional import need

SUFFIX = ".gguf"


def find(path_or_hub_name: str | os.PathLike[str]) -> Path | None:
    """The file that is named so, be it there or not, or the only one in a directory without another checkpoint."""
    path = Path(path_or_hub_name)
    if not path.is_dir():
        return path if path.suffix.lower() == SUFFIX else None
    if (path / CONFIG).exists():
        return None
    found = [one for one in path.iterdir() if one.suffix.lower() == SUFFIX]
    return found[0] if len(found) == 1 else None


def read(path: Path) -> tuple[Read, dict[str, Tensor]]:
    """The config and the weights, mapped from the file or, where quantized, as float32.

    ValueError names what is wrong with the file.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    gguf = need(f"reading {path}", "gguf")
    try:
        header = read_header(path)
        name = header.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in (*ARCHITECTURES, *HYBRIDS):
            known = ", ".join((*ARCHITECTURES, *HYBRIDS))
            raise ValueError(f"the architecture {shown(name)} is not supported, expected one of {known}")
        parts = header.metadata.get("split.count", 1)
        if parts != 1:
            raise ValueError(f"it is one of {shown(parts)} parts; join them with llama-gguf-split --merge")
        described = Described(name, header)
        if name in ARCHITECTURES:
            architecture = ARCHITECTURES[name]
            return Read(architecture.config(described)), named(stored(gguf, header), architecture.layout)
        hybrid = HYBRIDS[name](described)
        described.lint.close()
        return hybrid.read(), named(stored(gguf, header), hybrid.layout, hybrid.heads)
    except ValueError as error:
        raise ValueError(f"{path}, read as GGUF: {error}") from error
