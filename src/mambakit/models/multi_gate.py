"""How a layer's output joins what came before: added, alone, or gated into several parallel streams."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mambakit.arguments import check_count
from mambakit.blocks.config import Config, check_positive, check_types
from mambakit.ops.norm import rms_norm

if TYPE_CHECKING:
    from mambakit.models.stack import StackConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiGateConfig(Config):
    """Several residual streams with gates, in place of one sum.

    Examples:
        >>> gates = mk.MultiGateConfig(n_streams=4)
        >>> config = mk.StackConfig(block=mk.Mamba2Config(d_model=64, per_head_dim=16), n_layer=6, multi_gate=gates)
    """

    n_streams: int
    init_bias: float = -3.0
    """How open the gates start: `sigmoid(init_bias)` of a layer's output enters a stream. See `depth_aware_bias`."""
    init_bias_step: float = 0.0
    """By how much each stream's bias exceeds that of the one before."""
    per_virtual_layer: bool = False
    """A gate of its own for each virtual layer, or one for each set of weights."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "n_streams")


def depth_aware_bias(n_mixing: int, n_streams: int) -> float:
    """`init_bias` for `n_mixing` layers that find all streams in place: the deeper, the less each one changes them.

    Examples:
        >>> round(mk.depth_aware_bias(n_mixing=21, n_streams=4), 2)
        -2.84
    """
    for name, count in (("n_mixing", n_mixing), ("n_streams", n_streams)):
        check_count(name, count, least=0, most=2**31)
    openness = math.sqrt(n_mixing / 21) * (math.exp(3) + 1) - n_streams
    if openness <= 0:
        raise ValueError(
            f"no bias for {n_mixing} mixing layers and {n_streams} streams; use fewer streams or more layers"
        )
    return -math.log(openness)


class MultiGate(nn.Module):
    """A layer's output into up to `n_streams` streams, and one mixture of them out, for every token on its own.

    Examples:
        >>> gate = mk.MultiGate(mk.MultiGateConfig(n_streams=4), width=64)
        >>> streams_bskd, x_bsd = gate(torch.randn(2, 10, 1, 64), torch.randn(2, 10, 64))
        >>> streams_bskd.shape, x_bsd.shape
        (torch.Size([2, 10, 2, 64]), torch.Size([2, 10, 64]))
    """

    def __init__(
        self, config: MultiGateConfig, width: int, eps: float = 1e-5, *, device: Any = None, dtype: Any = None
    ):
        super().__init__()
        self.config, self.eps = config, eps
        made = {"device": device, "dtype": dtype}
        self.w_beta = nn.Parameter(torch.empty(width, **made))
        self.w_alpha = nn.Parameter(torch.empty(width, **made))
        self.b_beta = nn.Parameter(torch.empty(config.n_streams, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.w_beta)
        nn.init.zeros_(self.w_alpha)
        with torch.no_grad():
            for q in range(self.config.n_streams):
                self.b_beta[q] = self.config.init_bias + q * self.config.init_bias_step

    def forward(self, streams_XXkd: Tensor, delta_XXd: Tensor) -> tuple[Tensor, Tensor]:
        """The streams after the layer that returned `delta_XXd`, and the input of the next one.

        `k` grows from one by a stream per layer: copies of one stream would never separate.
        """
        new_XX1d = delta_XXd.to(streams_XXkd.dtype)[..., None, :]
        if streams_XXkd.shape[-2] < self.config.n_streams:
            streams_XXkd = torch.cat([streams_XXkd, new_XX1d], -2)
        else:
            beta_XXk = torch.sigmoid(self.score(streams_XXkd, self.w_beta) + self.b_beta.to(streams_XXkd.dtype))
            streams_XXkd = torch.lerp(streams_XXkd, new_XX1d, beta_XXk[..., None])
        alpha_XXk = torch.softmax(self.score(streams_XXkd, self.w_alpha), -1)
        return streams_XXkd, (alpha_XXk[..., None] * streams_XXkd).sum(-2)

    def score(self, streams_XXkd: Tensor, w_d: Tensor) -> Tensor:
        normed_XXkd = rms_norm(streams_XXkd, None, self.eps)
        return normed_XXkd @ w_d.to(normed_XXkd.dtype) / math.sqrt(len(w_d))


class Residual(nn.Module):
    """The rule of a whole stack, whose layer `q` has the weights `order[q]` of `n_real` sets."""

    def __init__(self, config: "StackConfig", order: Sequence[int], n_real: int, **made: Any):
        super().__init__()
        # Outputs that go on alone: the first layer's restarts the streams, the last one's leaves them as they are.
        self.first = 0 if config.ignore_first_residual else -1
        self.last = len(order) - 1 if config.ignore_last_residual else -1
        self.gate_of: Sequence[int] | None = None
        gate, width = config.multi_gate, config.d_model
        if gate is not None:
            self.gate_of = range(len(order)) if gate.per_virtual_layer else order
            count = len(order) if gate.per_virtual_layer else n_real
            self.gates = nn.ModuleList(MultiGate(gate, width, config.norm_eps, **made) for _ in range(count))

    @property
    def is_sum(self) -> bool:
        """Whether every output is added and that is all."""
        return self.gate_of is None and self.first == self.last == -1

    def seed(self, x_XXd: Tensor) -> Tensor | None:
        return None if self.gate_of is None else x_XXd[..., None, :]

    def join(
        self, q: int, x_XXd: Tensor, streams_XXkd: Tensor | None, delta_XXd: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """What layer `q + 1` gets, and the streams if there are any."""
        if q in (self.first, self.last):
            alone_XXd = delta_XXd.to(x_XXd.dtype)
            return alone_XXd, streams_XXkd if q == self.last else self.seed(alone_XXd)
        if self.gate_of is None or streams_XXkd is None:
            return x_XXd + delta_XXd, None
        streams_XXkd, x_XXd = self.gates[self.gate_of[q]](streams_XXkd, delta_XXd)
        return x_XXd, streams_XXkd
