"""The three formats, and what crossing between them may not change."""

import warnings
from collections.abc import Callable, Collection
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from mambakit.blocks.config import BlockConfig, from_plain
from mambakit.blocks.family import FAMILIES, family_of
from mambakit.checkpoints import official, transformers
from mambakit.checkpoints.fields import Lint, same
from mambakit.checkpoints.files import read_json
from mambakit.checkpoints.fitting import EMBEDDING
from mambakit.models.language_model import ModelConfig
from mambakit.models.multi_gate import MultiGateConfig
from mambakit.models.schedules import Custom, Cyclic

VERSION = 1
MODEL_TYPE = "mambakit"
"""By this field transformers finds the class of a model; see `compat/auto.py`."""


PARTS = ("block", "virtual", "multi_gate")
"""Fields of a model that have fields of their own."""


class Format(NamedTuple):
    read: Callable[[dict[str, Any]], ModelConfig]
    """The config that the values of a `config.json` describe."""
    write: Callable[[ModelConfig], dict[str, Any]]
    families: Collection[str]
    """Whose blocks it can describe."""
    weights: str
    """Name of the file of weights when it is one."""
    embedding: str = EMBEDDING
    """Name of the embedding among the weights. All others are named as in our models."""
    stores_tied_head: bool = False


def read_own(values: dict[str, Any]) -> ModelConfig:
    if values.get("version") != VERSION:
        raise ValueError(f"version = {values.get('version')!r}, but this mambakit reads version {VERSION}")
    # model_type came later: files without it are as good.
    if values.keys() - {"model_type"} != {"format", "version", "model"}:
        fields = ", ".join(sorted(values))
        raise ValueError(f"the fields are {fields}, expected format, version, model_type and model")
    if values.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        raise ValueError(f"model_type = {values['model_type']!r}, expected {MODEL_TYPE!r}")
    try:
        _check_own(values["model"])
        return ModelConfig.from_dict(values["model"])
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"model has a field of the wrong type, or lacks one: {error}") from error


def _check_own(model: dict[str, Any]) -> None:
    """ValueError names all fields of the wrong type, and counts above all measure."""
    lint = Lint()
    parts: list[tuple[str, type, dict[str, Any]]] = [
        ("model.", ModelConfig, model),
        ("model.multi_gate.", MultiGateConfig, model.get("multi_gate") or {}),
        *(("model.virtual.", kind, model.get("virtual") or {}) for kind in (Cyclic, Custom)),
    ]
    block = model.get("block") or {}
    if block.get("family") in FAMILIES:
        parts.append(("model.block.", FAMILIES[block["family"]].config, block))
    for where, kind, values in parts:
        names = [field.name for field in fields(kind) if field.name not in PARTS]
        lint.types(kind, {name: from_plain(value) for name, value in values.items()}, same(*names), where)
    lint.close()


def write_own(config: ModelConfig) -> dict[str, Any]:
    return {"format": "mambakit", "version": VERSION, "model_type": MODEL_TYPE, "model": config.to_dict()}


FORMATS = {
    "mambakit": Format(read_own, write_own, FAMILIES, "model.safetensors"),
    # The official package reads this file only.
    "official": Format(official.read, official.write, official.BLOCK, "pytorch_model.bin", stores_tied_head=True),
    "transformers": Format(
        *(transformers.read, transformers.write, transformers.BLOCK, "model.safetensors"),
        embedding="backbone.embeddings.weight",
    ),
}


def read_config(path: Path) -> tuple[str, ModelConfig]:
    """The name of the format and the config that a `config.json` describes; ValueError names all that is wrong."""
    values = read_json(path)
    name = "transformers" if "model_type" in values else "official"
    if values.get("format") == "mambakit":
        name = "mambakit"
    try:
        return name, FORMATS[name].read(values)
    except ValueError as error:
        raise ValueError(f"{path}, read in the format {name!r}: {error}") from error


def write_config(config: ModelConfig, name: str) -> dict[str, Any]:
    """The values of `config.json`; ValueError names the fields that the format would not give back."""
    family = family_of(config.block)
    if family.name not in FORMATS[name].families:
        able = [f'"{other}"' for other, format in FORMATS.items() if family.name in format.families]
        told = f"{' and '.join(able)} {'has' if len(able) == 1 else 'have'}"
        raise ValueError(f'the format "{name}" has no {family.title}; {told}')
    written = FORMATS[name].write(config)
    stored = FORMATS[name].read(written)
    block: Any = stored.block
    if name == "transformers" and hasattr(block, "norm_group_size"):
        # What its models compute, whatever the number of groups.
        stored = replace(stored, block=replace(block, norm_group_size=block.ssm_width))
    want, got = described(config), described(stored)
    if name == "transformers":
        # Padding becomes part of the vocabulary, and how A starts is fixed. Neither changes what is computed.
        for field in ("vocab_size", "pad_vocab_size_multiple", "block.A_init_range"):
            want.pop(field, None)
    lost = [f"{field} = {value!r}" for field, value in want.items() if got[field] != value]
    if lost:
        raise ValueError(f'the format "{name}" cannot express {", ".join(lost)}; "mambakit" can')
    return written


def described(config: ModelConfig) -> dict[str, Any]:
    """All fields by name, with the values that defaults like None stand for."""
    model = {name: value for name, value in asdict(config).items() if name != "block"}
    return {**model, **{f"block.{name}": value for name, value in _described_block(config.block).items()}}


def _described_block(block: BlockConfig) -> dict[str, Any]:
    return {**asdict(block), **{name: getattr(block, by) for name, by in family_of(block).resolved.items()}}


def with_choices(
    config: ModelConfig, name: str, *, a_activation: str | None, norm_group_size: int | None
) -> ModelConfig:
    """The config with what the format leaves open as the caller says, or a warning about what is assumed."""
    block: Any = config.block
    if hasattr(block, "a_activation") and name == "official" and a_activation is None:
        _warn(
            f'official Mamba-3 checkpoints do not say how A is activated; assuming "{block.a_activation}". '
            'Pass a_activation="softplus" for weights made before the official change of June 2026, '
            'a_activation="heavy_tail" for later ones'
        )
    grouped = hasattr(block, "norm_group_size") and block.ngroups > 1
    if grouped and name == "transformers" and norm_group_size is None:
        _warn(
            f"n_groups = {block.ngroups}: the gated norm is taken per group, over {block.norm_width} channels, as in "
            f"the official code. transformers without fused kernels takes it over all {block.ssm_width}; pass "
            f"norm_group_size={block.ssm_width} to reproduce that, or {block.norm_width} to keep the groups"
        )
    for field, value in (("a_activation", a_activation), ("norm_group_size", norm_group_size)):
        if value is not None:
            block = _chosen(block, name, field, value)
    return replace(config, block=block)


def _chosen(block: Any, name: str, field: str, value: Any) -> BlockConfig:
    family = family_of(block)
    if not family.has(field):
        raise ValueError(f"{field} = {value!r} was given, but this is a {family.name} model, which has none")
    changed = replace(block, **{field: value})
    if name == "mambakit" and _described_block(changed) != _described_block(block):
        raise ValueError(f"{field} = {value!r} was given, but config.json says {getattr(block, field)!r}")
    return changed


def _warn(message: str) -> None:
    # Points at the caller of load_model.
    warnings.warn(message, UserWarning, stacklevel=4)
