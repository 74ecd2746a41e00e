"""A stack of layers around one residual stream."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mambakit.blocks.block import check_flags, check_input, check_token
from mambakit.blocks.config import Config, check_positive
from mambakit.models import schedules
from mambakit.models.class_tokens import (
    ClassCache,
    ClassTokens,
    Marker,
    check_markers,
    check_step_without_cursors,
    fresh_cursors,
    plan_levels,
)
from mambakit.models.flow import Flow, StackCache, caller, check_slots, run, without_absent
from mambakit.models.layer import FAMILIES, BlockConfig, Layer, family_of
from mambakit.models.multi_gate import MultiGateConfig, Residual
from mambakit.ops.ssd_path import SsdPath


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig(Config):
    block: BlockConfig
    n_layer: int
    d_intermediate: int = 0
    """Hidden width of each layer's gated MLP, rounded up to a multiple of 128; 0 is none."""
    rms_norm: bool = True
    """RMSNorm before blocks, or LayerNorm."""
    norm_eps: float = 1e-5
    residual_in_fp32: bool = True
    virtual: schedules.Schedule | schedules.PairSchedule | None = None
    """A schedule of virtual layers over the `n_layer` sets of weights; None is each once."""
    ignore_first_residual: bool = False
    """The first layer's output goes on without the stack's input."""
    ignore_last_residual: bool = False
    """The last layer's output leaves the stack alone."""
    multi_gate: MultiGateConfig | None = None
    """Gated streams in place of the sum of all layers' outputs."""
    stack_latents: tuple[Marker, ...] = ()
    """Markers of learned rows inserted before the first layer; see `class_tokens.py`."""
    layer_latents: tuple[tuple[Marker, ...], ...] = ()
    """For each of the `n_layer` sets of weights, markers of rows inserted before every virtual layer that uses it."""

    def __post_init__(self) -> None:
        family_of(self.block)
        check_positive(self, "n_layer", "norm_eps")
        if self.d_intermediate < 0:
            raise ValueError(f"d_intermediate = {self.d_intermediate} has to be 0 (no MLP) or positive")
        _ = self.order  # raises where the schedule does not fit
        check_markers("stack_latents", self.stack_latents)
        if self.layer_latents and len(self.layer_latents) != self.n_layer:
            raise ValueError(f"layer_latents has {len(self.layer_latents)} entries for {self.n_layer} layers")
        for markers in self.layer_latents:
            check_markers("layer_latents", markers)

    @property
    def order(self) -> tuple[int, ...]:
        """The weights of each virtual layer."""
        if self.virtual is None:
            return tuple(range(self.n_layer))
        if not isinstance(self.virtual, schedules.Schedule):
            raise ValueError(f"virtual is {self.virtual!r}, expected Cyclic(n), Stretched(n), Custom((...)) or None")
        return self.virtual.order(self.n_layer)

    def to_dict(self) -> dict[str, Any]:
        block = {"family": family_of(self.block), **self.block.to_dict()}
        return {**Config.to_dict(self), "block": block, "virtual": schedules.to_dict(self.virtual)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]):
        block = dict(values.get("block") or {})
        family = block.pop("family", None)
        if family not in FAMILIES:
            raise ValueError(f"block.family is {family!r}, expected one of {', '.join(FAMILIES)}")
        made: dict[str, Any] = {"block": FAMILIES[family][0].from_dict(block)}  # type: ignore[attr-defined]
        if values.get("virtual") is not None:
            made["virtual"] = schedules.from_dict(values["virtual"])
        if values.get("multi_gate") is not None:
            made["multi_gate"] = MultiGateConfig.from_dict(values["multi_gate"])
        return super(StackConfig, cls).from_dict({**values, **made})


