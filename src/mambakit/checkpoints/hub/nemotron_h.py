"""Nemotron-H: layers of one block each, Mamba-2, attention, an MLP or experts."""

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
    as_limit,
    attention_fields,
    check_layers,
    expect_kinds,
    only,
    their_activation,
)
from mambakit.checkpoints.names import Each, Names
from mambakit.models.language_model import ModelConfig

LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(kw_only=True)
class NemotronH(HubConfig):
    vocab_size: int = 131072
    hidden_size: int = 4096
    layers_block_type: tuple[str, ...] | None = None
    hybrid_override_pattern: str | None = None
    """Older files' way to name the layers, by letters."""
    num_hidden_layers: int | None = None
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int = 128
    attention_head_dim: int | None = None
    """What older files call `head_dim`."""
    intermediate_size: int = 21504
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    ssm_state_size: int = 128
    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    n_groups: int = 8
    conv_kernel: int = 4
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    time_step_limit: tuple[float, float] | None = (0.0, float("inf"))
    use_conv_bias: bool = True
    use_bias: bool = False
    n_routed_experts: int = 8
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = False

    model_type = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    names = Names(
        embedding="backbone.embeddings.weight",
        blocks=dict.fromkeys(("mamba2", "attention", "mlp", "moe"), "mixer."),
        tables={
            "attention": {"in_proj": ("q_proj", "k_proj", "v_proj"), "out_proj": "o_proj"},
            "mlp": {"fc1": "up_proj", "fc2": "down_proj"},
            "moe": {
                "router": "gate",
                "correction_bias": "gate.e_score_correction_bias",
                "experts_in": Each("experts.{}.up_proj.weight"),
                "experts_out": Each("experts.{}.down_proj.weight"),
                "shared.fc1": "shared_experts.up_proj",
                "shared.fc2": "shared_experts.down_proj",
                "latent_in": "fc1_latent_proj",
                "latent_out": "fc2_latent_proj",
            },
        },
    )
    unread = {  # noqa: RUF012  # data
        *("chunk_size", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mamba_proj_bias", "expand"),
        *("n_shared_experts", "sliding_window", "attention_bias", "mtp_layers_block_type"),
        *("mtp_hybrid_override_pattern", "time_step_rank", "rms_norm_eps", "tie_word_embeddings"),
    }
    fixed = {"mamba_hidden_act": "silu", "num_nextn_predict_layers": 0}  # noqa: RUF012

    def kinds(self) -> list[str]:
        """For each layer one of the values of `LETTERS`."""
        pattern = self.hybrid_override_pattern
        if self.layers_block_type is not None:
            names = {
                **dict.fromkeys(ATTENTION, "attention"),
                **dict.fromkeys(MAMBA, "mamba"),
                "mlp": "mlp",
                "moe": "moe",
            }
            where, given = "layers_block_type", list(self.layers_block_type)
        elif pattern is not None:
            where, given, names = "hybrid_override_pattern", list(pattern), LETTERS
        else:
            raise ValueError("there is neither layers_block_type nor hybrid_override_pattern")
        if wrong := sorted(set(given) - names.keys()):
            raise ValueError(f"{where} has {', '.join(map(shown, wrong))}, expected only {', '.join(names)}")
        check_layers(where, len(given))
        return [names[one] for one in given]

    def config(self) -> ModelConfig:
        kinds, width = self.kinds(), self.hidden_size
        act = activation("mlp_hidden_act", self.mlp_hidden_act)
        make: dict[str, Any] = {
            "mamba": lambda: Mamba2Config(
                d_model=width,
                d_inner=self.mamba_num_heads * self.mamba_head_dim,
                state_rank=self.ssm_state_size,
                per_head_dim=self.mamba_head_dim,
                ngroups=self.n_groups,
                conv_kernel=self.conv_kernel,
                norm_eps=self.layer_norm_epsilon,
                dt_min=self.time_step_min,
                dt_max=self.time_step_max,
                dt_init_floor=self.time_step_floor,
                dt_limit=as_limit(self.time_step_limit),
                conv_bias=self.use_conv_bias,
                bias=self.use_bias,
            ),
            "attention": lambda: AttentionConfig(
                width, self.num_attention_heads, self.num_key_value_heads, self.attention_head_dim or self.head_dim
            ),
            "mlp": lambda: MLPConfig(width, self.intermediate_size, gated=False, activation=act, bias=self.mlp_bias),
            "moe": lambda: MoEConfig(
                width,
                self.moe_intermediate_size,
                self.n_routed_experts,
                self.num_experts_per_tok,
                router="sigmoid",
                normalize=self.norm_topk_prob,
                scale=self.routed_scaling_factor,
                groups=self.n_group,
                top_groups=self.topk_group,
                gated=False,
                activation=act,
                d_shared=self.moe_shared_expert_intermediate_size,
                d_latent=self.moe_latent_size,
                bias=self.mlp_bias,
            ),
        }
        made: dict[str, BlockConfig] = {kind: make[kind]() for kind in dict.fromkeys(kinds)}
        return ModelConfig(
            layers=tuple((made[kind],) for kind in kinds),
            vocab_size=self.vocab_size,
            pad_vocab_size_multiple=1,
            # Whatever tie_word_embeddings says: these models have a head of their own in transformers.
            tie_embeddings=False,
            norm_eps=self.layer_norm_epsilon,
            residual_in_fp32=self.residual_in_fp32,
        )

    @classmethod
    def of(cls, config: ModelConfig) -> "NemotronH":
        called = {"Mamba2": "mamba", "Attention": "attention", "MLP": "mlp", "MoE": "moe"}
        found = expect_kinds(config, *((kind,) for kind in called))
        values: dict[str, Any] = attention_fields(attention := only(config, AttentionConfig))
        if attention is not None:
            values["head_dim"] = attention.head_width
        if (mamba := only(config, Mamba2Config)) is not None:
            values |= {
                "ssm_state_size": mamba.state_rank,
                "mamba_num_heads": mamba.nheads,
                "mamba_head_dim": mamba.per_head_dim,
                "n_groups": mamba.ngroups,
                "conv_kernel": mamba.conv_kernel,
                "time_step_min": mamba.dt_min,
                "time_step_max": mamba.dt_max,
                "time_step_floor": mamba.dt_init_floor,
                "time_step_limit": mamba.dt_limit,
                "use_conv_bias": mamba.conv_bias,
                "use_bias": mamba.bias,
            }
        if (mlp := only(config, MLPConfig)) is not None:
            act = their_activation(mlp.activation)
            values |= {"intermediate_size": mlp.d_hidden, "mlp_bias": mlp.bias, "mlp_hidden_act": act}
        if (moe := only(config, MoEConfig)) is not None:
            values |= {
                "mlp_hidden_act": their_activation(moe.activation),
                "mlp_bias": moe.bias,
                "n_routed_experts": moe.n_experts,
                "moe_intermediate_size": moe.d_hidden,
                "moe_shared_expert_intermediate_size": moe.d_shared,
                "moe_latent_size": moe.d_latent,
                "num_experts_per_tok": moe.top_k,
                "routed_scaling_factor": float(moe.scale),
                "n_group": moe.groups,
                "topk_group": moe.top_groups,
                "norm_topk_prob": moe.normalize,
            }
        return cls(
            layers_block_type=tuple(called[kind] for (kind,) in found),
            hidden_size=config.d_model,
            vocab_size=config.padded_vocab_size,
            layer_norm_epsilon=config.norm_eps,
            residual_in_fp32=config.residual_in_fp32,
            **values,
        )

    def left_open(self) -> dict[str, str]:
        low, high = as_limit(self.time_step_limit)
        if "mamba" not in self.kinds() or self.time_step_min <= low:
            return {}
        return {
            "dt_limit": f"step sizes are kept within time_step_limit = ({low}, {high}), in a call and in steps alike. "
            f"transformers keeps them above time_step_min = {self.time_step_min} in a call, and not in steps; pass "
            f"dt_limit=({self.time_step_min}, {high}) to reproduce its calls, or dt_limit=({low}, {high}) to keep this"
        }
