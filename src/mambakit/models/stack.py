"""A stack of layers around one residual stream."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mambakit.blocks.block import check_flags, check_input, check_token
from mambakit.blocks.caches import detach
from mambakit.blocks.config import BlockConfig, Config, check_positive
from mambakit.blocks.family import FAMILIES, family_of
from mambakit.models import schedules
from mambakit.models.class_tokens import (
    ClassCache,
    ClassTokens,
    Flow,
    Marker,
    Splice,
    check_markers,
    check_step_without_cursors,
    fresh_cursors,
    plan_levels,
)
from mambakit.models.layer import Layer
from mambakit.models.multi_gate import MultiGateConfig, Residual
from mambakit.ops.ssd_path import SsdPath

StackCache = tuple[Any, ...]
"""One block cache per virtual layer; inside a `ClassCache` where class latents have cursors."""
Call = Callable[[Any, Tensor, Any, Tensor | None], tuple[Tensor, Any]]
"""`call(layer, x, cache, mask) -> (delta, cache)`."""


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
        block = {"family": family_of(self.block).name, **self.block.to_dict()}
        return {**Config.to_dict(self), "block": block, "virtual": schedules.to_dict(self.virtual)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]):
        block = dict(values.get("block") or {})
        family = block.pop("family", None)
        if family not in FAMILIES:
            raise ValueError(f"block.family is {family!r}, expected one of {', '.join(FAMILIES)}")
        made: dict[str, Any] = {"block": FAMILIES[family].config.from_dict(block)}
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
        flow, after = self.run(flow, cache, lambda layer, x, entering, _: layer.step(x, entering))
        return flow.x, after

    def step_infinite(self, x_bd: Tensor) -> Tensor:
        """What `step` converges to when the same token comes for ever. Class latents lie too far back to be seen."""
        family = family_of(self.config.block)
        if not hasattr(family.block, "step_infinite"):
            known = [name for name, other in FAMILIES.items() if hasattr(other.block, "step_infinite")]
            told = f"{' and '.join(known)} blocks only, and this stack's are {family.name}"
            raise ValueError(f"step_infinite is known for {told}")
        flow = enter_token(self, x_bd)
        flow, _ = self.run(flow, None, lambda layer, x, *_: (layer.step_infinite(x), None))
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
        flow, after = self.run(flow, slots, caller(self.checkpoint_layers, options or {}), between)
        y_bsd = without_absent(flow.x, flow.mask_bs)
        return y_bsd, ClassCache(after, cursors) if has_cursors else after

    def run(
        self,
        flow: Flow,
        cache: StackCache | None,
        call: Call,
        splices: dict[int, list[Splice]] | None = None,
    ) -> tuple[Flow, StackCache]:
        """All layers, each by `call(layer, x, cache, mask)`: the one place for residuals, rows and the horizon."""
        flow = flow._replace(streams=self.residual.seed(flow.x))
        inserted, cut = splices or {}, self.cut()
        if cut:
            flow = flow._replace(carry=flow.x - flow.x.detach())
        after = []
        for q, (real, entering) in enumerate(zip(self.order, check_slots(len(self.order), cache), strict=True)):
            if cut and q == cut:
                flow = flow.take_up_carry()
            for piece in inserted.get(q, ()):
                flow = flow.insert(piece)
            with torch.no_grad() if q < cut else nullcontext():
                if splices is not None and entering is not None and flow.x.shape[1] == 0:
                    delta, leaving = flow.x, entering  # no token or row yet: untouched to the last digit
                else:
                    delta, leaving = call(self.layers[real], flow.x, entering, flow.mask_bs)
                x, streams = self.residual.join(q, flow.x, flow.streams, delta)
            flow = flow._replace(x=x, streams=streams)
            after.append(detach(leaving) if q < cut else leaving)
        return flow.take_up_carry() if cut == len(self.order) else flow, tuple(after)

    def cut(self) -> int:
        """How many layers from below run without gradients."""
        if self.grad_horizon is None or not torch.is_grad_enabled():
            return 0
        if self.grad_horizon < 0:
            raise ValueError(f"grad_horizon = {self.grad_horizon} has to be 0 or more layers, or None for all")
        return max(0, len(self.order) - self.grad_horizon)

    def latents(self) -> list[tuple[int, ClassTokens]]:
        """Before which virtual layer rows enter, and whose, in the order in which tokens pass them."""
        return [(q, cast(ClassTokens, self.get_submodule(name))) for q, name in self.levels]


def check_slots(n: int, cache: StackCache | None) -> StackCache:
    """A cache for each of `n` virtual layers."""
    if cache is None:
        return (None,) * n
    if hasattr(cache, "_fields"):
        raise ValueError(f"a stack's cache is a tuple of its layers' caches, got a {type(cache).__name__}")
    if len(cache) != n:
        raise ValueError(f"the cache is of {len(cache)} layers, but this stack has {n}")
    return cache


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


def caller(checkpointed: bool, options: dict[str, Any]) -> Call:
    """How a layer is called in `forward`."""

    def call(layer: nn.Module, x_bsd: Tensor, cache: Any, mask_bs: Tensor | None) -> tuple[Tensor, Any]:
        if checkpointed and torch.is_grad_enabled():
            # Nothing in a layer is random.
            keep = {"use_reentrant": False, "preserve_rng_state": False}
            return cast(Any, checkpoint(layer, x_bsd, cache, mask_bs=mask_bs, **keep, **options))
        return layer(x_bsd, cache, mask_bs=mask_bs, **options)

    return call


def without_absent(x_bsd: Tensor, mask_bs: Tensor | None) -> Tensor:
    """Zero where there is no token."""
    return x_bsd if mask_bs is None else x_bsd.masked_fill(~mask_bs.bool()[..., None], 0)
