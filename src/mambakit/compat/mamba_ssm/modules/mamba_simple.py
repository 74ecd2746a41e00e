"""Mamba-1's block."""

from typing import Any

import torch
from torch import Tensor, nn

from mambakit.blocks.mamba1 import Mamba1, Mamba1Cache, Mamba1Config
from mambakit.compat.arguments import refuse_unknown
from mambakit.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mambakit.compat.mamba_ssm.modules import block
from mambakit.compat.mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
from mambakit.compat.mamba_ssm.ops.triton.layernorm import RMSNorm, layer_norm_fn, rms_norm_fn
from mambakit.compat.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mambakit.compat.stateful import PaddedConv1d, Stateful, WithWindow, one_token, write

__all__ = ["Block", "Mamba"]
# Callers look these up here, too.
__all__ += ["RMSNorm", "causal_conv1d_fn", "causal_conv1d_update", "layer_norm_fn", "mamba_inner_fn", "rms_norm_fn"]
__all__ += ["selective_scan_fn", "selective_state_update"]


class Mamba(Stateful, Mamba1):  # pyright: ignore[reportIncompatibleMethodOverride] - d_model is no property
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
        config = Mamba1Config(
            d_model=d_model,
            expand=expand,
            state_rank=d_state,
            conv_kernel=d_conv,
            dt_rank=dt_rank,
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init=dt_init,
            dt_scale=dt_scale,
            dt_init_floor=dt_init_floor,
            conv_bias=conv_bias,
            bias=bias,
        )
        super().__init__(config, device=device, dtype=dtype)
        self.conv1d = PaddedConv1d(config.d_inner, d_conv, conv_bias, device=device, dtype=dtype)
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner, self.dt_rank = config.d_inner, config.dt_width
        self.use_fast_path, self.layer_idx = use_fast_path, layer_idx
        self.activation, self.act = "silu", nn.SiLU()

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - the official signature
        """(b, s, d) to (b, s, d). With `inference_params` the layer's states are filled, or after the prompt, used."""
        batch = hidden_states.shape[0]
        if inference_params is None:
            return self.continue_from(hidden_states, self.fresh_cache(batch))[0]
        states = self._get_states_from_cache(inference_params, batch)
        if inference_params.seqlen_offset > 0:
            return self.step(hidden_states, *states)[0]
        out, cache = self.continue_from(hidden_states, self.fresh_cache(batch))
        write(states, cache)
        return out

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride] - the official signature
        """One token (b, 1, d); the states are updated in place and returned."""
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        out, cache = self.continue_from(one_token(hidden_states), Mamba1Cache(conv_state, ssm_state.to(wide)))
        write((conv_state, ssm_state), cache)
        return out, conv_state, ssm_state

    def continue_from(self, x_bsd: Tensor, cache: Mamba1Cache) -> tuple[Tensor, Mamba1Cache]:
        return Mamba1.run(WithWindow(self), x_bsd, cache, None, None, None)  # type: ignore[arg-type]

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Any = None, **unused: Any
    ) -> tuple[Tensor, Tensor]:
        """Zero states: convolution (b, i, k) and ssm (b, i, r), the latter at least float32 unless `dtype` says."""
        conv_state, ssm_state = self.fresh_cache(batch_size)
        return (conv_state, ssm_state) if dtype is None else (conv_state.to(dtype), ssm_state.to(dtype))


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
