"""Jamba: Mamba-1 with norms on dt, B and C, or attention, then a gated MLP or experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mambakit.blocks.attention import AttentionConfig
from mambakit.blocks.config import BlockConfig
from mambakit.blocks.mamba1 import Mamba1Config
from mambakit.blocks.mlp import MLPConfig
from mambakit.blocks.moe import MoEConfig
from mambakit.checkpoints.hub.fields import (
    DECODER,
    FEED_FORWARD,
    HubConfig,
    activation,
    attention_fields,
    check_layers,
    expect_kinds,
    head_width,
    only,
    their_activation,
)
from mambakit.checkpoints.names import Each, Names
from mambakit.models.language_model import ModelConfig


@dataclass(kw_only=True)
class Jamba(HubConfig):
    vocab_size: int = 65536
    tie_word_embeddings: bool = False
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    num_experts_per_tok: int = 2
    num_experts: int = 16
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    attn_layer_period: int = 8
    attn_layer_offset: int = 4
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int | str = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    model_type = "jamba"
    architecture = "JambaForCausalLM"
    names = Names(
        **DECODER,
        blocks={"mamba1": "mamba.", "attention": "self_attn.", "mlp": "feed_forward.", "moe": "feed_forward."},
        tables={
            **FEED_FORWARD,
            "mamba1": {"dt_norm": "dt_layernorm", "B_norm": "b_layernorm", "C_norm": "c_layernorm"},
            "moe": {
                "experts_in": Each("experts.{}.up_proj.weight", "experts.{}.gate_proj.weight"),
                "experts_out": Each("experts.{}.down_proj.weight"),
            },
        },
    )
    unread = {"mamba_inner_layernorms", "sliding_window", "calc_logits_for_entire_prompt"}  # noqa: RUF012
    fixed = {"mamba_inner_layernorms": True}  # noqa: RUF012

    def config(self) -> ModelConfig:
        n, width = self.num_hidden_layers, self.hidden_size
        check_layers("num_hidden_layers", n)
        attends = _every(n, self.attn_layer_period, self.attn_layer_offset, "attn_layer")
        experts = _every(n, self.expert_layer_period, self.expert_layer_offset, "expert_layer")
        act = activation("hidden_act", self.hidden_act)
        blocks: dict[str, BlockConfig] = {}
        if any(attends):
            heads = self.num_attention_heads
            blocks["attention"] = AttentionConfig(
                width, heads, self.num_key_value_heads, head_width(width, heads, self.head_dim)
            )
        if not all(attends):
            blocks["mamba"] = Mamba1Config(
                d_model=width,
                expand=self.mamba_expand,
                state_rank=self.mamba_d_state,
                conv_kernel=self.mamba_d_conv,
                dt_rank=self.mamba_dt_rank,
                conv_bias=self.mamba_conv_bias,
                bias=self.mamba_proj_bias,
                dt_b_c_norm=True,
                norm_eps=self.rms_norm_eps,
            )
        if self.num_experts <= 1:
            experts = [False] * n
        if any(experts):
            blocks["moe"] = MoEConfig(
                width,
                self.intermediate_size,
                self.num_experts,
                self.num_experts_per_tok,
                normalize=False,
                activation=act,
            )
        blocks["mlp"] = MLPConfig(width, self.intermediate_size, activation=act)
        return ModelConfig(
            layers=tuple(
                (blocks["attention" if attend else "mamba"], blocks["moe" if expert else "mlp"])
                for attend, expert in zip(attends, experts, strict=True)
            ),
            vocab_size=self.vocab_size,
            pad_vocab_size_multiple=1,
            tie_embeddings=self.tie_word_embeddings,
            norm_eps=self.rms_norm_eps,
            residual_in_fp32=False,
        )

    @classmethod
    def of(cls, config: ModelConfig) -> "Jamba":
        found = expect_kinds(config, *((a, b) for a in ("Mamba1", "Attention") for b in ("MLP", "MoE")))
        mamba, attention = only(config, Mamba1Config), only(config, AttentionConfig)
        mlp, moe = only(config, MLPConfig), only(config, MoEConfig)
        values: dict[str, Any] = attention_fields(attention)
        if mamba is not None:
            if not (mamba.dt_b_c_norm and mamba.dt_b_c_norm_weight):
                raise ValueError("its Mamba-1 blocks have no norms with weights on dt, B and C")
            values |= {
                "mamba_d_state": mamba.state_rank,
                "mamba_d_conv": mamba.conv_kernel,
                "mamba_expand": int(mamba.expand),
                "mamba_dt_rank": mamba.dt_width,
                "mamba_conv_bias": mamba.conv_bias,
                "mamba_proj_bias": mamba.bias,
            }
        if moe is not None:
            values |= {"num_experts": moe.n_experts, "num_experts_per_tok": moe.top_k}
        else:
            values["num_experts"] = 1
        tail: Any = mlp or moe
        period, offset = period_of([kind == "Attention" for kind, _ in found], "attention")
        every, first = period_of([kind == "MoE" for _, kind in found], "experts")
        return cls(
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layer,
            intermediate_size=tail.d_hidden,
            hidden_act=their_activation(tail.activation),
            attn_layer_period=period,
            attn_layer_offset=offset,
            expert_layer_period=every,
            expert_layer_offset=first,
            vocab_size=config.padded_vocab_size,
            tie_word_embeddings=config.tie_embeddings,
            rms_norm_eps=config.norm_eps,
            **values,
        )


def _every(n: int, period: int, offset: int, what: str) -> list[bool]:
    if period <= 0 or not 0 <= offset < period:
        raise ValueError(f"{what}_offset = {offset} has to be below {what}_period = {period}, and neither negative")
    return [i % period == offset for i in range(n)]


def period_of(there: Sequence[bool], what: str) -> tuple[int, int]:
    """The period and offset of the layers that have something; beyond the last layer where none has."""
    n, places = len(there), [i for i, has in enumerate(there) if has]
    offset = places[0] if places else n
    period = places[1] - offset if len(places) > 1 else max(offset + 1, n - offset)
    if offset >= period or places != list(range(offset, n, period)):
        raise ValueError(f"its layers with {what} do not follow one another at equal distances")
    return period, offset
