"""A multilayer perceptron: its config, its block, its record."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mambakit.arguments import shown
from mambakit.blocks.config import BlockConfig, check_positive, check_types
from mambakit.blocks.family import Family, FusedStep, register
from mambakit.blocks.modules import Linear
from mambakit.blocks.shares import Part, Shares, along, run, shared
from mambakit.blocks.stateless import NoCache, Stateless
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.team import Team

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation = {shown(activation)} is unknown; choose one of {', '.join(ACTIVATIONS)}")


def activate(projected: Tensor, gated: bool, activation: str, gate_scale: float = 1.0) -> Tensor:
    """`value * activation(gate)`, value and gate being the halves of `projected`; ungated `activation(projected)`."""
    if not gated:
        return ACTIVATIONS[activation](projected)
    value, gate = projected.chunk(2, dim=-1)
    return value * ACTIVATIONS[activation](gate if gate_scale == 1 else gate * gate_scale)


@dataclass(frozen=True, slots=True)
class MLPConfig(BlockConfig):
    """The sizes of an MLP, and its activation.

    Examples:
        >>> mk.MLPConfig(64, 256, activation="gelu").gated
        True
    """

    d_model: int
    d_hidden: int
    gated: bool = True
    """`fc1` computes a value and a gate: `value * activation(gate)`. Otherwise `activation(value)`."""
    activation: str = "silu"
    bias: bool = False
    gate_scale: float = field(default=1.0, kw_only=True)
    """What the gate is multiplied by before its activation."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "d_model", "d_hidden")
        check_activation(self.activation)
        if self.gate_scale != 1 and not self.gated:
            raise ValueError(f"gate_scale = {self.gate_scale} is for a gated MLP, and gated is False")


class MLP(Stateless[MLPConfig]):
    """`fc2(value * activation(gate))`, value and gate being the halves of `fc1`; ungated `fc2(activation(value))`.

    Examples:
        >>> y_bsd, _ = mk.MLP(mk.MLPConfig(64, 256))(torch.randn(2, 10, 64))
        >>> y_bsd.shape
        torch.Size([2, 10, 64])
    """

    config_class = MLPConfig
    entry = "fc1"

    def __init__(self, config: MLPConfig | None = None, *, device: Any = None, dtype: Any = None, **fields: Any):
        super().__init__(config, **fields)
        config = self.config
        made = {"bias": config.bias, "device": device, "dtype": dtype}
        self.fc1 = Linear(config.d_model, config.d_hidden * (2 if config.gated else 1), **made)
        self.fc2 = Linear(config.d_hidden, config.d_model, **made)

    @property
    def independent_maps(self) -> dict[str, dict[str, int]]:
        """The maps that each projection stacks, with their rows in order; see `blocks/param_groups.py`."""
        hidden = self.config.d_hidden
        return {
            "fc1": {"value": hidden, "gate": hidden} if self.config.gated else {"value": hidden},
            "fc2": {"y": self.config.d_model},
        }

    def run(
        self, x_bsd: Tensor, cache: NoCache, path: SsdPath, segments_bs: Tensor | None, lengths_b: Tensor | None
    ) -> tuple[Tensor, NoCache]:
        config = self.config
        hidden = activate(self.fc1(x_bsd), config.gated, config.activation, config.gate_scale)
        return self.fc2(hidden), cache


def shares(config: MLPConfig, team: Team) -> Shares:
    hidden = config.d_hidden
    gate = hidden if config.gated else 0
    return Shares(
        config=replace(config, d_hidden=shared(config, "d_hidden", hidden, team)),
        parameters={
            **dict.fromkeys(("fc1.weight", "fc1.bias"), along(0, Part("value", hidden), Part("gate", gate))),
            "fc2.weight": run(hidden, 1),
        },
        once=("fc2.bias",),
    )


FAMILY = register(
    Family(
        name="mlp",
        title="MLP",
        block=MLP,
        sizes={"d_hidden": ("fc2.weight", 1, "d_hidden")},
        example={"d_model": 24, "d_hidden": 40},
        step=FusedStep(
            fields=lambda block: {name: getattr(block.config, name) for name in ("activation", "gated", "gate_scale")},
            projections=("fc1", "fc2"),
        ),
        shares=shares,
        alone=False,
    )
)
