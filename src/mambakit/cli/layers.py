"""The model that the options of a training run describe."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mambakit.blocks.attention import AttentionConfig
from mambakit.blocks.config import BlockConfig
from mambakit.blocks.family import FAMILIES
from mambakit.blocks.mlp import MLPConfig
from mambakit.blocks.moe import MoEConfig
from mambakit.models.language_model import ModelConfig
from mambakit.models.patterns import read_pattern

NAMES = {"M1": "mamba1", "M2": "mamba2", "M3": "mamba3", "A": "attention", "F": "mlp", "E": "moe"}
"""What a pattern calls a family."""
ROPE_THETA = 10_000.0


def model_config(options: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    layers, family = str(options["layers"]), options["family"]
    if options["mimo_rank"] != 1 and not FAMILIES[family].has("mimo_rank"):
        able = [name for name, other in FAMILIES.items() if other.has("mimo_rank")]
        raise ValueError(f"--mimo-rank is for {' and '.join(able)}, and --family is {family}")
    if not FAMILIES[family].alone:
        raise ValueError(f"--family {family} makes no model alone; name all blocks by a pattern in --layers")
    if layers.strip().lstrip("+-").isdigit():
        count, block = int(layers), configure(family, options)
        return ModelConfig(block=block, n_layer=count, vocab_size=vocab_size, d_intermediate=options["mlp"])
    blocks: dict[str, Callable[[], BlockConfig]] = {
        name: partial(configure, family, options) for name, family in NAMES.items()
    }
    return ModelConfig(layers=read_pattern(layers, blocks), vocab_size=vocab_size)


def configure(family: str, options: Mapping[str, Any]) -> BlockConfig:
    """A block of the sizes that the options give."""
    width = options["d_model"]
    if family == "attention":
        heads = options["heads"] or max(1, width // options["head_dim"])
        window = options["window"] or options["seq_len"]
        return AttentionConfig(width, heads, rope_theta=ROPE_THETA, window=window)
    # Of a gated MLP with as many parameters as an ungated one of four times the width has.
    hidden = options["mlp"] or -(-8 * width // 3 // 64) * 64
    if family == "mlp":
        return MLPConfig(width, hidden)
    if family == "moe":
        return MoEConfig(width, hidden, options["experts"], min(2, options["experts"]))
    record, ranks = FAMILIES[family], options["mimo_rank"]
    sizes = {name: options[name] for name in ("d_model", "state_rank", "mimo_rank")}
    given = {**sizes, "per_head_dim": options["head_dim"], "is_mimo": ranks > 1}
    return record.configure(record.at_hand, given)
