"""GGUF, the files of llama.cpp: one file with metadata and weights, which may be quantized.

Its converter changes some weights, which is undone here. The header is read by this module, so that a damaged one is
refused in no time; the package `gguf` knows the types of tensors and their numbers.
"""

import math
import os
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mambakit.blocks.mamba1 import Mamba1Config
from mambakit.blocks.mamba2 import Mamba2Config
from mambakit.checkpoints.fields import Lint, shown
from mambakit.checkpoints.files import MAX_TENSORS
from mambakit.checkpoints.fitting import EMBEDDING, HEAD
from mambakit.models.language_model import ModelConfig

SUFFIX = ".gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_FIELDS, MAX_TEXT, MAX_ITEMS, MAX_AXES = 2**16, 2**24, 2**22, 4
"""More than any description has, and little enough to be read in no time."""

Metadata = dict[str, Any]


def is_file(path_or_hub_name: str | os.PathLike[str]) -> bool:
    """Whether it names such a file, be it there or not."""
    path = Path(path_or_hub_name)
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def read(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The config and the weights under our names, mapped from the file or, where quantized, as float32.

    ValueError names what is wrong with the file.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"reading {path} needs the package gguf: pip install mambakit[gguf]") from error
    try:
        header = read_header(path)
        name = header.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ValueError(f"the architecture {shown(name)} is not supported, expected {' or '.join(ARCHITECTURES)}")
        parts = header.metadata.get("split.count", 1)
        if parts != 1:
            raise ValueError(f"it is one of {shown(parts)} parts; join them with llama-gguf-split --merge")
        architecture = ARCHITECTURES[name]
        config = architecture.config(Described(name, header))
        return config, named(stored(gguf, header), architecture)
    except ValueError as error:
        raise ValueError(f"{path}, read as GGUF: {error}") from error


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
        pieces[name] = kind, header.content[start : start + length]
    # Tensors that share numbers would be few bytes here and many once they are read.
    if total > size:
        raise ValueError(f"its tensors have {total:,} bytes, but the file only {size:,}")
    return {name: numbers(gguf, kind, raw).reshape(header.tensors[name].shape) for name, (kind, raw) in pieces.items()}


def numbers(gguf: Any, kind: Any, raw: np.ndarray) -> Tensor:
    """Mapped from the file where torch has the type, and float32 otherwise."""
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if kind.name in plain:
        return torch.from_numpy(np.asarray(raw)).view(plain[kind.name])
    return torch.from_numpy(gguf.quants.dequantize(np.asarray(raw), kind))


class Architecture(NamedTuple):
    config: Callable[["Described"], ModelConfig]
    layer: Mapping[str, str]
    """What the tensors of a layer are called, each with our name."""
    flattened: Collection[str] = ()
    """Those with one axis here and another there, of one entry or for the groups."""


