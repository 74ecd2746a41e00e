"""Mamba-2's block."""

from typing import Any

from torch import Tensor, nn

from mambakit.arguments import shown
from mambakit.blocks import mamba2
from mambakit.blocks.mamba2 import Mamba2Cache, Mamba2Config
from mambakit.compat.arguments import in_our_words, refuse_unknown
from mambakit.compat.stateful import PaddedConv1d, WithConvolution
from mambakit.ops.shapes import check_tensors

__all__ = ["Mamba2"]


class Mamba2(WithConvolution, mamba2.Mamba2):  # pyright: ignore[reportIncompatibleMethodOverride] - d_model is no property
    cache_of = Mamba2Cache

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
        config = Mamba2Config(**in_our_words("mamba2", locals()))
        super().__init__(config, device=device, dtype=dtype)
        adopt(self, config, conv_init, device, dtype)
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
        """(b, s, d), or with `seqlen` (b s, d), to the same shape, as in `run_or_step`."""
        if seqlen is not None:
            check_tensors({"u": u})
            if type(seqlen) is not int or seqlen < 1 or u.dim() != 2 or len(u) % seqlen:
                given = f"seqlen is {shown(seqlen)} beside u of shape {tuple(u.shape)}"
                raise ValueError(f"{given}, expected whole sequences of that length, one after the other")
            return self(u.unflatten(0, (-1, seqlen)), None, seq_idx, cu_seqlens, inference_params).flatten(0, 1)
        return self.run_or_step(u, seq_idx, cu_seqlens, inference_params)


def adopt(block: Any, config: Mamba2Config, conv_init: float | None, device: Any, dtype: Any) -> None:
    """The official convolution and the attributes that both of the official Mamba-2 classes have."""
    block.conv1d = PaddedConv1d(config.conv_dim, config.conv_kernel, config.conv_bias, device=device, dtype=dtype)
    if conv_init is not None:
        nn.init.uniform_(block.conv1d.weight, -conv_init, conv_init)
    block.d_model, block.d_state, block.d_conv = config.d_model, config.state_rank, config.conv_kernel
    block.expand, block.headdim, block.conv_init = config.expand, config.per_head_dim, conv_init
    block.d_inner, block.nheads = config.inner_width, config.nheads
    block.activation, block.act = "silu", nn.SiLU()
