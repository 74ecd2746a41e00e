"""The formats, and what crossing between them may not change."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mambakit.blocks.config import BlockConfig, from_plain
from mambakit.blocks.family import FAMILIES, family_of
from mambakit.blocks.parallel import ParallelConfig
from mambakit.checkpoints import gated_norm, official, transformers
from mambakit.checkpoints.fields import Lint, same, shown
from mambakit.checkpoints.files import read_json
from mambakit.checkpoints.hub import HUB
from mambakit.checkpoints.names import Names
from mambakit.checkpoints.quantized import FIELD, Formats, read_formats
from mambakit.models.language_model import ModelConfig
from mambakit.models.multi_gate import MultiGateConfig
from mambakit.models.schedules import Custom, Cyclic

VERSION = 1
MODEL_TYPE = "mambakit"
"""By this field transformers finds the class of a model; see `compat/auto.py`."""


PARTS = ("block", "layers", "virtual", "multi_gate")
"""Fields of a model that have fields of their own."""
MAX_LAYERS = 10_000


class Read(NamedTuple):
    """What a `config.json` describes."""

    config: ModelConfig
    names: Names = Names()
    """Of the weights beside it."""
    left_open: Mapping[str, str] = {}
    """Arguments of `load_model` that decide what it does not say, each with what is assumed otherwise."""
    quantization: Formats = MappingProxyType({})


class Written(NamedTuple):
    values: dict[str, Any]
    """Of a `config.json`."""
    names: Names = Names()


class Format(NamedTuple):
    read: Callable[[dict[str, Any]], Read]
    write: Callable[[ModelConfig], Written]
    """ValueError says why the format has no such model; it need not look at all fields."""
    weights: str
    """Name of the file of weights when it is one."""
    forgets: frozenset[str] = frozenset()
    """Fields, of a model or a block, that it need not give back: they change nothing that is computed."""
    stores_tied_head: bool = False


def read_own(values: dict[str, Any]) -> Read:
    if values.get("version") != VERSION:
        raise ValueError(f"version = {values.get('version')!r}, but this mambakit reads version {VERSION}")
    # model_type came later: files without it are as good.
    if values.keys() - {"model_type", FIELD} != {"format", "version", "model"}:
        fields = ", ".join(sorted(values))
        raise ValueError(f"the fields are {fields}, expected format, version, model_type and model")
    if values.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        raise ValueError(f"model_type = {values['model_type']!r}, expected {MODEL_TYPE!r}")
    try:
        _check_own(values["model"])
        quantization = read_formats(values[FIELD]) if FIELD in values else {}
        return Read(ModelConfig.from_dict(values["model"]), quantization=quantization)
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
    parts += _parts_of_block("model.block.", model.get("block") or {})
    layers = model.get("layers") or []
    if len(layers) > MAX_LAYERS:
        raise ValueError(f"model.layers asks for {len(layers)} layers, and at most {MAX_LAYERS} are read")
    for i, blocks in enumerate(layers):
        for j, block in enumerate(blocks):
            parts += _parts_of_block(f"model.layers[{i}][{j}].", block)
    for where, kind, values in parts:
        names = [field.name for field in fields(kind) if field.name not in PARTS]
        lint.types(kind, {name: from_plain(value) for name, value in values.items()}, same(*names), where)
    lint.close()


def _parts_of_block(where: str, block: Any) -> list[tuple[str, type, dict[str, Any]]]:
    """A block's config with its name and values, and those inside it."""
    if not isinstance(block, dict) or block.get("family") not in FAMILIES:
        return []  # from_dict says so
    kind = FAMILIES[block["family"]].config
    inside = [name for name in ("a", "b") if kind is ParallelConfig]
    values = {name: value for name, value in block.items() if name not in inside}
    nested = [part for name in inside for part in _parts_of_block(f"{where}{name}.", block.get(name))]
    return [(where, kind, values), *nested]


def write_own(config: ModelConfig) -> Written:
    return Written({"format": "mambakit", "version": VERSION, "model_type": MODEL_TYPE, "model": config.to_dict()})


