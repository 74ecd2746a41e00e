"""Granite 4 hybrids: Mamba-2 or attention, then a gated MLP or experts with a shared one."""

from dataclasses import dataclass
from typing import Any

from mambakit.blocks.attention import AttentionConfig
from mambakit.blocks.config import BlockConfig
from mambakit.blocks.mamba2 import Mamba2Config
from mambakit.blocks.mlp import MLPConfig
from mambakit.blocks.moe import MoEConfig
from mambakit.checkpoints.fields import shown
from mambakit.checkpoints.hub.fields import (
    ATTENTION,
    MAMBA,
    HubConfig,
    activation,
    attention_fields,
    check_layers,
    expect_kinds,
    grouped_norm,
    head_width,
    mamba2_block,
    mamba2_fields,
    only,
    rope_of,
    their_activation,
)
from mambakit.checkpoints.names import Names, Swapped
from mambakit.models.language_model import ModelConfig


@dataclass(kw_only=True)
class GraniteMoeHybrid(HubConfig):
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    rope_theta: float | None = None
    rope_scaling: dict | None = None
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = 1024
    position_embedding_type: str | None = None
    layer_types: tuple[str, ...] | None = None
    layers_block_type: tuple[str, ...] | None = None
    """What older files call `layer_types`."""
    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_head: int | str | None = "auto"
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] | None = (0.0, float("inf"))

    model_type = "granitemoehybrid"
    architecture = "GraniteMoeHybridForCausalLM"
    names = Names(
        embedding="model.embed_tokens.weight",
        norm_f="model.norm.",
        layer="model.layers.{}.",
        norms=("input_layernorm.", "post_attention_layernorm."),
        blocks={"mamba2": "mamba.", "attention": "self_attn.", "mlp": "shared_mlp.", "moe": ""},
        tables={
            "attention": {"in_proj": ("q_proj", "k_proj", "v_proj"), "out_proj": "o_proj"},
            "mlp": {"fc1": Swapped("input_linear"), "fc2": "output_linear"},
            "moe": {
                "router": "block_sparse_moe.router.layer",
                "experts_in": Swapped("block_sparse_moe.input_linear.weight"),
                "experts_out": "block_sparse_moe.output_linear.weight",
                "shared.fc1": Swapped("shared_mlp.input_linear"),
                "shared.fc2": "shared_mlp.output_linear",
            },
        },
    )
    unread = {"mamba_chunk_size", "normalization_function", "init_method", "time_step_min", "time_step_max"}  # noqa: RUF012
    unread |= {"time_step_floor", "mlp_bias"}

    def kinds(self) -> list[bool]:
        """Whether each layer has attention."""
        given = self.layer_types or self.layers_block_type
        check_layers("num_hidden_layers", self.num_hidden_layers)
        if given is None:
            return [False] * self.num_hidden_layers
        if wrong := sorted(set(given) - {*ATTENTION, *MAMBA}):
            raise ValueError(f"layer_types has {', '.join(map(shown, wrong))}, expected only mamba and attention")
        if len(given) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(given)} entries for num_hidden_layers = {self.num_hidden_layers}")
        return [one in ATTENTION for one in given]

    def config(self) -> ModelConfig:
        width, act, kinds = self.hidden_size, activation("hidden_act", self.hidden_act), self.kinds()
        if self.position_embedding_type not in (None, "rope", "nope"):
            raise ValueError(f"position_embedding_type = {shown(self.position_embedding_type)}, expected rope or null")
        theta, fraction = rope_of(self.rope_parameters, self)
        mixers: dict[bool, BlockConfig] = {}
        for attends in dict.fromkeys(kinds):
            if not attends:
                mixers[attends] = mamba2_block(self, eps=self.rms_norm_eps)
                continue
            mixers[attends] = AttentionConfig(
                width,
                self.num_attention_heads,
                self.num_key_value_heads,
                head_width(width, self.num_attention_heads, self.head_dim),
                scale=float(self.attention_multiplier),
                rope_theta=theta if self.position_embedding_type == "rope" else None,
                rope_fraction=fraction if self.position_embedding_type == "rope" else 1.0,
                bias=self.attention_bias,
            )
        tail: BlockConfig = MLPConfig(width, self.shared_intermediate_size, activation=act)
        if self.num_local_experts > 0:
            tail = MoEConfig(
                width,
                self.intermediate_size,
                self.num_local_experts,
                self.num_experts_per_tok,
                router="softmax_chosen",
                activation=act,
                d_shared=self.shared_intermediate_size,
            )
        return ModelConfig(
            layers=tuple((mixers[attends], tail) for attends in kinds),
            vocab_size=self.vocab_size,
            pad_vocab_size_multiple=1,
            tie_embeddings=self.tie_word_embeddings,
            norm_eps=self.rms_norm_eps,
            residual_scale=float(self.residual_multiplier),
            residual_in_fp32=False,
            embedding_scale=float(self.embedding_multiplier),
            logits_scale=1 / self.logits_scaling,
        )

    @classmethod
    def of(cls, config: ModelConfig) -> "GraniteMoeHybrid":
        heads, tails = ("Mamba2", "Attention"), ("MLP", "MoE")
        found = expect_kinds(config, *((head, tail) for tail in tails for head in heads))
        mlp, moe, attention = only(config, MLPConfig), only(config, MoEConfig), only(config, AttentionConfig)
        if mlp is not None and moe is not None:
            raise ValueError("some of its layers have an MLP and some experts, where all are alike")
        values: dict[str, Any] = attention_fields(attention)
        if attention is not None:
            values |= {"attention_multiplier": attention.softmax_scale, "attention_bias": attention.bias}
            values["position_embedding_type"] = None if attention.rope_theta is None else "rope"
            if attention.rope_theta is not None:
                values["rope_parameters"] = {"rope_theta": attention.rope_theta, "rope_type": "default"}
        if mlp is not None:
            values |= {"num_local_experts": 0, "shared_intermediate_size": mlp.d_hidden}
        if moe is not None:
            values |= {"num_local_experts": moe.n_experts, "num_experts_per_tok": moe.top_k}
            values |= {"intermediate_size": moe.d_hidden, "shared_intermediate_size": moe.d_shared}
        tail = mlp or moe
        return cls(
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layer,
            layer_types=tuple("attention" if kind == "Attention" else "mamba" for kind, _ in found),
            hidden_act=their_activation(tail.activation if tail else "silu"),
            vocab_size=config.padded_vocab_size,
            tie_word_embeddings=config.tie_embeddings,
            rms_norm_eps=config.norm_eps,
            residual_multiplier=config.residual_scale,
            embedding_multiplier=config.embedding_scale,
            logits_scaling=1 / config.logits_scale,
            **values,
            **mamba2_fields(only(config, Mamba2Config)),
        )

    def left_open(self) -> dict[str, str]:
        return {} if all(self.kinds()) else grouped_norm(self)