class Described:
    """What a file says about its model: metadata by short names, and tensors."""

    def __init__(self, architecture: str, header: Header):
        self.architecture, self.tensors, self.lint = architecture, header.tensors, Lint()
        prefix = architecture + "."
        given = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
        self.values = {key: decimal(value) if isinstance(value, float) else value for key, value in given.items()}

    def fields(self, kind: type, names: Mapping[str, str], optional: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Fields of a config, each under the name that it has here; those that are missing or wrong are noted."""
        optional = optional or {}
        missing = sorted(names.keys() - self.values.keys())
        if missing:
            self.lint.refuse(f"missing {', '.join(f'{self.architecture}.{name}' for name in missing)}")
        names = {**names, **optional}
        self.lint.types(kind, self.values, names, self.architecture + ".")
        return {ours: self.values[name] for name, ours in names.items() if name in self.values}

    def size(self, name: str) -> int:
        """Of what no field of ours has; 1 if it is missing or wrong, which is noted."""
        value = self.values.get(name)
        if isinstance(value, int) and value > 0 and not isinstance(value, bool):
            return value
        self.lint.refuse(f"{self.architecture}.{name} is {shown(value)}, expected a positive integer")
        return 1

    def model(self, block: Callable[[], Any]) -> ModelConfig:
        """The config of a model of such blocks only; ValueError says all that is wrong."""
        fields = self.fields(ModelConfig, MODEL)
        if "token_embd.weight" not in self.tensors:
            self.lint.refuse("there is no token_embd.weight")
        if self.lint.buildable:
            # The vocabulary is padded already.
            fields |= {"vocab_size": self.tensors["token_embd.weight"].shape[0], "pad_vocab_size_multiple": 1}
            try:
                return ModelConfig(block=block(), tie_embeddings="output.weight" not in self.tensors, **fields)
            except (ValueError, ArithmeticError) as error:
                self.lint.add(str(error))
        self.lint.close()
        raise AssertionError("a config that cannot be built has a reason")

    def biases(self) -> dict[str, Any]:
        """Metadata does not tell."""
        return {"bias": "blk.0.ssm_in.bias" in self.tensors, "conv_bias": "blk.0.ssm_conv1d.bias" in self.tensors}


def decimal(value: float) -> float:
    """The short number that was stored as float32."""
    return float(str(np.float32(value)))


NORM_EPS = "attention.layer_norm_rms_epsilon"
MODEL = {"block_count": "n_layer", NORM_EPS: "norm_eps"}
SHARED = {"embedding_length": "d_model", "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_rank"}


def ratio(inner: int, width: int) -> float:
    """By which the model's width becomes the inner one."""
    if inner % width == 0:
        return inner // width
    nearest = inner / width
    return nearest if int(nearest * width) == inner else math.nextafter(nearest, math.inf)


def read_mamba(file: Described) -> ModelConfig:
    """Falcon-Mamba's norms on dt, B and C have the epsilon of the others, as in llama.cpp."""
    fields = file.fields(Mamba1Config, {**SHARED, "ssm.time_step_rank": "dt_rank"}, {"ssm.dt_b_c_rms": "dt_b_c_norm"})
    inner, width = file.size("ssm.inner_size"), file.size("embedding_length")
    if fields.get("dt_b_c_norm"):
        fields |= {"dt_b_c_norm_weight": False, "norm_eps": file.values.get(NORM_EPS)}
    return file.model(lambda: Mamba1Config(expand=ratio(inner, width), **fields, **file.biases()))


def read_mamba2(file: Described) -> ModelConfig:
    names = {**SHARED, "ssm.group_count": "ngroups", "ssm.inner_size": "d_inner", NORM_EPS: "norm_eps"}
    fields = file.fields(Mamba2Config, names)
    inner, heads = file.size("ssm.inner_size"), file.size("ssm.time_step_rank")
    if inner % heads:
        file.lint.refuse(f"mamba2.ssm.inner_size = {inner} is not a multiple of the {heads} heads, ssm.time_step_rank")
    width = file.size("embedding_length")
    if inner % width == 0:
        # As other formats say it.
        fields |= {"d_inner": None, "expand": inner // width}
    return file.model(lambda: Mamba2Config(per_head_dim=inner // heads, **fields, **file.biases()))


LAYER = {
    "attn_norm.weight": "norm.weight",
    "ssm_in.weight": "mixer.in_proj.weight",
    "ssm_in.bias": "mixer.in_proj.bias",
    "ssm_conv1d.weight": "mixer.conv1d.weight",
    "ssm_conv1d.bias": "mixer.conv1d.bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_out.weight": "mixer.out_proj.weight",
    "ssm_out.bias": "mixer.out_proj.bias",
}
ARCHITECTURES = {
    "mamba": Architecture(
        read_mamba,
        {
            **LAYER,
            "ssm_x.weight": "mixer.x_proj.weight",
            "ssm_dt.weight": "mixer.dt_proj.weight",
            "ssm_dt.bias": "mixer.dt_proj.bias",
        },
    ),
    "mamba2": Architecture(
        read_mamba2,
        {**LAYER, "ssm_dt.bias": "mixer.dt_bias", "ssm_norm.weight": "mixer.norm.weight"},
        flattened=("ssm_a", "ssm_d", "ssm_norm.weight"),
    ),
}
OUTSIDE = {"token_embd.weight": EMBEDDING, "output_norm.weight": "backbone.norm_f.weight", "output.weight": HEAD}


def named(tensors: dict[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """The tensors under our names and as our models have them."""
    ours: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if name in OUTSIDE:
            ours[OUTSIDE[name]] = tensor
        elif layer is not None and layer[2] in architecture.layer:
            flat = tensor.flatten() if layer[2] in architecture.flattened else tensor
            ours[f"backbone.layers.{layer[1]}.{architecture.layer[layer[2]]}"] = restored(name, flat)
        else:
            unknown.append(shown(name))
    if unknown:
        raise ValueError(f"it has tensors that are not known: {', '.join(unknown)}")
    return ours


def restored(name: str, tensor: Tensor) -> Tensor:
    """What the converter made this tensor of."""
    if name.endswith("ssm_conv1d.weight"):
        return tensor.reshape(len(tensor), 1, -1)
    if name.endswith("ssm_a"):
        if not (tensor < 0).all():
            raise ValueError(f"{name} has numbers that are not negative, and no decay is")
        return torch.log(-tensor.double()).float()
    return tensor
