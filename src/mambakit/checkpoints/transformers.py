"""The configs of Mamba and Mamba2 in transformers. Their weights are named as ours, but for the embedding."""

import math
from collections.abc import Callable
from typing import Any, get_type_hints

from mambakit.blocks.family import FAMILIES, family_of
from mambakit.checkpoints.fields import Lint, renamed, same, shown
from mambakit.models.language_model import ModelConfig

FAMILY = {"mamba": "mamba1", "mamba2": "mamba2"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mamba1": {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32},
    "mamba2": {
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "n_groups": 8,
        "tie_word_embeddings": False,
    },
}
"""Where its default is not ours. All other defaults are the same in both."""

MODEL = {
    "num_hidden_layers": "n_layer",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    **same("vocab_size", "residual_in_fp32"),
}
SHARED = {
    "hidden_size": "d_model",
    "state_size": "state_rank",
    "use_bias": "bias",
    "use_conv_bias": "conv_bias",
    "time_step_min": "dt_min",
    "time_step_max": "dt_max",
    "time_step_floor": "dt_init_floor",
    **same("expand", "conv_kernel"),
}
BLOCK = {
    "mamba1": {
        "time_step_rank": "dt_rank",
        "time_step_scale": "dt_scale",
        "time_step_init_scheme": "dt_init",
        **SHARED,
    },
    "mamba2": {
        "head_dim": "per_head_dim",
        "n_groups": "ngroups",
        "time_step_limit": "dt_limit",
        "layer_norm_epsilon": "norm_eps",  # of the gated norm, as of all others
        **SHARED,
    },
}
IGNORED = {
    *("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "return_dict", "output_hidden_states"),
    *("chunk_size", "use_associative_scan", "use_mambapy", "_attn_implementation_autoset"),
    *("initializer_range", "rescale_prenorm_residual"),  # only how the weights started
    *("fused_add_norm", "pad_vocab_size_multiple"),  # left over from official files; vocab_size is padded already
    "norm_before_gate",  # in older Mamba-2 files, and never read: the gate comes first
}
IGNORED_IN = {"mamba1": set(), "mamba2": {"time_step_rank", "time_step_scale", "time_step_init_scheme"}}


IMPLIED: dict[str, Callable[[Any], Any]] = {
    "hidden_act": lambda config: "silu",
    "intermediate_size": lambda config: inner_width(config.block),
    # Left over from official files.
    "d_inner": lambda config: inner_width(config.block),
    "d_model": lambda config: config.block.d_model,
    "n_layer": lambda config: config.n_layer,
    "rms_norm": lambda config: True,
    "ssm_cfg": lambda config: {},
}
"""Fields that repeat others, or have one value in every model here."""
IMPLIED_IN: dict[str, dict[str, Callable[[Any], Any]]] = {
    "mamba1": IMPLIED,
    "mamba2": {**IMPLIED, "num_heads": lambda config: config.block.nheads},
}


def inner_width(block: Any) -> int:
    return block.inner_width if hasattr(block, "inner_width") else block.d_inner


def read(values: dict[str, Any]) -> ModelConfig:
    """The gated norm of Mamba-2 is taken per group, as in the official code."""
    model_type = values["model_type"]
    family = FAMILY[model_type]
    implied = IMPLIED_IN[family]
    values = {name: value for name, value in values.items() if name not in IGNORED | IGNORED_IN[family]}
    values = {**DEFAULTS[family], **values}
    lint = Lint()
    lint.unknown(values, MODEL.keys() | BLOCK[family].keys() | implied.keys())
    lint.types(ModelConfig, values, MODEL)
    lint.types(FAMILIES[family].config, values, BLOCK[family])
    # The vocabulary is padded already.
    model = {**renamed(values, MODEL), "pad_vocab_size_multiple": 1}
    config = lint.build(family, model, renamed(values, BLOCK[family]))
    for name in implied.keys() & values.keys():
        if values[name] != implied[name](config):
            lint.add(f"{name} = {shown(values[name])}, but only {implied[name](config)!r} goes with the other fields")
    lint.close()
    return config


def write(config: ModelConfig) -> dict[str, Any]:
    family = family_of(config.block).name
    model_type, block = next(name for name, ours in FAMILY.items() if ours == family), config.block
    of_block = {name: _exact(getattr(block, ours), type(block), ours) for name, ours in BLOCK[family].items()}
    written = {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "model_type": model_type,
        **{name: _exact(getattr(config, ours), ModelConfig, ours) for name, ours in MODEL.items()},
        "vocab_size": config.padded_vocab_size,
        **of_block,
        # A fraction does not come back and is refused.
        "expand": int(of_block["expand"]),
        # Its defaults are the tokens of one tokenizer, which this model need not have.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if "num_heads" in IMPLIED_IN[family]:
        written["num_heads"] = IMPLIED_IN[family]["num_heads"](config)
    if written.get("time_step_limit") == [0.0, math.inf]:
        # The default. Versions differ in how they write infinity, which is not JSON.
        del written["time_step_limit"]
    return written


def _exact(value: Any, kind: type, ours: str) -> Any:
    """Numbers in the type that transformers insists on."""
    if isinstance(value, tuple):
        return [float(item) for item in value]
    return float(value) if get_type_hints(kind)[ours] is float else value
