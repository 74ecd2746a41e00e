"""Bamba: Mamba-2 or attention, then a gated MLP."""

from dataclasses import dataclass
from typing import Any

from mambakit.blocks.attention import AttentionConfig
from mambakit.blocks.config import BlockConfig
from mambakit.blocks.mamba2 import Mamba2Config
from mambakit.blocks.mlp import MLPConfig
from mambakit.checkpoints.fields import shown
from mambakit.checkpoints.hub.fields import (
    DECODER,
    FEED_FORWARD,
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
from mambakit.checkpoints.names import Names
from mambakit.models.language_model import ModelConfig


@dataclass(kw_only=True)
class Bamba(HubConfig):
    vocab_size: int = 128000
    tie_word_embeddings: bool = False
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attn_layer_indices: tuple[int, ...] | None = None
    mamba_n_heads: int = 128
    mamba_d_head: int | str | None = "auto"
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] | None = (0.0, float("inf"))
    rope_parameters: dict | None = None
    rope_theta: float | None = None
    rope_scaling: dict | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    model_type = "bamba"
    architecture = "BambaForCausalLM"
    names = Names(
        **DECODER,
        blocks={"mamba2": "mamba.", "attention": "self_attn.", "mlp": "feed_forward."},
        tables=FEED_FORWARD,
    )
    unread = {  # noqa: RUF012  # data
        *("mamba_chunk_size", "attn_rotary_emb", "partial_rotary_factor", "time_step_min", "time_step_max"),
        "time_step_floor",
    }

    def attends(self) -> list[bool]:
        """Whether each layer has attention."""
        n, given = self.num_hidden_layers, self.attn_layer_indices or ()
        check_layers("num_hidden_layers", n)
        if wrong := [i for i in given if not 0 <= i < n]:
            raise ValueError(f"attn_layer_indices names layers {shown(wrong)}, but there are 0 to {n - 1}")
        return [i in set(given) for i in range(n)]

    def config(self) -> ModelConfig:
        attends, width = self.attends(), self.hidden_size
        theta, _ = rope_of(self.rope_parameters, self)
        # Half of the channels, whatever older files leave out.
        fraction = (self.rope_parameters or {}).get("partial_rotary_factor", 0.5)
        mixers: dict[bool, BlockConfig] = {}
        if any(attends):
            mixers[True] = AttentionConfig(
                width,
                self.num_attention_heads,
                self.num_key_value_heads,
                head_width(width, self.num_attention_heads, self.head_dim),
                rope_theta=theta,
                rope_fraction=float(fraction),
                bias=self.attention_bias,
            )
        if not all(attends):
            mixers[False] = mamba2_block(self, eps=self.rms_norm_eps)
        act = activation("hidden_act", self.hidden_act)
        mlp = MLPConfig(width, self.intermediate_size, activation=act, bias=self.mlp_bias)
        return ModelConfig(
            layers=tuple((mixers[one], mlp) for one in attends),
            vocab_size=self.vocab_size,
            pad_vocab_size_multiple=1,
            tie_embeddings=self.tie_word_embeddings,
            norm_eps=self.rms_norm_eps,
            residual_in_fp32=False,
        )

    @classmethod
    def of(cls, config: ModelConfig) -> "Bamba":
        found = expect_kinds(config, ("Mamba2", "MLP"), ("Attention", "MLP"))
        mlp, attention = only(config, MLPConfig), only(config, AttentionConfig)
        assert mlp is not None
        values: dict[str, Any] = attention_fields(attention)
        if attention is not None:
            if attention.rope_theta is None:
                raise ValueError("its attention has no rope")
            rope = {"rope_theta": attention.rope_theta, "partial_rotary_factor": attention.rope_fraction}
            values |= {"rope_parameters": {**rope, "rope_type": "default"}, "attention_bias": attention.bias}
        return cls(
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layer,
            attn_layer_indices=tuple(i for i, (kind, _) in enumerate(found) if kind == "Attention"),
            intermediate_size=mlp.d_hidden,
            hidden_act=their_activation(mlp.activation),
            mlp_bias=mlp.bias,
            vocab_size=config.padded_vocab_size,
            tie_word_embeddings=config.tie_embeddings,
            rms_norm_eps=config.norm_eps,
            **values,
            **mamba2_fields(only(config, Mamba2Config)),
        )

    def left_open(self) -> dict[str, str]:
        return {} if all(self.attends()) else grouped_norm(self)
