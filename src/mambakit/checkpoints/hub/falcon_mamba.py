"""Falcon-Mamba: Mamba-1 with norms without weights on dt, B and C."""

from dataclasses import dataclass

from mambakit.blocks.mamba1 import Mamba1Config
from mambakit.checkpoints.hub.fields import HubConfig, check_layers, expect_kinds, only
from mambakit.checkpoints.names import Names
from mambakit.models.language_model import ModelConfig


@dataclass(kw_only=True)
class FalconMamba(HubConfig):
    vocab_size: int = 50280
    hidden_size: int = 768
    state_size: int = 16
    num_hidden_layers: int = 32
    layer_norm_epsilon: float = 1e-5
    expand: int = 2
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    residual_in_fp32: bool = True
    time_step_rank: int | str = "auto"
    time_step_scale: float = 1.0
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_init_scheme: str = "random"
    time_step_floor: float = 1e-4
    tie_word_embeddings: bool = True
    mixer_rms_eps: float = 1e-6

    model_type = "falcon_mamba"
    architecture = "FalconMambaForCausalLM"
    names = Names(embedding="backbone.embeddings.weight")
    unread = {"intermediate_size", "use_falcon_mambapy", "ssm_cfg", "d_inner", "d_model", "n_layer"}  # noqa: RUF012
    fixed = {"hidden_act": "silu"}  # noqa: RUF012

    def config(self) -> ModelConfig:
        check_layers("num_hidden_layers", self.num_hidden_layers)
        block = Mamba1Config(
            d_model=self.hidden_size,
            expand=self.expand,
            state_rank=self.state_size,
            conv_kernel=self.conv_kernel,
            dt_rank=self.time_step_rank,
            dt_min=self.time_step_min,
            dt_max=self.time_step_max,
            dt_init=self.time_step_init_scheme,
            dt_scale=self.time_step_scale,
            dt_init_floor=self.time_step_floor,
            conv_bias=self.use_conv_bias,
            bias=self.use_bias,
            dt_b_c_norm=True,
            dt_b_c_norm_weight=False,
            norm_eps=self.mixer_rms_eps,
        )
        return ModelConfig(
            block=block,
            n_layer=self.num_hidden_layers,
            vocab_size=self.vocab_size,
            pad_vocab_size_multiple=1,
            tie_embeddings=self.tie_word_embeddings,
            norm_eps=self.layer_norm_epsilon,
            residual_in_fp32=self.residual_in_fp32,
        )

    @classmethod
    def of(cls, config: ModelConfig) -> "FalconMamba":
        expect_kinds(config, ("Mamba1",))
        block = only(config, Mamba1Config)
        if block is None or not block.dt_b_c_norm or block.dt_b_c_norm_weight:
            raise ValueError("its Mamba-1 blocks have no norms without weights on dt, B and C")
        return cls(
            vocab_size=config.padded_vocab_size,
            hidden_size=config.d_model,
            state_size=block.state_rank,
            num_hidden_layers=config.n_layer,
            layer_norm_epsilon=config.norm_eps,
            expand=int(block.expand),
            conv_kernel=block.conv_kernel,
            use_bias=block.bias,
            use_conv_bias=block.conv_bias,
            residual_in_fp32=config.residual_in_fp32,
            time_step_rank=block.dt_width,
            time_step_scale=block.dt_scale,
            time_step_min=block.dt_min,
            time_step_max=block.dt_max,
            time_step_init_scheme=block.dt_init,
            time_step_floor=block.dt_init_floor,
            tie_word_embeddings=config.tie_embeddings,
            mixer_rms_eps=block.norm_eps,
        )
