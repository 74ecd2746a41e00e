"""Falcon-H1: Mamba-2 and attention side by side, then a gated MLP, with multipliers everywhere."""

from dataclasses import dataclass

from mambakit.blocks.attention import AttentionConfig
from mambakit.blocks.mamba2 import Mamba2Config
from mambakit.blocks.mlp import MLPConfig
from mambakit.blocks.parallel import ParallelConfig
from mambakit.checkpoints.hub.fields import (
    DECODER,
    FEED_FORWARD,
    HubConfig,
    activation,
    as_limit,
    attention_fields,
    check_layers,
    expect_kinds,
    head_width,
    inner_width,
    mamba2_fields,
    only,
    rope_of,
    their_activation,
)
from mambakit.checkpoints.names import Names
from mambakit.models.language_model import ModelConfig

ONES = (1.0,) * 5


@dataclass(kw_only=True)
class FalconH1(HubConfig):
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
    mamba_d_ssm: int | None = 1024
    mamba_n_heads: int = 128
    mamba_d_head: int | str | None = "auto"
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    time_step_limit: tuple[float, float] | None = (0.0, float("inf"))
    projectors_bias: bool = False
    rope_parameters: dict | None = None
    rope_theta: float | None = None
    rope_scaling: dict | None = None
    lm_head_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] | None = None
    key_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    ssm_multipliers: tuple[float, float, float, float, float] | None = None
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    attention_bias: bool = False
    mlp_bias: bool = False

    model_type = "falcon_h1"
    architecture = "FalconH1ForCausalLM"
    names = Names(
        **DECODER,
        blocks={"mamba2": "mamba.", "attention": "self_attn.", "mlp": "feed_forward."},
        tables=FEED_FORWARD,
    )
    unread = {  # noqa: RUF012  # data
        *("mamba_chunk_size", "attn_layer_indices", "mamba_use_mlp", "mlp_expansion_factor", "time_step_min"),
        *("time_step_max", "time_step_floor", "layer_types", "layers_block_type"),
    }

    def config(self) -> ModelConfig:
        width = self.hidden_size
        check_layers("num_hidden_layers", self.num_hidden_layers)
        if self.mamba_proj_bias != self.projectors_bias:
            both = f"mamba_proj_bias = {self.mamba_proj_bias} and projectors_bias = {self.projectors_bias}"
            raise ValueError(f"{both}: biases of one of the projections only are not supported")
        # Of a width that is given, the expansion says nothing.
        if self.mamba_d_ssm is None:
            inner = inner_width(self.mamba_expand, width, self.mamba_n_heads, self.mamba_d_head)
        else:
            inner = inner_width(1, self.mamba_d_ssm, self.mamba_n_heads, self.mamba_d_head)
        multipliers = tuple(map(float, self.ssm_multipliers or ONES))
        gate, down = map(float, self.mlp_multipliers or (1.0, 1.0))
        mamba = Mamba2Config(
            d_model=width,
            d_inner=inner,
            state_rank=self.mamba_d_state,
            per_head_dim=inner // self.mamba_n_heads,
            ngroups=self.mamba_n_groups,
            conv_kernel=self.mamba_d_conv,
            rmsnorm=self.mamba_rms_norm,
            norm_before_gate=self.mamba_norm_before_gate and self.mamba_rms_norm,
            norm_eps=self.rms_norm_eps,
            dt_limit=as_limit(self.time_step_limit),
            conv_bias=self.mamba_conv_bias,
            bias=self.mamba_proj_bias,
            ssm_multipliers=None if multipliers == ONES else multipliers,  # type: ignore[arg-type]  # five of them
            in_scale=float(self.ssm_in_multiplier),
            out_scale=float(self.ssm_out_multiplier),
        )
        theta, fraction = rope_of(self.rope_parameters, self)
        attention = AttentionConfig(
            width,
            self.num_attention_heads,
            self.num_key_value_heads,
            head_width(width, self.num_attention_heads, self.head_dim),
            rope_theta=theta,
            rope_fraction=fraction,
            bias=self.attention_bias,
            key_scale=float(self.key_multiplier),
            in_scale=float(self.attention_in_multiplier),
            out_scale=float(self.attention_out_multiplier),
        )
        act = activation("hidden_act", self.hidden_act)
        mlp = MLPConfig(
            width, self.intermediate_size, activation=act, bias=self.mlp_bias, gate_scale=gate, out_scale=down
        )
        return ModelConfig(
            layers=((ParallelConfig(mamba, attention), mlp),) * self.num_hidden_layers,
            vocab_size=self.vocab_size,
            pad_vocab_size_multiple=1,
            tie_embeddings=self.tie_word_embeddings,
            norm_eps=self.rms_norm_eps,
            residual_in_fp32=False,
            embedding_scale=float(self.embedding_multiplier),
            logits_scale=float(self.lm_head_multiplier),
        )

    @classmethod
    def of(cls, config: ModelConfig) -> "FalconH1":
        expect_kinds(config, ("Parallel", "MLP"))
        mamba, attention, mlp = only(config, Mamba2Config), only(config, AttentionConfig), only(config, MLPConfig)
        if mamba is None or attention is None or mlp is None:
            raise ValueError("its parallel blocks are not Mamba-2 and attention")
        if attention.rope_theta is None:
            raise ValueError("its attention has no rope")
        rope = {"rope_theta": attention.rope_theta, "rope_type": "default"}
        if attention.rope_fraction != 1:
            rope["partial_rotary_factor"] = attention.rope_fraction
        return cls(
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layer,
            vocab_size=config.padded_vocab_size,
            tie_word_embeddings=config.tie_embeddings,
            rms_norm_eps=config.norm_eps,
            embedding_multiplier=config.embedding_scale,
            lm_head_multiplier=config.logits_scale,
            intermediate_size=mlp.d_hidden,
            hidden_act=their_activation(mlp.activation),
            mlp_bias=mlp.bias,
            mlp_multipliers=(mlp.gate_scale, mlp.out_scale),
            rope_parameters=rope,
            attention_bias=attention.bias,
            key_multiplier=attention.key_scale,
            attention_in_multiplier=attention.in_scale,
            attention_out_multiplier=attention.out_scale,
            mamba_d_ssm=mamba.inner_width,
            mamba_rms_norm=mamba.rmsnorm,
            mamba_norm_before_gate=mamba.norm_before_gate,
            projectors_bias=mamba.bias,
            ssm_multipliers=mamba.ssm_multipliers or ONES,  # type: ignore[arg-type]  # five of them
            ssm_in_multiplier=mamba.in_scale,
            ssm_out_multiplier=mamba.out_scale,
            **attention_fields(attention),
            **mamba2_fields(mamba),
        )
