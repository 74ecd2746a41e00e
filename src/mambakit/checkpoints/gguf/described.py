"""What a GGUF file says about its model, and all that is wrong with it at once."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mambakit.checkpoints.fields import Lint, shown
from mambakit.checkpoints.gguf.container import Header

NORM_EPS = "attention.layer_norm_rms_epsilon"
MAX_LAYERS = 10_000


class Described:
    """Metadata without the architecture's prefix, and the tensors there are."""

    def __init__(self, architecture: str, header: Header):
        self.architecture, self.tensors, self.lint = architecture, header.tensors, Lint()
        prefix = architecture + "."
        given = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
        self.values = {key: decimal(value) if isinstance(value, float) else value for key, value in given.items()}

    def fields(self, kind: type, names: Mapping[str, str], optional: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Fields of a config, each under the name that it has here; those that are missing or wrong are noted."""
        missing = sorted(names.keys() - self.values.keys())
        if missing:
            self.lint.refuse(f"missing {', '.join(f'{self.architecture}.{name}' for name in missing)}")
        names = {**names, **(optional or {})}
        self.lint.types(kind, self.values, names, self.architecture + ".")
        return {ours: self.values[name] for name, ours in names.items() if name in self.values}

    def size(self, name: str) -> int:
        """Of what no field of ours has; 1 if it is missing or wrong, which is noted."""
        value = self.values.get(name)
        if isinstance(value, int) and value > 0 and not isinstance(value, bool):
            return value
        self.lint.refuse(f"{self.architecture}.{name} is {shown(value)}, expected a positive integer")
        return 1

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        self.lint.refuse(f"{self.architecture}.{name} is {shown(value)}, expected a number")
        return 1.0

    def layers(self) -> int:
        count = self.size("block_count")
        if count > MAX_LAYERS:
            self.lint.refuse(f"{self.architecture}.block_count asks for {count}, and at most {MAX_LAYERS} are read")
        return min(count, MAX_LAYERS)

    def each_layer(self, name: str) -> list[int]:
        """One number for each layer; in the file it may be one for all."""
        value, count = self.values.get(name), self.layers()
        if isinstance(value, int) and not isinstance(value, bool):
            return [value] * count
        if isinstance(value, np.ndarray) and len(value) == count and value.dtype.kind in "iu":
            return value.tolist()
        self.lint.refuse(f"{self.architecture}.{name} is {shown(value)}, expected {count} integers, one for each layer")
        return [0] * count

    def vocabulary(self) -> int:
        """Rows of the embedding, padding included."""
        embedding = self.tensors.get("token_embd.weight")
        if embedding is not None and len(embedding.shape) == 2:
            return embedding.shape[0]
        self.lint.refuse("there is no token_embd.weight of two axes")
        return 1

    def is_tied(self) -> bool:
        return "output.weight" not in self.tensors

    def has(self, kind: str) -> bool:
        """Whether some layer has such a tensor."""
        return any(name.startswith("blk.") and name.endswith(f".{kind}") for name in self.tensors)


def decimal(value: float) -> float:
    """The short number that was stored as float32."""
    return float(str(np.float32(value)))