class Stack(nn.Module):
    """Layers with the call, step, cache and mask contract of a block.

    `grad_horizon` and `checkpoint_layers` change gradients and memory, never values, and may be set at any time. Only
    the last `grad_horizon` virtual layers are differentiated; around the others gradients pass to the input unchanged.
    With `checkpoint_layers` the backward pass computes each layer again instead of keeping its activations.
    """

    def __init__(
        self,
        config: StackConfig,
        *,
        grad_horizon: int | None = None,
        checkpoint_layers: bool = False,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.config = config
        self.order = config.order
        self.grad_horizon = grad_horizon
        self.checkpoint_layers = checkpoint_layers
        options = {"d_intermediate": config.d_intermediate, "rms_norm": config.rms_norm, "norm_eps": config.norm_eps}
        made = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList(Layer(config.block, **options, **made) for _ in range(config.n_layer))
        self.residual = Residual(config, self.order, config.n_layer, **made)
        # Before which virtual layer rows enter, and the name of their module.
        self.levels: list[tuple[int, str]] = []
        if config.stack_latents:
            self.stack_latents = ClassTokens(config.stack_latents, config.block.d_model, **made)
            self.levels.append((0, "stack_latents"))
        width, per_layer = config.block.d_model, enumerate(config.layer_latents)
        rows = {str(real): ClassTokens(markers, width, **made) for real, markers in per_layer if markers}
        if rows:
            self.layer_latents = nn.ModuleDict(rows)
            self.levels += [(q, f"layer_latents.{real}") for q, real in enumerate(self.order) if str(real) in rows]

    @property
    def d_model(self) -> int:
        return self.config.block.d_model

    def fresh_cache(self, batch: int, length: int | None = None) -> StackCache:
        """Nothing seen yet. `length` is that of the sequence to come, where class latents need to know it."""
        caches = tuple(cast(Layer, self.layers[real]).fresh_cache(batch) for real in self.order)
        return ClassCache(caches, fresh_cursors(self.latents(), length)) if self.levels else caches

    def forward(
        self,
        x_bsd: Tensor,
        cache: StackCache | None = None,
        *,
        path: SsdPath | None = None,
        mask_bs: Tensor | None = None,
        reset_bs: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, StackCache]:
        """The residual stream after the last layer, and the cache; masks, resets and packing are as in a block.

        Class latents have outputs of their own. A cache from `fresh_cache` continues the sequence where it stands; with
        no cache, or one without cursors, `x_bsd` is the whole sequence.
        """
        if self.levels and (reset_bs is not None or cu_seqlens is not None):
            raise ValueError("class latents know one sequence per row: give each sequence a row of its own")
        options = {"path": path, "reset_bs": reset_bs, "cu_seqlens": cu_seqlens}
        return self.advance(x_bsd, cache, mask_bs, options)

    def step(self, x_bd: Tensor, cache: StackCache | None = None) -> tuple[Tensor, StackCache]:
        """One token. With a cursor also the rows around it; the output is that of the last of them."""
        flow = enter_token(self, x_bd)
        if self.levels:
            if isinstance(cache, ClassCache):
                y_bsd, cache = self.advance(x_bd[:, None], cache)
                return y_bsd[:, -1], cache
            check_step_without_cursors(*(level for _, level in self.latents()))
        flow, after = run(self, flow, cache, lambda layer, x, entering, _: layer.step(x, entering))
        return flow.x, after

    def step_infinite(self, x_bd: Tensor) -> Tensor:
        """What `step` converges to when the same token comes for ever. Class latents lie too far back to be seen."""
        family = family_of(self.config.block)
        if family != "mamba3":
            raise ValueError(f"step_infinite is known for mamba3 blocks only, and this stack's are {family}")
        flow = enter_token(self, x_bd)
        flow, _ = run(self, flow, None, lambda layer, x, *_: (layer.step_infinite(x), None))
        return flow.x

    def prime(self, cache: StackCache) -> tuple[Tensor | None, StackCache]:
        """Let the rows through that the next token would be preceded by. The last output, or None if there are none."""
        if not self.levels:
            check_slots(len(self.order), cache)
            return None, cache
        if not isinstance(cache, ClassCache):
            raise ValueError("prime needs a cache with cursors; fresh_cache(batch, length) makes one")
        batch, weight = len(cache.inner[0][0]), next(self.parameters())
        y_bsd, cache = self.advance(weight.new_zeros(batch, 0, self.d_model), cache, prime=True)
        return (y_bsd[:, -1] if y_bsd.shape[1] else None), cache

    def advance(
        self,
        x_bsd: Tensor,
        cache: StackCache | None,
        mask_bs: Tensor | None = None,
        options: dict[str, Any] | None = None,
        prime: bool = False,
    ) -> tuple[Tensor, StackCache]:
        """The next tokens with the rows that belong between them, or only those before the next one."""
        flow = enter(self, x_bsd, mask_bs)
        has_cursors = isinstance(cache, ClassCache)
        slots, cursors = cache if has_cursors else (cache, fresh_cursors(self.latents(), x_bsd.shape[1]))
        splices, cursors = plan_levels(self.latents(), cursors, x_bsd.shape[1], prime)
        between = splices if prime or self.levels else None
        flow, after = run(self, flow, slots, caller(self.checkpoint_layers, options or {}), between)
        y_bsd = without_absent(flow.x, flow.mask_bs)
        return y_bsd, ClassCache(after, cursors) if has_cursors else after

    def latents(self) -> list[tuple[int, ClassTokens]]:
        """Before which virtual layer rows enter, and whose, in the order in which tokens pass them."""
        return [(q, cast(ClassTokens, self.get_submodule(name))) for q, name in self.levels]


def enter(stack: Any, x_bsd: Tensor, mask_bs: Tensor | None) -> Flow:
    check_input(stack, x_bsd)
    if mask_bs is not None:
        check_flags("mask_bs", mask_bs, x_bsd)
    return Flow(into_residual(stack.config, without_absent(x_bsd, mask_bs)), mask_bs)


def enter_token(stack: Any, x_bd: Tensor) -> Flow:
    check_token(stack, x_bd)
    check_input(stack, x_bd[:, None])
    return Flow(into_residual(stack.config, x_bd))


def into_residual(config: StackConfig, x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) if config.residual_in_fp32 else x
