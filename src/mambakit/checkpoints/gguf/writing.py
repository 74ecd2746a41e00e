"""Mamba-1 and Mamba-2 as GGUF files, as llama.cpp's converter writes them."""

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from mambakit.arguments import find_path, shown
from mambakit.blocks.mamba1 import Mamba1Config
from mambakit.blocks.mamba2 import Mamba2Config
from mambakit.checkpoints.fitting import EMBEDDING, HEAD
from mambakit.checkpoints.formats import FORGOTTEN, check_lost
from mambakit.checkpoints.gguf.container import Header, Stored
from mambakit.checkpoints.gguf.described import NORM_EPS, Described
from mambakit.checkpoints.gguf.mamba import ARCHITECTURES
from mambakit.checkpoints.gguf.vocabulary import UNUSED, Vocabulary
from mambakit.checkpoints.quantized import refuse_quantized
from mambakit.checkpoints.writing import sync
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.ops.shapes import check_numbers
from mambakit.optional import need

KINDS = {"F32": 0, "F16": 1, "Q8_0": 7}
"""Types of projections and embeddings, with llama.cpp's number for a file of them."""
ALWAYS_F32 = ("ssm_conv1d.weight", "norm.weight")
CONTEXT = 2**20
"""A number that llama.cpp asks for; the models have no limit."""


def save_gguf(
    model: LanguageModel, file: str | os.PathLike[str], kind: str = "F32", vocabulary: Vocabulary | None = None
) -> Path:
    """Write the model for llama.cpp and `load_model`, its matrices in F32, F16 or Q8_0.

    Padding of the vocabulary is left out. Without a `vocabulary` llama.cpp takes ids only. The file appears when it is
    whole. ValueError says what llama.cpp has not.
    """
    gguf = need("writing GGUF", "gguf")
    path = find_path("file", file)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"the type {shown(kind)} is unknown; choose from {', '.join(KINDS)}")
    if path.suffix != ".gguf":
        raise ValueError(f"{path.name}: a GGUF file has to end in .gguf")
    name, fields = described(model)
    tensors = stored(model, name)
    check(model.config, name, fields, tensors)
    writer = gguf.GGUFWriter(None, name)
    for field, value in fields.items():
        add = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{name}.{field}", value)
    writer.add_file_type(KINDS[kind])
    if kind == "Q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, vocabulary, model.config.vocab_size)
    for called, tensor in tensors.items():
        array, of = encoded(gguf, called, tensor, kind)
        writer.add_tensor(called, array, raw_dtype=of)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        writer.write_header_to_file(fresh)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        sync(fresh)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    return path


def described(model: LanguageModel) -> tuple[str, dict[str, Any]]:
    """The architecture and its fields."""
    if not isinstance(model, LanguageModel):
        raise ValueError(f"save_gguf takes a LanguageModel, got a {type(model).__name__}")
    refuse_quantized(model, "GGUF")
    config, block = model.config, model.config.block
    if not isinstance(block, Mamba1Config | Mamba2Config):
        raise ValueError(f"GGUF files are written of models of Mamba-1 or Mamba-2 blocks alone, this is {told(config)}")
    common = {
        "context_length": CONTEXT,
        "embedding_length": block.d_model,
        # llama.cpp looks for these two, and has no use for them.
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": config.n_layer,
        "vocab_size": config.vocab_size,
        "ssm.conv_kernel": block.conv_kernel,
        "ssm.state_size": block.state_rank,
        NORM_EPS: float(config.norm_eps),
    }
    missing = []
    if block.bias:
        missing.append("bias = True")
    if not block.conv_bias:
        missing.append("conv_bias = False")
    if isinstance(block, Mamba1Config):
        if block.d_inner != 2 * block.d_model:
            missing.append(f"an inner width of {block.d_inner}, which is not twice d_model = {block.d_model}")
        own = {"ssm.inner_size": block.d_inner, "ssm.time_step_rank": block.dt_width}
        own["ssm.dt_b_c_rms"] = block.dt_b_c_norm
        name = "mamba"
    else:
        own = {"ssm.inner_size": block.inner_width, "ssm.time_step_rank": block.nheads}
        own["ssm.group_count"] = block.ngroups
        name = "mamba2"
    if missing:
        raise ValueError(f"llama.cpp has no {'Mamba-1' if name == 'mamba' else 'Mamba-2'} with {' and '.join(missing)}")
    return name, {**common, **own}


