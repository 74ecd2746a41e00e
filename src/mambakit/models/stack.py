"""A stack of layers around one residual stream."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from mambakit.arguments import check_flag, shown
from mambakit.blocks import family
from mambakit.blocks.block import Options, check_flags, check_input, check_options, check_token, resets
from mambakit.blocks.config import BlockConfig, Config, check_config, check_object, check_positive, check_types
from mambakit.blocks.family import FAMILIES, family_of
from mambakit.blocks.mlp import MLPConfig
from mambakit.models import schedules
from mambakit.models.class_tokens import (
    ClassCache,
    ClassTokens,
    Marker,
    batch_with_cursors,
    check_markers,
    check_one_sequence,
    check_step_without_cursors,
    fresh_cursors,
    plan_levels,
)
from mambakit.models.flow import Flow, at_infinity, calls, run
from mambakit.models.layer import Layer
from mambakit.models.multi_gate import MultiGateConfig, Residual
from mambakit.ops.shapes import check_beside

StackCache = tuple[Any, ...]
"""One block cache per virtual layer; inside a `ClassCache` where class latents have cursors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig(Config):
    """Layers around one residual stream, and options of it.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> config = mk.StackConfig(block=block, n_layer=3, virtual=mk.Cyclic(6))
    """

    layers: tuple[tuple[BlockConfig, ...], ...] | None = None
    """The blocks of each layer, one after the other; None is `n_layer` times `block`, with an MLP where asked for."""
    block: BlockConfig | None = None
    n_layer: int = 0
    """How many layers; with `layers` it is their number."""
    d_intermediate: int = 0
    """Hidden width of each layer's gated MLP, rounded up to a multiple of 128; 0 is none."""
    rms_norm: bool = True
    """RMSNorm before blocks, or LayerNorm."""
    norm_eps: float = 1e-5
    residual_scale: float = 1.0
    """What each block's output is multiplied by before it is added to the residual."""
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
        if self.layers is not None:
            self._check_layers(self.layers)
        elif self.block is None:
            raise ValueError("give block and n_layer, or layers with the blocks of each, and got neither")
        else:
            check_block(self.block)
        check_types(self, "virtual")  # `order` says what it can be
        check_positive(self, "n_layer", "norm_eps", "residual_scale")
        if self.n_layer > schedules.MOST_LAYERS:
            raise ValueError(f"n_layer = {self.n_layer} is more than {schedules.MOST_LAYERS} layers")
        if self.d_intermediate < 0:
            raise ValueError(f"d_intermediate = {self.d_intermediate} has to be 0 (no MLP) or positive")
        _ = self.order  # raises where the schedule does not fit
        check_markers("stack_latents", self.stack_latents)
        if self.layer_latents and len(self.layer_latents) != self.n_layer:
            raise ValueError(f"layer_latents has {len(self.layer_latents)} entries for {self.n_layer} layers")
        for markers in self.layer_latents:
            check_markers("layer_latents", markers)

    def _check_layers(self, layers: tuple[tuple[BlockConfig, ...], ...]) -> None:
        if not isinstance(layers, list | tuple) or not layers:
            raise ValueError(f"layers = {shown(layers)} has to be a tuple of layers, each a tuple of blocks' configs")
        if self.block is not None or self.d_intermediate or self.n_layer not in (0, len(layers)):
            raise ValueError(
                "layers says which blocks there are and how many layers; "
                f"leave out block, d_intermediate and n_layer = {self.n_layer}"
            )
        if not all(isinstance(blocks, list | tuple) and blocks for blocks in layers):
            raise ValueError(f"layers = {shown(layers)} has to be a tuple of layers, each a tuple of blocks' configs")
        for i, blocks in enumerate(layers):
            for block in blocks:
                check_block(block)
                if block.d_model != layers[0][0].d_model:
                    wide = f"d_model = {block.d_model}, and the first has {layers[0][0].d_model}"
                    raise ValueError(f"a {type(block).__name__} of layer {i} has {wide}; all blocks share one width")
        object.__setattr__(self, "layers", tuple(map(tuple, layers)))
        object.__setattr__(self, "n_layer", len(layers))

    @property
    def blocks(self) -> tuple[tuple[BlockConfig, ...], ...]:
        """The blocks of each layer, in the short form too."""
        if self.layers is not None:
            return self.layers
        assert self.block is not None
        # Rounded up as in the official checkpoints.
        mlp = MLPConfig(self.d_model, -(-self.d_intermediate // 128) * 128) if self.d_intermediate else None
        return ((self.block,) if mlp is None else (self.block, mlp),) * self.n_layer

    @property
    def d_model(self) -> int:
        first = self.block if self.layers is None else self.layers[0][0]
        assert first is not None
        return first.d_model

    @property
    def order(self) -> tuple[int, ...]:
        """The weights of each virtual layer."""
        if self.virtual is None:
            return tuple(range(self.n_layer))
        if not isinstance(self.virtual, schedules.Schedule):
            raise ValueError(
                f"virtual is {shown(self.virtual)}, expected Cyclic(n), Stretched(n), Custom((...)) or None"
            )
        return self.virtual.order(self.n_layer)

    def to_dict(self) -> dict[str, Any]:
        values = {**Config.to_dict(self), "virtual": schedules.to_dict(self.virtual)}
        if self.layers is None:
            # As before there were layers of several blocks, so that older versions read it.
            return {**values, "block": family.to_dict(self.block)}
        return {**values, "layers": [[family.to_dict(block) for block in blocks] for blocks in self.layers]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]):
        check_object(cls, values)
        made: dict[str, Any] = {}
        if values.get("layers") is not None:
            layers = values["layers"]
            if not isinstance(layers, list | tuple) or not all(isinstance(blocks, list | tuple) for blocks in layers):
                raise ValueError("layers has to be a list of layers, each a list of blocks")
            made["layers"] = tuple(
                tuple(family.from_dict(block, f"layers[{i}][{j}]") for j, block in enumerate(blocks))
                for i, blocks in enumerate(layers)
            )
        else:
            made["block"] = family.from_dict({} if values.get("block") is None else values["block"])
        if values.get("virtual") is not None:
            made["virtual"] = schedules.from_dict(values["virtual"])
        if values.get("multi_gate") is not None:
            made["multi_gate"] = MultiGateConfig.from_dict(values["multi_gate"])
        return super(StackConfig, cls).from_dict({**values, **made})


def check_block(config: Any) -> None:
    kind = family_of(config).config
    if not isinstance(config, kind):
        raise ValueError(f"block is a {type(config).__name__} itself, expected its {kind.__name__}: block.config")


class Stack(nn.Module):
    """Layers with the call, step, cache and mask contract of a block.

    `grad_horizon` and `checkpoint_layers` change gradients and memory, never values, and may be set at any time. Only
    the last `grad_horizon` virtual layers are differentiated; around the others gradients pass to the input unchanged.
    With `checkpoint_layers` the backward pass computes each layer again instead of keeping its activations.

    Examples:
        >>> stack = mk.Stack(mk.StackConfig(block=mk.Mamba1Config(d_model=64), n_layer=2))
        >>> y_bsd, cache = stack(torch.randn(2, 10, 64))
        >>> y_bd, cache = stack.step(torch.randn(2, 64), cache)
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
        check_config(self, config, StackConfig)
        check_flag("checkpoint_layers", checkpoint_layers)
        self.config = config
        self.order = config.order
        self.grad_horizon = grad_horizon
        self.checkpoint_layers = checkpoint_layers
        made = {"device": device, "dtype": dtype}
        self.layers = make_layers(config, **made)
        self.residual = Residual(config, self.order, config.n_layer, **made)
        # Before which virtual layer rows enter, and the name of their module.
        self.levels: list[tuple[int, str]] = []
        if config.stack_latents:
            self.stack_latents = ClassTokens(config.stack_latents, config.d_model, **made)
            self.levels.append((0, "stack_latents"))
        width, per_layer = config.d_model, enumerate(config.layer_latents)
        rows = {str(real): ClassTokens(markers, width, **made) for real, markers in per_layer if markers}
        if rows:
            self.layer_latents = nn.ModuleDict(rows)
            self.levels += [(q, f"layer_latents.{real}") for q, real in enumerate(self.order) if str(real) in rows]

    @property
    def d_model(self) -> int:
        return self.config.d_model

    @property
    def is_plain(self) -> bool:
        """Nothing but layers and their sum, which `forward` then is; anything more goes by `flow.py`."""
        in_backward = (self.checkpoint_layers or self.grad_horizon is not None) and torch.is_grad_enabled()
        return not (in_backward or self.levels) and self.residual.is_sum

    def fresh_cache(self, batch: int, length: int | None = None) -> StackCache:
        """Nothing seen yet. `length` is that of the sequence to come, where class latents need to know it."""
        caches = fresh_slots(self, batch)
        return ClassCache(caches, fresh_cursors(self.latents(), length)) if self.levels else caches

    def forward(
        self, x_bsd: Tensor, cache: StackCache | None = None, **options: Unpack[Options]
    ) -> tuple[Tensor, StackCache]:
        """The residual stream after the last layer, and the cache; masks, resets and packing are as in a block.

        Class latents have outputs of their own. A cache from `fresh_cache` continues the sequence where it stands; with
        no cache, or one without cursors, `x_bsd` is the whole sequence.
        """
        check_options(self, options)
        if not self.is_plain:
            return self.advance(x_bsd, cache, options)
        mask_bs = options.get("mask_bs")
        x_bsd = enter(self, x_bsd, mask_bs)
        layers, after = list(self.layers), []
        for real, entering in zip(self.order, check_slots(self, cache), strict=True):
            delta_bsd, leaving = layers[real](x_bsd, entering, **options)
            x_bsd = x_bsd + delta_bsd
            after.append(leaving)
        return without_absent(x_bsd, mask_bs), tuple(after)

    def step(
        self, x_bd: Tensor, cache: StackCache | None = None, *, reset_b: Tensor | None = None
    ) -> tuple[Tensor, StackCache]:
        """One token; rows of `reset_b` start afresh before it.

        With a cursor also the rows around it; the output is that of the last of them.
        """
        check_token(self, x_bd)
        options = resets(reset_b, x_bd)
        if self.levels and not isinstance(cache, ClassCache):
            check_step_without_cursors(*(level for _, level in self.latents()))
            flow, after = run(self, Flow(enter(self, x_bd[:, None])), check_slots(self, cache), calls(self, options))
            return flow.x[:, 0], after
        y_bsd, after = self(x_bd[:, None], cache, **options)
        return y_bsd[:, -1], after

    def step_infinite(self, x_bd: Tensor) -> Tensor:
        """What `step` converges to when the same token comes for ever. Class latents lie too far back to be seen."""
        able = [name for name, kind in FAMILIES.items() if hasattr(kind.block, "step_infinite") and kind.alone]
        kinds = {type(block): family_of(block) for blocks in self.config.blocks for block in blocks}
        others = [kind.name for kind in kinds.values() if not hasattr(kind.block, "step_infinite")]
        if others:
            told = f"{', '.join(able)} blocks only, and this stack has {', '.join(others)}"
            raise ValueError(f"step_infinite is known for {told}")
        check_token(self, x_bd)
        flow = Flow(enter(self, x_bd[:, None])[:, 0])
        flow, _ = run(self, flow, check_slots(self, None), [partial(at_infinity, layer) for layer in self.layers])
        return flow.x

    def prime(self, cache: StackCache) -> tuple[Tensor | None, StackCache]:
        """Let the rows through that the next token would be preceded by. The last output, or None if there are none."""
        if not self.levels:
            return None, check_slots(self, cache)
        none_b0d = next(self.parameters()).new_zeros(batch_with_cursors(cache), 0, self.d_model)
        y_bsd, cache = self.advance(none_b0d, cache, {}, prime=True)
        return (y_bsd[:, -1] if y_bsd.shape[1] else None), cache

    def advance(
        self, x_bsd: Tensor, cache: StackCache | None, options: Options, prime: bool = False
    ) -> tuple[Tensor, StackCache]:
        """`forward` with all that wraps a stack; with `prime` only the rows before the next token, and no token."""
        if self.levels:
            check_one_sequence(options)
        mask_bs = options.get("mask_bs")
        flow = Flow(enter(self, x_bsd, mask_bs), mask_bs)
        slots, splices, cursors = plan_levels(self.latents(), cache, x_bsd.shape[1], prime)
        between = splices if self.levels or prime else None
        flow, after = run(self, flow, check_slots(self, slots), calls(self, options), between)
        return without_absent(flow.x, flow.mask_bs), after if cursors is None else ClassCache(after, cursors)

    def latents(self) -> list[tuple[int, ClassTokens]]:
        """Before which virtual layer rows enter, and whose, in the order in which tokens pass them."""
        return [(q, cast(ClassTokens, self.get_submodule(name))) for q, name in self.levels]


# What stacks of one direction and of two do alike.


def make_layers(config: StackConfig, **made: Any) -> nn.ModuleList:
    options = {name: getattr(config, name) for name in ("rms_norm", "norm_eps", "residual_scale")}
    return nn.ModuleList(Layer(blocks, **options, **made) for blocks in config.blocks)


def fresh_slots(stack: Any, batch: int) -> StackCache:
    """A cache for each virtual layer."""
    return tuple(stack.layers[real].fresh_cache(batch) for real in stack.order)


def check_slots(stack: Any, cache: StackCache | None) -> StackCache:
    """A cache, or None, for each virtual layer."""
    n = len(stack.order)
    if cache is None:
        return (None,) * n
    if not isinstance(cache, tuple | list) or hasattr(cache, "_fields"):
        raise ValueError(f"cache has to be a tuple of {n} layers' caches or None, got a {type(cache).__name__}")
    if len(cache) != n:
        raise ValueError(f"the cache is of {len(cache)} layers, but this stack has {n}")
    return cache


def enter(stack: Any, x_bsd: Tensor, mask_bs: Tensor | None = None) -> Tensor:
    """The residual stream before the first layer."""
    check_input(stack, x_bsd)
    if x_bsd.is_meta or type(x_bsd) is not Tensor:
        check_beside("the first weight", next(stack.parameters()), "x_bsd", x_bsd)
    if mask_bs is not None:
        check_flags("mask_bs", mask_bs, x_bsd)
    x_bsd = without_absent(x_bsd, mask_bs)
    return x_bsd.to(torch.promote_types(x_bsd.dtype, torch.float32)) if stack.config.residual_in_fp32 else x_bsd


def without_absent(x_bsd: Tensor, mask_bs: Tensor | None) -> Tensor:
    """Zero where there is no token."""
    return x_bsd if mask_bs is None else x_bsd.masked_fill(~mask_bs.bool()[..., None], 0)