def read_official(values: dict[str, Any]) -> Read:
    config: ModelConfig = official.read(values)
    block: Any = config.block
    if not hasattr(block, "a_activation"):
        return Read(config)
    message = (
        f'official Mamba-3 checkpoints do not say how A is activated; assuming "{block.a_activation}". '
        'Pass a_activation="softplus" for weights made before the official change of June 2026, '
        'a_activation="heavy_tail" for later ones'
    )
    return Read(config, left_open={"a_activation": message})


def write_official(config: ModelConfig) -> Written:
    check_family(config, "official", official.BLOCK)
    return Written(official.write(config))


HUB_NAMES = Names(embedding="backbone.embeddings.weight")
"""What Mamba and Mamba2 of transformers call their weights."""


def read_transformers(values: dict[str, Any]) -> Read:
    model_type = values["model_type"]
    if isinstance(model_type, str) and model_type in HUB:
        found = HUB[model_type].read(values)
        return Read(found.config(), found.names, found.left_open())
    if not isinstance(model_type, str) or model_type not in transformers.FAMILY:
        known = ", ".join((*transformers.FAMILY, *HUB))
        raise ValueError(f"model_type = {shown(model_type)} is not supported, expected one of {known}")
    config = transformers.read(values)
    block: Any = config.block
    if not hasattr(block, "norm_group_size") or block.ngroups == 1:
        return Read(config, HUB_NAMES)
    return Read(config, HUB_NAMES, {"norm_group_size": gated_norm.groups_assumed(block.ngroups, block.ssm_width)})


def write_transformers(config: ModelConfig) -> Written:
    """As the first of its models that has all that this one has."""
    if config.layers is None and not config.d_intermediate and not getattr(config.block, "dt_b_c_norm", False):
        check_family(config, "transformers", transformers.BLOCK)
        return Written(transformers.write(config), HUB_NAMES)
    refused = []
    for model_type in HUB:
        try:
            written = write_hub(model_type, config)
            stored = with_norm_of(config, read_transformers(written.values))
            check_lost(config, stored, f"model_type {model_type}", FORGOTTEN)
            return written
        except ValueError as error:
            refused.append(f"{model_type}: {error}")
    raise ValueError(f"no model of transformers is like this one. {'; '.join(refused)}")


def write_hub(model_type: str, config: ModelConfig) -> Written:
    found = HUB[model_type].of(config)
    return Written(found.write(), found.names)


def check_family(config: ModelConfig, name: str, known: Mapping[str, Any]) -> None:
    if config.layers is not None:
        raise ValueError(f'the format "{name}" has no layers of several kinds; "mambakit" has')
    block: Any = config.block
    family = family_of(block)
    if family.name not in known:
        able = {"mambakit": FAMILIES, "official": official.BLOCK, "transformers": transformers.BLOCK}
        names = [f'"{other}"' for other, families in able.items() if family.name in families]
        told = f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'}"
        raise ValueError(f'the format "{name}" has no {family.title}; {told}')


FORGOTTEN = frozenset(
    {
        *("vocab_size", "pad_vocab_size_multiple"),  # padding becomes part of the vocabulary
        *("A_init_range", "dt_min", "dt_max", "dt_init_floor", "dt_init", "dt_scale"),  # only how the weights started
        *("residual_in_fp32", "expand"),  # only how sums are rounded; a width that is given by itself
    }
)


FORMATS = {
    "mambakit": Format(read_own, write_own, "model.safetensors"),
    # The official package reads this file only.
    "official": Format(read_official, write_official, "pytorch_model.bin", stores_tied_head=True),
    "transformers": Format(
        *(read_transformers, write_transformers, "model.safetensors"),
        # How A starts is fixed there.
        forgets=frozenset({"vocab_size", "pad_vocab_size_multiple", "A_init_range"}),
    ),
}


def read_config(path: Path) -> tuple[str, Read]:
    """The name of the format and what a `config.json` describes; ValueError names all that is wrong."""
    values = read_json(path)
    name = "transformers" if "model_type" in values else "official"
    if values.get("format") == "mambakit":
        name = "mambakit"
    try:
        return name, FORMATS[name].read(values)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{path}, read in the format {name!r}: {error}") from error