def told(config: ModelConfig) -> str:
    kinds = dict.fromkeys(type(block).__name__.removesuffix("Config") for blocks in config.blocks for block in blocks)
    return f"one of {' and '.join(kinds)}"


def stored(model: LanguageModel, name: str) -> dict[str, Tensor]:
    """The tensors of the file, in float32."""
    layout, weights = ARCHITECTURES[name].layout, model.state_dict()
    rows = model.config.vocab_size
    if model.config.tie_embeddings:
        del weights[HEAD]
    for key in (EMBEDDING, HEAD):
        if key in weights:
            weights[key] = weights[key][:rows]
    names = {ours: theirs for theirs, ours in layout.outside.items()}
    for i in range(model.config.n_layer):
        names |= {layout.layer.format(i) + str(ours): f"blk.{i}.{theirs}" for theirs, ours in layout.inside.items()}
    unknown = sorted(weights.keys() - names.keys())
    if unknown:
        raise ValueError(f"GGUF has no {', '.join(unknown[:20])}")
    for key, tensor in weights.items():
        check_numbers(key, tensor)
    groups = getattr(model.config.block, "ngroups", 1)
    found = {names[key]: converted(names[key], tensor, groups, name) for key, tensor in weights.items()}
    broken = [called for called, tensor in found.items() if not tensor.isfinite().all()]
    if broken:
        raise ValueError(f"weights with a NaN or an infinity: {', '.join(broken)}")
    return found


def converted(called: str, tensor: Tensor, groups: int, name: str) -> Tensor:
    """A tensor as the file has it; `restored` and `named` are the way back."""
    kind, tensor = called.split(".", 2)[-1], tensor.detach().float().cpu()
    if kind == "ssm_conv1d.weight":
        tensor = tensor.squeeze(1)
    elif kind == "ssm_a":
        tensor = -torch.exp(tensor)
    if name == "mamba2" and kind in ("ssm_a", "ssm_d"):
        return tensor.flatten()[:, None]
    if name == "mamba2" and kind == "ssm_norm.weight":
        return tensor.unflatten(0, (groups, -1))
    return tensor.contiguous()


def check(config: ModelConfig, name: str, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """ValueError names what would not come back, or not be computed by llama.cpp."""
    metadata = {f"{name}.{field}": value for field, value in fields.items()}
    shapes = {called: Stored(tuple(tensor.shape), 0, 0) for called, tensor in tensors.items()}
    header = Header(metadata, shapes, 0, 32, np.empty(0, np.uint8))
    again = ARCHITECTURES[name].config(Described(name, header))
    check_lost(config, again, "GGUF", FORGOTTEN)


def encoded(gguf: Any, called: str, tensor: Tensor, kind: str) -> tuple[np.ndarray, Any]:
    """As the converter chooses: vectors, norms, decays and filters stay F32, rows that Q8_0 does not divide are F16."""
    types, array = gguf.GGMLQuantizationType, tensor.numpy()
    type = types[kind]
    if array.ndim == 1 or called.endswith(ALWAYS_F32) or not called.endswith(".weight"):
        type = types.F32
    elif array.shape[-1] % gguf.GGML_QUANT_SIZES[type][0]:
        type = types.F16
    with np.errstate(over="ignore"):  # looked for below
        found = gguf.quants.quantize(array, type)
    if type == types.F16 and not np.isfinite(found).all():
        raise ValueError(f"{called} has numbers that F16 does not hold; choose F32")
    return found, type


def add_vocabulary(writer: Any, vocabulary: Vocabulary | None, rows: int) -> None:
    if vocabulary is None:
        writer.add_tokenizer_model("none")
        return
    if len(vocabulary.tokens) > rows:
        # An end of its own, which the model does not know, need not be written.
        raise ValueError(f"the tokenizer has {len(vocabulary.tokens)} tokens, but the model knows {rows}")
    spare = range(len(vocabulary.tokens), rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.cut)
    writer.add_token_list([*vocabulary.tokens, *(f"<|unused_{i}|>" for i in spare)])
    writer.add_token_types([*vocabulary.types, *(UNUSED for _ in spare)])
    writer.add_token_merges(list(vocabulary.merges))
    writer.add_bos_token_id(vocabulary.end)
    writer.add_eos_token_id(vocabulary.end)
    # As `mambakit generate` starts: documents begin with their end.
    writer.add_add_bos_token(True)
