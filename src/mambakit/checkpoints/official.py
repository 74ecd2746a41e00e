"""The config of the official package, as its `save_pretrained` writes it. The weights are named as in our models."""

from dataclasses import fields
from typing import Any

from mambakit.blocks.family import FAMILIES, family_of
from mambakit.checkpoints.fields import Lint, renamed, same, shown
from mambakit.models.language_model import ModelConfig

DEFAULTS = {"d_model": 2560, "n_layer": 64, "vocab_size": 50277}
"""Where the official config has a default and ours has none. All other defaults are the same in both."""

MODEL = {
    **same("d_intermediate", "n_layer", "vocab_size", "rms_norm", "residual_in_fp32"),
    **same("pad_vocab_size_multiple", "tie_embeddings"),
}
WIDTH = same("d_model")
HEADS = {"d_state": "state_rank", "headdim": "per_head_dim", **same("expand", "ngroups")}
STEP_SIZES = same("dt_min", "dt_max", "dt_init_floor")
BLOCK = {
    "mamba1": {
        "d_state": "state_rank",
        "d_conv": "conv_kernel",
        **same("expand", "dt_rank", "dt_init", "dt_scale", "conv_bias", "bias"),
        **STEP_SIZES,
    },
    "mamba2": {
        "d_conv": "conv_kernel",
        **same("d_ssm", "A_init_range", "D_has_hdim", "rmsnorm", "norm_before_gate", "dt_limit", "conv_bias", "bias"),
        **HEADS,
        **STEP_SIZES,
    },
    "mamba3": {
        "A_floor": "a_floor",
        **same("rope_fraction", "is_mimo", "mimo_rank", "is_outproj_norm"),
        **HEADS,
        **STEP_SIZES,
    },
}
LAYERS = {FAMILIES[family].block.__name__: family for family in BLOCK}
"""What it calls a block, as we do."""
IGNORED = {"fused_add_norm", "attn_cfg"}
IGNORED_IN_BLOCK = {
    *("layer", "chunk_size", "use_fast_path", "use_mem_eff_path", "layer_idx", "process_group"),
    *("sequence_parallel", "dropout", "n_layer", "fuse_pregate_headwise_norm"),
    "conv_init",  # only how the weights started
}


def read(values: dict[str, Any]) -> ModelConfig:
    values = {**DEFAULTS, **{name: value for name, value in values.items() if name not in IGNORED}}
    attention, ssm = values.pop("attn_layer_idx", None), values.pop("ssm_cfg", None) or {}
    lint = Lint()
    lint.unknown(values, MODEL | WIDTH)
    lint.types(ModelConfig, values, MODEL)
    if attention:
        lint.add(f"attn_layer_idx = {shown(attention)}: layers of attention are not supported, only Mamba layers")
    layer = ssm.get("layer", "Mamba1") if isinstance(ssm, dict) else ssm
    if not isinstance(layer, str) or layer not in LAYERS:
        lint.add(f"ssm_cfg.layer = {shown(layer)} is unknown, expected one of {', '.join(LAYERS)}")
        lint.close()
    family = LAYERS[layer]
    ssm = {name: value for name, value in ssm.items() if name not in IGNORED_IN_BLOCK}
    lint.unknown(ssm, BLOCK[family], "ssm_cfg.")
    lint.types(FAMILIES[family].config, values, WIDTH)
    lint.types(FAMILIES[family].config, ssm, BLOCK[family], "ssm_cfg.")
    if ssm.get("rope_fraction") == 0:
        lint.add("ssm_cfg.rope_fraction = 0, expected 0.5 or 1")
    config = lint.build(family, renamed(values, MODEL), {**renamed(values, WIDTH), **renamed(ssm, BLOCK[family])})
    lint.close()
    return config


def write(config: ModelConfig) -> dict[str, Any]:
    """As the official package writes it, and of the block only what is not at its default."""
    own: Any = config.block
    family = family_of(own).name
    defaults = {field.name: field.default for field in fields(own)}
    block = {name: getattr(own, ours) for name, ours in BLOCK[family].items()}
    if family == "mamba2":
        # The official block takes no other; a fraction does not come back and is refused.
        block["expand"] = int(block["expand"])
    changed = {name: value for name, value in block.items() if value != defaults[BLOCK[family][name]]}
    return {
        "d_model": config.d_model,
        **{name: getattr(config, ours) for name, ours in MODEL.items()},
        "ssm_cfg": {"layer": next(layer for layer, ours in LAYERS.items() if ours == family), **changed},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "fused_add_norm": True,
    }
