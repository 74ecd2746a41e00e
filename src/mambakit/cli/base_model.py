"""The model that a training run starts from, and what its options may say of it."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mambakit.blocks.family import family_of
from mambakit.blocks.mlp import MLPConfig
from mambakit.blocks.parallel import ParallelConfig
from mambakit.checkpoints import load_model
from mambakit.checkpoints.files import find_directory
from mambakit.cli.layers import model_config
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.models.lora import TARGETS, add_lora
from mambakit.text.tokenizer import find_tokens
from mambakit.text.tokens import Bytes, Tokens, read_tokens

SIZES = ("family", "d_model", "layers", "state_rank", "head_dim", "mimo_rank", "mlp", "heads", "window", "experts")
"""Options that describe a model, which is there already where one is fine-tuned."""


class Start(NamedTuple):
    model: LanguageModel
    tokens: Tokens
    folder: Path | None
    """Where the tokenizer is described, if anywhere."""
    description: Path | None = None
    """The same, where all of it goes along with what is trained."""


def begin(options: dict[str, Any], given: Iterable[str]) -> Start:
    """A fresh model of the sizes that the options give, or the one to fine-tune, with its sizes noted in the options.

    Sizes among those `given` that contradict it raise ValueError.
    """
    check(options)
    torch.manual_seed(options["seed"])
    if options["init"] is None:
        tokens, folder = find_tokens(options["tokenizer"]) if options["tokenizer"] else (Bytes(), None)
        return Start(LanguageModel(model_config(options, tokens.vocab_size)), tokens, folder)
    place = Path(options["init"])
    place = place if place.is_file() else find_directory(options["init"])
    tokens, folder = find_tokens(options["tokenizer"]) if options["tokenizer"] else (read_tokens(place), place)
    model = load_model(place, dtype=torch.float32)
    compare(options, given, model.config)
    if tokens.vocab_size > model.config.vocab_size:
        known = model.config.vocab_size
        raise ValueError(
            f"the tokenizer has {tokens.vocab_size} tokens, the end of a document among them, but {options['init']} "
            f"knows {known}"
        )
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if options.setdefault("weights", digest.hexdigest()) != digest.hexdigest():
        raise ValueError(
            f"the weights in {options['init']} have changed since the run began; it goes on with those only"
        )
    if options["lora"]:
        targets = options["lora_targets"].split(",") if options["lora_targets"] else TARGETS
        add_lora(model, options["lora"], alpha=options["lora_alpha"], targets=targets)
    return Start(model, tokens, folder, None if options["tokenizer"] else place)


def check(options: Mapping[str, Any]) -> None:
    """ValueError where options for fine-tuning stand without what they are for, or against each other."""
    if options["init"] is None and (options["lora"] is not None or options["full"]):
        raise ValueError(f"--{'full' if options['full'] else 'lora'} says how to fine-tune, and --init MODEL says what")
    if options["lora"] is not None and options["full"]:
        raise ValueError("--lora trains adapters and --full all weights; choose one")
    if options["lora"] is None and (options["lora_alpha"] is not None or options["lora_targets"]):
        raise ValueError("--lora-alpha and --lora-targets are for --lora")
    if options["lora"] is not None and options["optimizer"] == "muon":
        raise ValueError("--optimizer muon is for whole projections; adapters are trained by adamw")


def compare(options: dict[str, Any], given: Iterable[str], config: ModelConfig) -> None:
    """Sizes that were given have to be the model's; the others become it."""
    for name in SIZES:
        found = sorted(set(_sizes(config, name)), key=str)
        if name in given and found != [options[name]]:
            has = " and ".join(map(str, found)) or "none"
            told = f"--{name.replace('_', '-')} {options[name]} contradicts {options['init']}, which has {has}"
            raise ValueError(f"{told}; leave it out, sizes come from the model")
        if len(found) == 1:
            options[name] = found[0]


def _sizes(config: ModelConfig, option: str) -> Iterator[Any]:
    """What the model has of what an option is about."""
    if option == "layers":
        yield str(config.n_layer)
        return
    for block in _blocks(block for blocks in config.blocks for block in blocks):
        fields = {
            "family": family_of(block).name if family_of(block).alone else None,
            "mlp": block.d_hidden if isinstance(block, MLPConfig) else None,
            **{name: getattr(block, name, None) for name in ("d_model", "state_rank", "window")},
            "head_dim": getattr(block, "per_head_dim", None),
            "mimo_rank": getattr(block, "ranks", None),
            "heads": getattr(block, "n_heads", None),
            "experts": getattr(block, "n_experts", None),
        }
        if fields[option] is not None:
            yield fields[option]


def _blocks(blocks: Iterable[Any]) -> Iterator[Any]:
    for block in blocks:
        if isinstance(block, ParallelConfig):
            yield from _blocks((block.a, block.b))
        else:
            yield block
