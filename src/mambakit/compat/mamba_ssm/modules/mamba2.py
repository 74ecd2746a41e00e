"""Mamba-2's block."""

from typing import Any

import torch
from torch import Tensor, nn

from mambakit.blocks import mamba2
from mambakit.blocks.mamba2 import Mamba2Cache, Mamba2Config
from mambakit.compat.arguments import pair, refuse_unknown
from mambakit.compat.packing import from_rows, packed, segments_of, to_rows
from mambakit.compat.stateful import PaddedConv1d, Stateful, WithWindow, one_token, write

__all__ = ["Mamba2"]


class Mamba2(Stateful, mamba2.Mamba2):  # pyright: ignore[reportIncompatibleMethodOverride] - d_model is no property
    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: Any = None,
        dtype: Any = None,
        **unknown: Any,
    ):
        refuse_unknown("Mamba2", unknown)
        if process_group is not None:
            raise NotImplementedError("process_group: mambakit does not split a block over several processes")
        config = Mamba2Config(
            d_model=d_model,
            expand=expand,
            state_rank=d_state,
            per_head_dim=headdim,
            ngroups=ngroups,
            conv_kernel=d_conv,
            d_ssm=d_ssm,
            A_init_range=pair(A_init_range),
            D_has_hdim=D_has_hdim,
            rmsnorm=rmsnorm,
            norm_before_gate=norm_before_gate,
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init_floor=dt_init_floor,
            dt_limit=pair(dt_limit),
            conv_bias=conv_bias,
            bias=bias,
        )
        super().__init__(config, device=device, dtype=dtype)
        adopt(self, config, d_model, d_state, d_conv, conv_init, expand, headdim, conv_bias, device, dtype)
        self.d_ssm, self.ngroups, self.D_has_hdim = config.ssm_width, ngroups, D_has_hdim
        self.rmsnorm, self.norm_before_gate, self.dt_limit = rmsnorm, norm_before_gate, dt_limit
        self.chunk_size, self.use_mem_eff_path, self.layer_idx = chunk_size, use_mem_eff_path, layer_idx
        self.process_group, self.sequence_parallel, self.world_size, self.local_rank = None, sequence_parallel, 1, 0

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - the official signature
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """(b, s, d), or with `seqlen` (b s, d), to the same shape.

        `seq_idx` (b, s) or `cu_seqlens` restart at every packed sequence; the latter, in a batch of one, keeps states
        of each in `inference_params`.
        """
        if seqlen is not None:
            return self(u.unflatten(0, (-1, seqlen)), None, seq_idx, cu_seqlens, inference_params).flatten(0, 1)
        rows = len(u) if cu_seqlens is None else len(cu_seqlens) - 1
        states = None if inference_params is None else self._get_states_from_cache(inference_params, rows)
        is_decoding = inference_params is not None and inference_params.seqlen_offset > 0
        if states is not None and is_decoding:
            if seq_idx is not None or cu_seqlens is not None:
                raise ValueError("a decoding step takes one token per sequence: seq_idx and cu_seqlens are for prompts")
            return self.step(u, *states)[0]
        if cu_seqlens is not None:
            layout = packed(u, cu_seqlens, seq_idx)
            out, cache = self.continue_from(to_rows(layout, u), self.fresh_cache(rows), lengths_b=layout.lengths_r)
            out = from_rows(layout, out, u.shape[1])
        else:
            out, cache = self.continue_from(u, self.fresh_cache(rows), segments_of(seq_idx, *u.shape[:2]))
        if states is not None:
            write(states, cache)
        return out

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride] - the official signature
        """One token (b, 1, d); the states are updated in place and returned."""
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        out, cache = self.continue_from(one_token(hidden_states), Mamba2Cache(conv_state, ssm_state.to(wide)))
        write((conv_state, ssm_state), cache)
        return out, conv_state, ssm_state

    def continue_from(
        self,
        x_bsd: Tensor,
        cache: Mamba2Cache,
        segments_bs: Tensor | None = None,
        lengths_b: Tensor | None = None,
    ) -> tuple[Tensor, Mamba2Cache]:
        return mamba2.Mamba2.run(WithWindow(self), x_bsd, cache, None, segments_bs, lengths_b)  # type: ignore[arg-type]

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Any = None, **unused: Any
    ) -> tuple[Tensor, Tensor]:
        """Zero states: convolution (b, v, k) and ssm (b, h, p, r), the latter at least float32 unless `dtype` says."""
        conv_state, ssm_state = self.fresh_cache(batch_size)
        return (conv_state, ssm_state) if dtype is None else (conv_state.to(dtype), ssm_state.to(dtype))


def adopt(
    block: Any,
    config: Mamba2Config,
    d_model: int,
    d_state: int,
    d_conv: int,
    conv_init: float | None,
    expand: float,
    headdim: int,
    conv_bias: bool,
    device: Any,
    dtype: Any,
) -> None:
    """The official convolution and the attributes that both of the official Mamba-2 classes have."""
    block.conv1d = PaddedConv1d(config.conv_dim, d_conv, conv_bias, device=device, dtype=dtype)
    if conv_init is not None:
        nn.init.uniform_(block.conv1d.weight, -conv_init, conv_init)
    block.d_model, block.d_state, block.d_conv, block.conv_init = d_model, d_state, d_conv, conv_init
    block.expand, block.headdim, block.d_inner, block.nheads = expand, headdim, config.d_inner, config.nheads
    block.activation, block.act = "silu", nn.SiLU()
