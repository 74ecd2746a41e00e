"""Mamba-1's block."""

from typing import Any

from torch import Tensor, nn

from mambakit.blocks.mamba1 import Mamba1, Mamba1Cache, Mamba1Config
from mambakit.compat.arguments import in_our_words, refuse_unknown
from mambakit.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mambakit.compat.mamba_ssm.modules import block
from mambakit.compat.mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
from mambakit.compat.mamba_ssm.ops.triton.layernorm import RMSNorm, layer_norm_fn, rms_norm_fn
from mambakit.compat.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mambakit.compat.stateful import PaddedConv1d, WithConvolution

__all__ = ["Block", "Mamba"]
# Callers look these up here, too.
__all__ += ["RMSNorm", "causal_conv1d_fn", "causal_conv1d_update", "layer_norm_fn", "mamba_inner_fn", "rms_norm_fn"]
__all__ += ["selective_scan_fn", "selective_state_update"]


class Mamba(WithConvolution, Mamba1):  # pyright: ignore[reportIncompatibleMethodOverride] - d_model is no property
    cache_of = Mamba1Cache

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **unknown: Any,
    ):
        refuse_unknown("Mamba", unknown)
        config = Mamba1Config(**in_our_words("mamba1", locals()))
        super().__init__(config, device=device, dtype=dtype)
        self.conv1d = PaddedConv1d(config.d_inner, d_conv, conv_bias, device=device, dtype=dtype)
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner, self.dt_rank = config.d_inner, config.dt_width
        self.use_fast_path, self.layer_idx = use_fast_path, layer_idx
        self.activation, self.act = "silu", nn.SiLU()

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - the official signature
        """(b, s, d) to (b, s, d). With `inference_params` the layer's states are filled, or after the prompt, used."""
        return self.run_or_step(hidden_states, inference_params=inference_params)


class Block(block.Block):
    """The block of mamba_ssm 1.x, which has no MLP and so no argument for one."""

    def __init__(
        self,
        dim: int,
        mixer_cls: Any,
        norm_cls: Any = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ):
        super().__init__(dim, mixer_cls, nn.Identity, norm_cls, fused_add_norm, residual_in_fp32)
