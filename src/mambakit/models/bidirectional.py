"""A stack that reads the sequence both ways: pairs of layers, one straight, one reverse, merged."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from mambakit.arguments import shown
from mambakit.blocks.block import Options, check_flags, check_options, check_packing
from mambakit.blocks.caches import select
from mambakit.blocks.config import check_config
from mambakit.models.class_tokens import ClassTokens, check_one_sequence, plan_levels
from mambakit.models.flow import Flow, calls
from mambakit.models.multi_gate import Residual
from mambakit.models.schedules import PairSchedule, StridedCyclic
from mambakit.models.stack import (
    StackCache,
    StackConfig,
    check_slots,
    enter,
    fresh_slots,
    make_layers,
    without_absent,
)

MERGES = ("mean", "cat_linear")


@dataclass(frozen=True, kw_only=True, slots=True)
class BidirectionalConfig(StackConfig):
    """`virtual` is a schedule for pairs; None uses layers 0 and 1 for the first pair, 2 and 3 for the next.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> config = mk.BidirectionalConfig(block=block, n_layer=4, merge="cat_linear")
    """

    merge: str = "mean"
    """Both directions' outputs averaged, or joined and projected."""

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        if self.merge not in MERGES:
            raise ValueError(f"merge is {shown(self.merge)}, expected one of {', '.join(MERGES)}")
        if self.d_intermediate or self.layer_latents:
            raise ValueError("a bidirectional stack has no MLPs and no latents per layer")

    @property
    def order(self) -> tuple[int, ...]:
        """The weights of each virtual layer, straight and reverse in turn."""
        if self.virtual is None and self.n_layer % 2:
            raise ValueError(f"n_layer = {self.n_layer} is odd; two directions need an even number of layers")
        virtual = StridedCyclic(self.n_layer) if self.virtual is None else self.virtual
        if not isinstance(virtual, PairSchedule):
            raise ValueError(
                f"virtual is {shown(virtual)}, expected Custom((...)), or StridedCyclic, StridedStretched, "
                "SymmetricCyclic or SymmetricStretched of an even number"
            )
        return virtual.pair_order(self.n_layer)


class CatLinear(nn.Module):
    """One projection of `[straight | reverse]`."""

    def __init__(self, width: int, **made: Any):
        super().__init__()
        self.linear = nn.Linear(2 * width, width, **made)

    @property
    def independent_maps(self) -> dict[str, dict[str, int]]:
        return {"linear": {"y": self.linear.out_features}}

    def forward(self, straight_bsd: Tensor, reverse_bsd: Tensor) -> Tensor:
        return self.linear(torch.cat([straight_bsd, reverse_bsd], -1))


class BidirectionalStack(nn.Module):
    """Layers that see the whole sequence. There is no `step`: the reverse direction starts at the end.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> stack = mk.BidirectionalStack(mk.BidirectionalConfig(block=block, n_layer=4))
        >>> y_bsd, _ = stack(torch.randn(2, 10, 64))
    """

    def __init__(
        self, config: BidirectionalConfig, *, checkpoint_layers: bool = False, device: Any = None, dtype: Any = None
    ):
        super().__init__()
        check_config(self, config, BidirectionalConfig)
        self.config = config
        self.order = config.order
        self.checkpoint_layers = checkpoint_layers
        made = {"device": device, "dtype": dtype}
        self.layers = make_layers(config, **made)
        # What a pair has of its own goes by the weights of its straight direction.
        self.pairs = [straight // 2 for straight in self.order[::2]]
        count = -(-config.n_layer // 2)
        self.residual = Residual(config, self.pairs, count, **made)
        self.merges = None
        if config.merge == "cat_linear":
            self.merges = nn.ModuleList(CatLinear(config.d_model, **made) for _ in range(count))
        self.stack_latents = None
        if config.stack_latents:
            self.stack_latents = ClassTokens(config.stack_latents, config.d_model, **made)

    @property
    def d_model(self) -> int:
        return self.config.d_model

    def fresh_cache(self, batch: int) -> StackCache:
        """Two slots per pair: what the straight direction starts from, and the reverse one, at the end."""
        return fresh_slots(self, batch)

    def forward(
        self, x_bsd: Tensor, cache: StackCache | None = None, **options: Unpack[Options]
    ) -> tuple[Tensor, StackCache]:
        """The residual stream after the last pair, and what each direction leaves at its end.

        `reset_bs` and `cu_seqlens` part sequences for both directions; a reset at the first token concerns only what
        the straight direction starts from. Class latents have outputs of their own.
        """
        check_options(self, options)
        mask_bs = options.get("mask_bs")
        flow, caches = Flow(enter(self, x_bsd, mask_bs), mask_bs), check_slots(self, cache)
        reset_bs, cu_seqlens = options.get("reset_bs"), options.get("cu_seqlens")
        if reset_bs is not None:
            check_flags("reset_bs", reset_bs, x_bsd)
        if cu_seqlens is not None:
            check_packing(cu_seqlens, x_bsd)
        if self.stack_latents is not None:
            check_one_sequence(options)
            _, splices, _ = plan_levels([(0, self.stack_latents)], None, x_bsd.shape[1], False)
            flow = flow.insert(splices[0][0])
        x_bsd, mask_bs, streams = flow.x, flow.mask_bs, self.residual.seed(flow.x)
        flipped_bs = None if mask_bs is None else mask_bs.flip(1)
        bounds = options.get("cu_seqlens")
        reversed_options = {"reset_bs": reverse_resets(options.get("reset_bs")), "cu_seqlens": reverse_bounds(bounds)}
        straight, reverse = calls(self, options), calls(self, {**options, **reversed_options})
        after: list[Any] = []
        for o, pair in enumerate(self.pairs):
            ahead, back = self.order[2 * o : 2 * o + 2]
            # Packed rows come in reverse order as well, and so do their caches.
            entering = caches[2 * o + 1] if bounds is None else reverse_rows(caches[2 * o + 1])
            ahead_bsd, ahead_leaving = straight[ahead](x_bsd, caches[2 * o], mask_bs=mask_bs)
            back_bsd, back_leaving = reverse[back](x_bsd.flip(1), entering, mask_bs=flipped_bs)
            delta_bsd = self.merge(pair, ahead_bsd, back_bsd.flip(1))
            x_bsd, streams = self.residual.join(o, x_bsd, streams, delta_bsd)
            after += [ahead_leaving, back_leaving if bounds is None else reverse_rows(back_leaving)]
        return without_absent(x_bsd, mask_bs), tuple(after)

    def merge(self, pair: int, straight_bsd: Tensor, reverse_bsd: Tensor) -> Tensor:
        if self.merges is None:
            return (straight_bsd + reverse_bsd) / 2
        return self.merges[pair](straight_bsd, reverse_bsd)


def reverse_resets(reset_bs: Tensor | None) -> Tensor | None:
    """A boundary before token `t` lies, the other way round, before token `t - 1`."""
    if reset_bs is None or reset_bs.shape[1] == 0:
        return reset_bs
    return torch.cat([reset_bs[:, 1:], torch.zeros_like(reset_bs[:, :1])], 1).flip(1)


def reverse_bounds(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens[-1] - cu_seqlens.flip(0)


def reverse_rows(cache: Any) -> Any:
    return None if cache is None else select(cache, list(range(len(cache[0]) - 1, -1, -1)))
