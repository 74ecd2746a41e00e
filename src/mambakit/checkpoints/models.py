"""A whole model from a checkpoint and back."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from mambakit.arguments import check_kind, find_device, find_path, shown
from mambakit.blocks.shares import check_whole
from mambakit.checkpoints import gguf
from mambakit.checkpoints.adapters import base_of, is_alone, load_lora
from mambakit.checkpoints.files import CONFIG, DTYPES, PACKED, find_directory, read_tensors
from mambakit.checkpoints.fitting import (
    EMBEDDING,
    HEAD,
    check_tensors,
    empty_model,
    fill,
    warn_about_casts,
    with_embedding_called,
)
from mambakit.checkpoints.formats import FORMATS, read_config, with_choices, write_config
from mambakit.checkpoints.hub import HUB
from mambakit.checkpoints.names import Names, Renamed, renamed, rules
from mambakit.checkpoints.quantized import FIELD, formats_of, refuse_quantized
from mambakit.checkpoints.writing import replacing, write_json, write_tensors
from mambakit.models.language_model import LanguageModel
from mambakit.models.lora import adapters, merge_lora

MAX_SHARD_BYTES = 5 * 10**9


def load_model(
    path_or_hub_name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    a_activation: str | None = None,
    norm_group_size: int | None = None,
    dt_limit: tuple[float, float] | None = None,
    revision: str | None = None,
) -> LanguageModel:
    """The model in a directory or a GGUF file, or on the hub under a name like `owner/model`; see docs/checkpoints.md.

    The folder of a training run is as good as that of its model, and an adapter's folder gives the model it belongs to
    with the adapter merged into it.

    Parameters get the dtype they have in a model of `dtype`, by default that of the stored projections, for GGUF
    float32: decays and other parameters that a half-precision model keeps in float32 are float32. `a_activation`
    ("heavy_tail" or "softplus") says what official Mamba-3 checkpoints do not, `norm_group_size` what Mamba-2 ones of
    transformers do not, `dt_limit` what Nemotron's do not. `revision` is a commit, branch or tag on the hub.
    Whatever does not fit raises ValueError, and no code from the files is run.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> mk.save_model(model, "another-model")
        >>> mk.load_model("another-model", dtype=torch.bfloat16).config == model.config
        True
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES):
        raise ValueError(f"dtype = {shown(dtype)} is not one of {', '.join(map(str, DTYPES))}")
    device = None if device is None else find_device(device)
    if revision is not None:
        check_kind("revision", revision, str, "the name of a commit, branch or tag")
    if revision is not None and find_path("path_or_hub_name", path_or_hub_name).exists():
        raise ValueError(f"revision = {shown(revision)} is for names on the hub, and {path_or_hub_name} is here")
    file = gguf.find(find_path("path_or_hub_name", path_or_hub_name))
    if file is not None:
        place, name, described = file, "gguf", "metadata"
        found, tensors = gguf.read(place)
        # Types are mixed in these files, and none of them is the model's.
        dtype = dtype or torch.float32
    else:
        place, described = find_directory(path_or_hub_name, revision), CONFIG
        if is_alone(place):
            given = {"a_activation": a_activation, "norm_group_size": norm_group_size, "dt_limit": dt_limit}
            return merge_lora(load_lora(load_model(base_of(place), dtype=dtype, device=device, **given), place))
        name, found = read_config(place / CONFIG)
        dtypes = PACKED if found.quantization else DTYPES
        # Nobody else holds them: the memory of those that were copied is free before the last is.
        tensors = with_embedding_called(found.names.embedding, read_tensors(place, dtypes))
    config = with_choices(name, found, a_activation=a_activation, norm_group_size=norm_group_size, dt_limit=dt_limit)
    embedding = found.names.embedding
    try:
        model = empty_model(config, tensors, embedding, dtype, found.quantization)
        table = list(rules(model, found.names))
        check_tensors(model, tensors, table, embedding)
    except ValueError as error:
        raise ValueError(f"the weights in {place} do not fit its {described}: {error}") from error
    ours = Renamed(tensors, table)
    if dtype is None:
        warn_about_casts(model, ours)
    fill(model, ours, device)
    return model


def save_model(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    format: str = "mambakit",
    *,
    max_shard_bytes: int | None = None,
) -> None:
    """Write the model to a directory, for `load_model`, the official package or transformers to read.

    A quantized model is written in the format "mambakit", and read with the same bits.

    The directory is replaced whole or not at all. It has to be new, empty or hold a checkpoint, whose files give way to
    the new ones. Weights are divided into files of at most `max_shard_bytes`: by default 5 GB, and without limit for
    "official", whose package reads one file only. A model that the format cannot express raises ValueError.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> mk.save_model(model, "my-model", format="official")
        >>> again = mk.load_model("my-model")
    """
    write_model(model, directory, format, max_shard_bytes, _is_checkpoint)


def write_model(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    format: str,
    max_shard_bytes: int | None,
    is_checkpoint: Callable[[Path], bool],
) -> None:
    """`save_model` to a directory that `is_checkpoint` lets it replace."""
    if not isinstance(format, str) or format not in (*FORMATS, *HUB):
        raise ValueError(f"format = {shown(format)} is unknown; choose from {', '.join((*FORMATS, *HUB))}")
    if not isinstance(model, LanguageModel):
        raise ValueError(f"save_model takes a LanguageModel, got a {type(model).__name__}")
    check_whole("save_model", model)
    if max_shard_bytes is None:
        max_shard_bytes = None if format == "official" else MAX_SHARD_BYTES
    elif type(max_shard_bytes) is not int or max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes = {shown(max_shard_bytes)} has to be a positive whole number")
    if next(adapters(model), None) is not None:
        raise ValueError(
            "the model has adapters; save_lora saves them, merge_lora(model) makes them part of its weights"
        )
    written, quantization = write_config(model.config, format), formats_of(model)
    if quantization and format != "mambakit":
        refuse_quantized(model, f'the format "{format}"')
    values = {**written.values, FIELD: quantization} if quantization else written.values
    tensors = model.state_dict()
    empty = empty_model(model.config, tensors, EMBEDDING, None, quantization)
    check_tensors(empty, tensors, list(rules(empty, Names())))
    kind = FORMATS.get(format, FORMATS["transformers"])
    if model.config.tie_embeddings and not kind.stores_tied_head:
        tensors.pop(HEAD, None)  # a quantized head is one of its own
    tensors = renamed(tensors, list(rules(empty, written.names)))
    with replacing(find_path("directory", directory), is_checkpoint) as fresh:
        write_tensors(fresh, tensors, kind.weights, max_shard_bytes)
        write_json(fresh / CONFIG, values)


def _is_checkpoint(directory: Path) -> bool:
    try:
        read_config(directory / CONFIG)
    except ValueError:
        return False
    return True
