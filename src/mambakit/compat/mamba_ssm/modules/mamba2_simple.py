"""The simple form of Mamba-2's block: its norm spans all groups, its first state may be learned, it does not decode."""

from typing import Any

from torch import Tensor

from mambakit.blocks import mamba2
from mambakit.blocks.mamba2 import Mamba2Config
from mambakit.compat.arguments import check_activation, in_our_words, refuse_unknown
from mambakit.compat.mamba_ssm.modules.mamba2 import adopt
from mambakit.compat.packing import segments_of
from mambakit.compat.stateful import Stateful, WithWindow, check_sequence

__all__ = ["Mamba2Simple"]
from mambakit.ops.ssd_path import SsdPath


class Mamba2Simple(Stateful, mamba2.Mamba2):  # pyright: ignore[reportIncompatibleMethodOverride] - d_model is no property
    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 128,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        learnable_init_states: bool = False,
        activation: str = "swish",
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **unknown: Any,
    ):
        refuse_unknown("Mamba2Simple", unknown)
        if not check_activation(activation):
            raise NotImplementedError('activation = None is not one of "silu" and "swish"')
        config = Mamba2Config(
            **in_our_words("mamba2", locals()),
            norm_group_size=int(expand * d_model),
            learnable_init_states=learnable_init_states,
        )
        super().__init__(config, device=device, dtype=dtype)
        adopt(self, config, conv_init, device, dtype)
        self.ngroups, self.dt_limit, self.learnable_init_states = ngroups, dt_limit, learnable_init_states
        self.activation, self.chunk_size = activation, chunk_size
        self.use_mem_eff_path, self.layer_idx = use_mem_eff_path, layer_idx

    def forward(self, u: Tensor, seq_idx: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - the official signature
        """(b, s, d) to (b, s, d), restarting where `seq_idx` (b, s) changes. A learned state belongs to the id 0."""
        check_sequence(self, u, seq_idx)
        segments_bs = segments_of(seq_idx, *u.shape[:2])
        cache = self.fresh_cache(len(u))
        if seq_idx is not None and self.learnable_init_states and u.shape[1]:
            cache = cache._replace(ssm_bhpr=cache.ssm_bhpr * (seq_idx[:, 0] == 0)[:, None, None, None])
        # Our block would start every packed sequence from the learned state.
        view = WithWindow(self, seq_idx, learnable_init_states=False)
        return mamba2.Mamba2.run(view, u, cache, SsdPath(), segments_bs, None)[0]  # type: ignore[arg-type]
