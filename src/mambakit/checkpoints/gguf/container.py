"""The container of GGUF files: metadata and tensors, which may be quantized.

The header is read here, so that a damaged one is refused in no time; the package `gguf` knows the types of tensors and
their numbers.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mambakit.checkpoints.fields import shown
from mambakit.checkpoints.files import MAX_TENSORS

MAGIC, VERSIONS = b"GGUF", (2, 3)
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_FIELDS, MAX_TEXT, MAX_ITEMS, MAX_AXES = 2**16, 2**24, 2**22, 4
"""More than any description has, and little enough to be read in no time."""

Metadata = dict[str, Any]


class Stored(NamedTuple):
    """Where a tensor lies; axes as torch orders them."""

    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass
class Header:
    metadata: Metadata
    """By key. Lists of numbers are arrays; lists of strings are left out."""
    tensors: dict[str, Stored]
    start: int
    """Where the tensors' offsets count from."""
    alignment: int
    content: np.ndarray
    """The whole file, mapped into memory."""


def read_header(path: Path) -> Header:
    try:
        size = path.stat().st_size
        # Copies on writing, so that torch takes it for an ordinary array.
        content: Any = np.memmap(path, mode="c") if size else np.empty(0, np.uint8)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from error
    reader = Reader(memoryview(content))
    if size < 4 or reader.take(4) != MAGIC:
        raise ValueError(f"it does not start with {MAGIC.decode()}")
    version = reader.number("I")
    if version not in VERSIONS:
        raise ValueError(f"version = {version}, but versions {' and '.join(map(str, VERSIONS))} are read")
    tensor_count, field_count = reader.count("tensors", MAX_TENSORS), reader.count("fields", MAX_FIELDS)
    metadata: Metadata = {}
    for _ in range(field_count):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"it has {shown(key)} twice")
        metadata[key] = reader.value(reader.number("I"))
    tensors: dict[str, Stored] = {}
    for _ in range(tensor_count):
        name = reader.text()
        if name in tensors:
            raise ValueError(f"it has the tensor {shown(name)} twice")
        axes = reader.number("I")
        if axes > MAX_AXES:
            raise ValueError(f"{shown(name)} has {axes} axes, and at most {MAX_AXES} are read")
        shape = tuple(reader.number("Q") for _ in range(axes))[::-1]
        tensors[name] = Stored(shape, reader.number("I"), reader.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise ValueError(f"general.alignment = {shown(alignment)} is not a positive multiple of 8")
    return Header(metadata, tensors, -(-reader.at // alignment) * alignment, alignment, content)


class Reader:
    """Numbers and strings from a place that moves on; ValueError at the end of the file."""

    def __init__(self, content: memoryview):
        self.content, self.at = content, 0

    def skip(self, size: int) -> int:
        """Move on; returns where it was."""
        if size > len(self.content) - self.at:
            raise ValueError(f"it is cut short: {size} bytes should follow byte {self.at} of {len(self.content)}")
        self.at += size
        return self.at - size

    def take(self, size: int) -> bytes:
        return bytes(self.content[self.skip(size) : self.at])

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.content, self.skip(struct.calcsize("<" + code)))[0]

    def count(self, what: str, most: int) -> int:
        number = self.number("Q")
        if number > most:
            raise ValueError(f"it has {number} {what}, and at most {most} are read")
        return number

    def text(self) -> str:
        try:
            return self.take(self.count("bytes of text in one piece", MAX_TEXT)).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"the text before byte {self.at} is no UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"there is a value of the unknown type {kind} before byte {self.at}")
        kind, count = self.number("I"), self.count("values in one list", MAX_ITEMS)
        if kind in SCALARS:
            return np.frombuffer(self.take(count * struct.calcsize("<" + SCALARS[kind])), "<" + SCALARS[kind])
        if kind != STRING:
            raise ValueError(f"there is a list of the type {kind} before byte {self.at}, which is not read")
        for _ in range(count):
            self.skip(self.number("Q"))
        return None


def stored(gguf: Any, header: Header) -> dict[str, Tensor]:
    """The tensors under the names of the file."""
    kinds: dict[int, Any] = {int(kind): kind for kind in gguf.GGMLQuantizationType}
    given = {tensor.type for tensor in header.tensors.values()}
    refused = sorted({kinds[n].name if n in kinds else f"number {n}" for n in given} - set(TYPES))
    if refused:
        raise ValueError(f"tensors of the type {', '.join(refused)} are not read; {', '.join(TYPES)} are")
    pieces: dict[str, tuple[Any, np.ndarray]] = {}
    total, size = 0, len(header.content)
    for name, (shape, number, offset) in header.tensors.items():
        kind = kinds[number]
        per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % per_block or offset % header.alignment:
            raise ValueError(f"{shown(name)}, {list(shape)} of {kind.name} at byte {offset}, is no whole tensor")
        start, length = header.start + offset, math.prod(shape) // per_block * bytes_per_block
        if start + length > size:
            raise ValueError(f"it is cut short: {shown(name)} ends at byte {start + length} of {size}")
        total += length
        pieces[name] = kind, header.content[start : start + length].reshape(*shape[:-1], -1)
    # Tensors that share numbers would be few bytes here and many once they are read.
    if total > size:
        raise ValueError(f"its tensors have {total:,} bytes, but the file only {size:,}")
    return {name: numbers(gguf, kind, raw) for name, (kind, raw) in pieces.items()}


def numbers(gguf: Any, kind: Any, raw: np.ndarray) -> Tensor:
    """The tensor of rows of bytes: mapped from the file where torch has the type, and float32 otherwise."""
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if kind.name in plain:
        return torch.from_numpy(np.asarray(raw)).view(plain[kind.name])
    return torch.from_numpy(gguf.quants.dequantize(np.asarray(raw), kind))