def write_config(config: ModelConfig, name: str) -> Written:
    """The values of `config.json`; ValueError names the fields that the format would not give back."""
    written = write_hub(name, config) if name in HUB else FORMATS[name].write(config)
    kind = FORMATS["transformers" if name in HUB else name]
    found = kind.read(written.values)
    forgets = FORGOTTEN if written.values.get("model_type") in HUB else kind.forgets
    check_lost(config, with_norm_of(config, found), f'the format "{name}"', forgets)
    if "norm_group_size" in found.left_open:
        # Points at the caller of save_model.
        warnings.warn(gated_norm.not_stored(config), UserWarning, stacklevel=4)
    return written


def with_norm_of(config: ModelConfig, found: Read) -> ModelConfig:
    """What was stored, with the gated norm as `config` has it if a file leaves that open and transformers knows it."""
    if "norm_group_size" not in found.left_open:
        return found.config
    width = gated_norm.known_width(config, found.config)
    return found.config if width is None else _chosen(found.config, "transformers", "norm_group_size", width)


def check_lost(config: ModelConfig, stored: ModelConfig, where: str, forgets: frozenset[str]) -> None:
    want, got = described(config), described(stored)
    lost = {
        field: value
        for field, value in want.items()
        if field.rpartition(".")[2] not in forgets and not _alike(value, got.get(field, NotImplemented))
    }
    if lost:
        told = ", ".join(f"{field} = {value!r}" for field, value in lost.items())
        raise ValueError(f'{where} cannot express {told}; "mambakit" can')


def _alike(a: Any, b: Any) -> bool:
    """Equal, but for the rounding of a factor that was stored as a divisor."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=1e-12)
    return a == b


def described(config: ModelConfig) -> dict[str, Any]:
    """All fields by name, with the values that defaults like None stand for."""
    values = {name: value for name, value in asdict(config).items() if name not in ("block", "layers")}
    if config.block is not None:
        return {**values, **_described_block(config.block, "block.")}
    for i, blocks in enumerate(config.blocks):
        for j, block in enumerate(blocks):
            values |= _described_block(block, f"layers[{i}][{j}].")
    return values


def _described_block(block: BlockConfig, where: str) -> dict[str, Any]:
    if isinstance(block, ParallelConfig):
        scales = {f"{where}{name}": getattr(block, name) for name in ("in_scale", "out_scale")}
        return {**scales, **_described_block(block.a, f"{where}a."), **_described_block(block.b, f"{where}b.")}
    family = family_of(block)
    values = {**asdict(block), **{name: getattr(block, by) for name, by in family.resolved.items()}}
    return {f"{where}{name}": value for name, value in {"family": family.name, **values}.items()}


def with_choices(name: str, found: Read, **choices: Any) -> ModelConfig:
    """The config with what the format leaves open as the caller says, or a warning about what is assumed."""
    for field, message in found.left_open.items():
        if choices.get(field) is None:
            # Points at the caller of load_model.
            warnings.warn(message, UserWarning, stacklevel=3)
    config = found.config
    for field, value in choices.items():
        if value is not None:
            config = _chosen(config, name, field, value)
    return config


def _chosen(config: ModelConfig, name: str, field: str, value: Any) -> ModelConfig:
    able = []

    def change(block: Any) -> Any:
        if isinstance(block, ParallelConfig):
            return replace(block, a=change(block.a), b=change(block.b))
        if not family_of(block).has(field):
            return block
        able.append(block)
        return replace(block, **{field: value})

    if config.layers is None:
        changed = replace(config, block=change(config.block))
    else:
        changed = replace(config, layers=tuple(tuple(map(change, blocks)) for blocks in config.layers))
    if not able:
        families = dict.fromkeys(family_of(block).name for blocks in config.blocks for block in blocks)
        raise ValueError(
            f"{field} = {shown(value)} was given, but this is a {' and '.join(families)} model, which has none"
        )
    if name == "mambakit" and described(changed) != described(config):
        said = getattr(able[0], field)
        raise ValueError(f"{field} = {shown(value)} was given, but config.json says {shown(said)}")
    return changed
