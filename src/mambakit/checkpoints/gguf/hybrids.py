"""Hybrid models in GGUF files: their metadata as a `config.json` of transformers, their tensors under its names.

What follows from there is what `checkpoints/hub` says of these models.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from mambakit.blocks.mamba2 import Mamba2Config
from mambakit.checkpoints.formats import Read
from mambakit.checkpoints.gguf.described import NORM_EPS, Described
from mambakit.checkpoints.gguf.mamba import FLATTENED, MIXER1, MIXER2, inside
from mambakit.checkpoints.gguf.tensors import Each, Half, Layout
from mambakit.checkpoints.hub import HUB
from mambakit.checkpoints.hub.jamba import period_of
from mambakit.models.language_model import ModelConfig


class Hybrid(NamedTuple):
    values: dict[str, Any]
    """Of a `config.json`."""
    layout: Layout
    heads: Mapping[str, int] = {}
    """Of the projections whose rows the converter puts in another order."""

    def read(self) -> Read:
        found = HUB[self.values["model_type"]].read(self.values)
        return Read(with_groups(found.config()), found.names)


def with_groups(config: ModelConfig) -> ModelConfig:
    """With gated norms per group, as llama.cpp takes them for all models."""
    layers = config.layers or ()
    grouped = [
        tuple(replace(block, norm_group_size=None) if isinstance(block, Mamba2Config) else block for block in blocks)
        for blocks in layers
    ]
    return replace(config, layers=tuple(grouped))


PROJECTIONS = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
MLP = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}


def both(prefix: str, modules: Mapping[str, str]) -> dict[str, str]:
    """Weights and biases."""
    return {f"{theirs}.{p}": f"{prefix}{ours}.{p}" for theirs, ours in modules.items() for p in ("weight", "bias")}


OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
FINAL = {**OUTSIDE, "output_norm.weight": "model.final_layernorm.weight"}
NORMS = {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "pre_ff_layernorm.weight"}
FALCON_H1 = Layout(
    outside=FINAL,
    layer="model.layers.{}.",
    inside={
        **NORMS,
        "ffn_norm": "pre_ff_layernorm.weight",  # as its converter calls it
        **inside("mamba.", MIXER2),
        **both("self_attn.", PROJECTIONS),
        **both("feed_forward.", MLP),
    },
    flattened=FLATTENED,
)
BAMBA = FALCON_H1
GRANITE = Layout(
    outside={**OUTSIDE, "output_norm.weight": "model.norm.weight"},
    layer="model.layers.{}.",
    inside={
        **{"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"},
        **inside("mamba.", MIXER2),
        **both("self_attn.", PROJECTIONS),
        **{f"ffn_gate{of}.weight": Half("shared_mlp.input_linear.weight", 0) for of in ("", "_shexp")},
        **{f"ffn_up{of}.weight": Half("shared_mlp.input_linear.weight", 1) for of in ("", "_shexp")},
        **{f"ffn_down{of}.weight": "shared_mlp.output_linear.weight" for of in ("", "_shexp")},
        "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
        "ffn_gate_exps.weight": Half("block_sparse_moe.input_linear.weight", 0),
        "ffn_up_exps.weight": Half("block_sparse_moe.input_linear.weight", 1),
        "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
    },
    flattened=FLATTENED,
)
JAMBA = Layout(
    outside=FINAL,
    layer="model.layers.{}.",
    inside={
        **NORMS,
        **inside("mamba.", MIXER1),
        **{f"ssm_{part}_norm.weight": f"mamba.{part}_layernorm.weight" for part in ("dt", "b", "c")},
        **both("self_attn.", PROJECTIONS),
        **both("feed_forward.", MLP),
        "ffn_gate_inp.weight": "feed_forward.router.weight",
        **{f"{theirs}_exps.weight": Each(f"feed_forward.experts.{{}}.{ours}.weight") for theirs, ours in MLP.items()},
    },
)
NEMOTRON = Layout(
    outside={
        "token_embd.weight": "backbone.embeddings.weight",
        "output_norm.weight": "backbone.norm_f.weight",
        "output.weight": "lm_head.weight",
    },
    inside={
        "attn_norm.weight": "norm.weight",
        **inside("mixer.", MIXER2),
        **both("mixer.", {**PROJECTIONS, "ffn_up": "up_proj", "ffn_down": "down_proj"}),
        "ffn_gate_inp.weight": "mixer.gate.weight",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        **{f"ffn_{part}_exps.weight": Each(f"mixer.experts.{{}}.{part}_proj.weight") for part in ("up", "down")},
        **both("mixer.shared_experts.", {"ffn_up_shexp": "up_proj", "ffn_down_shexp": "down_proj"}),
        **both("mixer.", {"ffn_latent_down": "fc1_latent_proj", "ffn_latent_up": "fc2_latent_proj"}),
    },
    flattened=FLATTENED,
)


def read_falcon_h1(file: Described) -> Hybrid:
    """Its multipliers are in the weights; llama.cpp gates before it norms."""
    _, kv = attention_of(file)
    values = {
        **shared(file),
        **mamba2_of(file),
        "model_type": "falcon_h1",
        "num_hidden_layers": file.layers(),
        "intermediate_size": file.size("feed_forward_length"),
        "num_attention_heads": file.size("attention.head_count"),
        "num_key_value_heads": kv,
        "head_dim": file.size("attention.key_length"),
        "rms_norm_eps": file.number(NORM_EPS),
        "mamba_d_ssm": file.size("ssm.inner_size"),
        "mamba_rms_norm": file.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": file.has("ssm_out.bias"),
        "attention_bias": file.has("attn_q.bias"),
        "mlp_bias": file.has("ffn_up.bias"),
        "rope_parameters": rope(file),
    }
    return Hybrid(values, FALCON_H1)


def read_granite(file: Described) -> Hybrid:
    """Granite, or Bamba where there is rope."""
    attends, kv = attention_of(file)
    width, heads = file.size("embedding_length"), file.size("attention.head_count")
    values = {
        **shared(file),
        **mamba2_of(file),
        "num_hidden_layers": file.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rms_norm_eps": file.number(NORM_EPS),
        "mamba_expand": file.size("ssm.inner_size") // width,
        "intermediate_size": file.size("feed_forward_length"),
        "attention_bias": file.has("attn_q.bias"),
    }
    permuted = {"attn_q": heads, "attn_k": kv}
    if file.values.get("rope.scaling.finetuned"):
        fraction = file.size("rope.dimension_count") * heads / width
        values |= {
            "model_type": "bamba",
            "attn_layer_indices": [i for i, one in enumerate(attends) if one],
            "rope_parameters": {**rope(file), "partial_rotary_factor": fraction},
            "mlp_bias": file.has("ffn_up.bias"),
        }
        return Hybrid(values, BAMBA, permuted)
    experts = {"num_local_experts": 0}
    if file.values.get("expert_count"):
        experts = {
            "num_local_experts": file.size("expert_count"),
            "num_experts_per_tok": file.size("expert_used_count"),
        }
    values |= {
        **experts,
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if one else "mamba" for one in attends],
        "shared_intermediate_size": file.size("expert_shared_feed_forward_length"),
        "attention_multiplier": file.number("attention.scale", (width / heads) ** -0.5),
        "embedding_multiplier": file.number("embedding_scale", 1.0),
        "residual_multiplier": file.number("residual_scale", 1.0),
        "logits_scaling": file.number("logit_scale", 1.0),
    }
    return Hybrid(values, GRANITE, permuted)


def read_jamba(file: Described) -> Hybrid:
    attends, kv = attention_of(file)
    experts = [f"blk.{i}.ffn_gate_inp.weight" in file.tensors for i in range(file.layers())]
    period, offset = period_of(attends, "attention")
    every, first = period_of(experts, "experts")
    values = {
        **shared(file),
        "model_type": "jamba",
        "num_hidden_layers": file.layers(),
        "intermediate_size": file.size("feed_forward_length"),
        "num_attention_heads": file.size("attention.head_count"),
        "num_key_value_heads": kv,
        "rms_norm_eps": file.number(NORM_EPS),
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "expert_layer_period": every,
        "expert_layer_offset": first,
        "num_experts": file.size("expert_count") if any(experts) else 1,
        "num_experts_per_tok": file.size("expert_used_count") if any(experts) else 1,
        "mamba_d_state": file.size("ssm.state_size"),
        "mamba_d_conv": file.size("ssm.conv_kernel"),
        "mamba_expand": file.size("ssm.inner_size") // file.size("embedding_length"),
        "mamba_dt_rank": file.size("ssm.time_step_rank"),
        "mamba_conv_bias": file.has("ssm_conv1d.bias"),
        "mamba_proj_bias": file.has("ssm_in.bias"),
    }
    return Hybrid(values, JAMBA)


def read_nemotron(file: Described) -> Hybrid:
    """With dt as llama.cpp has it, without limits."""
    if file.values.get("nextn_predict_layers"):
        file.lint.refuse("it has a layer that predicts further tokens; convert the model with --no-mtp")
    attends, kv = attention_of(file)
    widths = file.each_layer("feed_forward_length")
    experts = [f"blk.{i}.ffn_gate_inp.weight" in file.tensors for i in range(len(widths))]
    layers = zip(attends, widths, experts, strict=True)
    kinds = ["attention" if a else "moe" if e else "mlp" if width else "mamba" for a, width, e in layers]
    heads, inner = file.size("ssm.time_step_rank"), file.size("ssm.inner_size")
    values = {
        **shared(file),
        "model_type": "nemotron_h",
        "layers_block_type": kinds,
        "num_attention_heads": file.size("attention.head_count"),
        "num_key_value_heads": kv,
        "head_dim": file.size("attention.key_length"),
        "intermediate_size": max(widths, default=0) or 1,
        "layer_norm_epsilon": file.number(NORM_EPS),
        "ssm_state_size": file.size("ssm.state_size"),
        "conv_kernel": file.size("ssm.conv_kernel"),
        "n_groups": file.size("ssm.group_count"),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "use_conv_bias": file.has("ssm_conv1d.bias"),
        "use_bias": file.has("ssm_in.bias"),
        "mlp_bias": file.has("ffn_up.bias"),
    }
    if any(experts):
        values |= {
            "n_routed_experts": file.size("expert_count"),
            "num_experts_per_tok": file.size("expert_used_count"),
            "moe_intermediate_size": file.size("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": file.size("expert_shared_feed_forward_length"),
            "moe_latent_size": file.values.get("moe_latent_size"),
            "norm_topk_prob": bool(file.values.get("expert_weights_norm", True)),
            "routed_scaling_factor": file.number("expert_weights_scale", 1.0),
            "n_group": file.values.get("expert_group_count", 1),
            "topk_group": file.values.get("expert_group_used_count", 1),
        }
    return Hybrid(values, NEMOTRON, {"attn_q": file.size("attention.head_count"), "attn_k": kv})


def shared(file: Described) -> dict[str, Any]:
    return {
        "vocab_size": file.vocabulary(),
        "tie_word_embeddings": file.is_tied(),
        "hidden_size": file.size("embedding_length"),
    }


def mamba2_of(file: Described) -> dict[str, Any]:
    heads, inner = file.size("ssm.time_step_rank"), file.size("ssm.inner_size")
    if inner % heads:
        file.lint.refuse(f"{file.architecture}.ssm.inner_size = {inner} is not a multiple of the {heads} heads")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": file.size("ssm.group_count"),
        "mamba_d_state": file.size("ssm.state_size"),
        "mamba_d_conv": file.size("ssm.conv_kernel"),
        "mamba_conv_bias": file.has("ssm_conv1d.bias"),
        "mamba_proj_bias": file.has("ssm_in.bias"),
    }


def attention_of(file: Described) -> tuple[list[bool], int]:
    """Which layers have attention, and with how many heads of keys and values."""
    counts = file.each_layer("attention.head_count_kv")
    different = sorted(set(counts) - {0})
    if len(different) > 1 or (different and different[0] < 0):
        file.lint.refuse(f"{file.architecture}.attention.head_count_kv has {different}, expected one number beside 0")
    return [count > 0 for count in counts], different[0] if different else 1


def rope(file: Described) -> dict[str, Any]:
    return {"rope_theta": file.number("rope.freq_base", 10000.0), "rope_type": "default"}


HYBRIDS: dict[str, Callable[[Described], Hybrid]] = {
    "falcon-h1": read_falcon_h1,
    "granitehybrid": read_granite,
    "jamba": read_jamba,
    "nemotron_h": read_nemotron,
    "nemotron_h_moe": read_nemotron,
}
