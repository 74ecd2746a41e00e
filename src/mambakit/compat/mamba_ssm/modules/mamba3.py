"""Mamba-3's block."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from mambakit.blocks import mamba3
from mambakit.blocks.mamba3 import Mamba3Cache, Mamba3Config
from mambakit.compat.arguments import in_our_words, warn_of_unknown
from mambakit.compat.stateful import Stateful, check_dtype, check_sequence, check_states, write
from mambakit.ops.activations import heavy_tail as heavy_tail_activation
from mambakit.ops.shapes import check_tensors

__all__ = ["Mamba3", "heavy_tail_activation"]


class Mamba3(Stateful, mamba3.Mamba3):  # pyright: ignore[reportIncompatibleMethodOverride] - d_model is no property
    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: float = 2,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        fuse_pregate_headwise_norm: bool = True,
        chunk_size: int = 64,
        dropout: float = 0.0,
        layer_idx: int | None = None,
        n_layer: int | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        a_activation: str = "heavy_tail",
        **unknown: Any,
    ):
        """`a_activation` is ours: the released package 2.3.2.post1 computes with "softplus", the later one does not."""
        warn_of_unknown("Mamba3", unknown)
        if rope_fraction not in (0.5, 1.0):
            raise ValueError(f"rope_fraction = {rope_fraction} has to be 0.5 or 1.0")
        if dropout:
            warnings.warn(f"dropout = {dropout} has no effect, as in the official Mamba3", UserWarning, stacklevel=2)
        config = Mamba3Config(**in_our_words("mamba3", locals()), a_activation=a_activation)
        super().__init__(config, device=device, dtype=dtype)
        self.d_model, self.d_state, self.headdim, self.A_floor = d_model, d_state, headdim, A_floor
        self.expand, self.d_inner, self.nheads, self.num_bc_heads = expand, config.d_inner, config.nheads, ngroups
        self.is_mimo, self.mimo_rank, self.is_outproj_norm = is_mimo, config.ranks, is_outproj_norm
        self.rotary_dim_divisor, self.split_tensor_size = int(2 / rope_fraction), config.rope_dim
        self.num_rope_angles, self.chunk_size, self.layer_idx = config.rope_dim // 2, chunk_size, layer_idx
        self.fuse_pregate_headwise_norm = fuse_pregate_headwise_norm and is_mimo and is_outproj_norm

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - the official signature
        self,
        u: Tensor,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """(b, s, d) to (b, s, d), as in `run_or_step`."""
        return self.run_or_step(u, seq_idx, cu_seqlens, inference_params)

    def step_of(self, x_b1d: Tensor, states: tuple[Tensor, ...]) -> Tensor:
        return self.step(x_b1d[:, 0], *states)[0][:, None]  # type: ignore[call-arg]

    def states_of(self, cache: Mamba3Cache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the official order, angles in [0, 2 pi)."""
        return cache.rotation.remainder(2 * math.pi), cache.ssm_bhpr, cache.k_state_bmhr, cache.v_state_bhp

    def step(  # pyright: ignore[reportIncompatibleMethodOverride] - the official signature
        self, u: Tensor, angle_state: Tensor, ssm_state: Tensor, k_state: Tensor, v_state: Tensor, **unknown: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """One token (b, d); the states are updated in place and returned."""
        warn_of_unknown("Mamba3.step", unknown)
        states = (angle_state, ssm_state, k_state, v_state)
        named = dict(zip(("angle_state", "ssm_state", "k_state", "v_state"), states, strict=True))
        check_tensors({"u": u, **named})
        check_sequence(self, u[:, None] if u.dim() else u)
        check_states(self, Mamba3Cache(ssm_state, k_state, v_state, angle_state), u)
        wide = torch.promote_types(u.dtype, torch.float32)
        cache = Mamba3Cache(ssm_state.to(wide), k_state.to(u.dtype), v_state.to(u.dtype), angle_state.to(wide))
        out, cache = self.continue_from(u[:, None], cache)
        write(states, self.states_of(cache))
        return out[:, 0], *states

    def allocate_inference_cache(  # pyright: ignore[reportIncompatibleMethodOverride] - the official order
        self,
        batch_size: int,
        max_seqlen: int,
        device: Any = None,
        dtype: Any = None,
        inplace_state: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, ...]:
        """Zero states: angle (b, h, a) and ssm (b, h, p, r), at least float32, k (b, m, h, r) and v (b, h, p)."""
        angle, ssm, k, v = self.states_of(self.fresh_cache(batch_size))
        check_dtype(dtype)
        dtype = k.dtype if dtype is None else dtype
        return angle.to(device), ssm.to(device), k.to(device, dtype), v.to(device, dtype)
