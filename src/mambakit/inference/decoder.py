"""A language model's decoding step in one call: token ids to logits, with the states in place. See docs/generation.md.

It is made for plain models in float32 on the CPU, their projections in float32 or quantized. `why_not` says what else
stands in a model's way; such a model is stepped module by module.
"""

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from mambakit.blocks import caches
from mambakit.blocks.block import Block
from mambakit.blocks.family import FAMILIES, FusedStep, family_of
from mambakit.blocks.modules import CausalConv1d, GatedRMSNorm, Linear, RMSNorm
from mambakit.blocks.stateless import NoCache
from mambakit.models.language_model import Backbone, LanguageModel
from mambakit.models.layer import Layer, LayerNorm
from mambakit.models.multi_gate import Residual
from mambakit.models.quantization import Bfloat16Linear, Int4Linear, Int8Linear
from mambakit.ops import decode, few_rows
from mambakit.ops.backends import overwriting, use_backend
from mambakit.ops.decode import DECODE, Decoding

PROJECTIONS = (Linear, Bfloat16Linear, Int8Linear, Int4Linear)
MODULES = (LanguageModel, Backbone, Layer, Residual, nn.ModuleList)
MODULES += (nn.Embedding, LayerNorm, RMSNorm, GatedRMSNorm, CausalConv1d, *PROJECTIONS)
# What a caller may replace on a module to change what a step computes.
CALLED = ("forward", "step", "embed", "logits", "run", "scaled", "apart", "together", "route", "mix")
SHAPES: "WeakKeyDictionary[LanguageModel, tuple[Any, dict[str, tuple[int, ...]]]]" = WeakKeyDictionary()
ROOM = 256
"""Tokens for which there is room, at least, when a cache that grows is copied."""


class StepByStep:
    """A model's own steps, in the form of a `Decoder`; with `backend="torch"` in torch's operators alone.

    The states between them are copies that the next step overwrites.
    """

    def __init__(self, model: LanguageModel, backend: str):
        self._model, self._backend = model, backend
        # A step that somebody else wrote may need its cache for longer.
        self._overwrites = getattr(model.step, "__func__", None) is LanguageModel.step
        self._cache: Any = None

    def load(self, cache: Any) -> None:
        self._cache = cache
        if self._overwrites:
            self._cache = tuple(copied(one) for one in cache)

    def step(self, ids_b: Tensor) -> Tensor:
        with use_backend(self._backend):
            if not self._overwrites:
                with torch.no_grad():
                    logits_bw, self._cache = self._model.step(ids_b, self._cache)
                return logits_bw
            with torch.inference_mode(), overwriting():
                logits_bw, self._cache = self._model.step(ids_b, self._cache)
        # An ordinary tensor, as those of `cache` are.
        return logits_bw.clone()

    def cache(self) -> Any:
        return tuple(copied(one) for one in self._cache) if self._overwrites else self._cache

    def join(self, cache: Any) -> None:
        """One more row, the last."""
        self.load(cache if self._cache is None else caches.concat([self._cache, cache]))

    def leave(self, row: int) -> None:
        """The last row takes the place of this one."""
        rows = caches.rows(self._cache)
        places = [*range(row), *([rows - 1] if row < rows - 1 else []), *range(row + 1, rows - 1)]
        self._cache = caches.select(self._cache, places) if places else None

    def row(self, row: int) -> Any:
        """The cache of one row."""
        return caches.select(self._cache, [row])


def make_decoder(model: LanguageModel, backend: str, rows: int) -> "Decoder | StepByStep":
    """The fastest way to decode `rows` rows, or the one asked for: `"cpu"` is one call per token, `"torch"` is not."""
    if backend in DECODE.kernels:
        return Decoder(model, backend)
    if backend == "auto" and rows <= few_rows.MAX_ROWS and why_not(model) is None:
        kernel = DECODE.offer(model.backbone.embedding.weight.detach())
        if kernel is not None:
            return Decoder(model, kernel.backend.name)
    return StepByStep(model, backend)


class Decoder:
    """`logits_bw = decoder.step(ids_b)` after `decoder.load(cache)`; `cache()` is the cache at any time.

    The weights are those of the model when this was made: their memory is read where it lies, so training on shows
    after the next `load`, but a parameter that is replaced does not, nor do other numbers, hooks or modules.
    """

    def __init__(self, model: LanguageModel, backend: str = "cpu"):
        reason = why_not(model)
        if reason is not None:
            raise ValueError(f'this model cannot be decoded in one call (backend "{backend}"): {reason}')
        kernel = DECODE.choose(backend, model.backbone.embedding.weight.detach())
        assert kernel is not None, "a backend asked for by name runs or raises"
        self._vocabulary = model.backbone.embedding.num_embeddings
        with torch.no_grad():
            self._decoding: Decoding = kernel(packed(model))
        backbone = model.backbone
        self._layers: list[Any] = [backbone.layers[real] for real in backbone.order]
        self._spots = [spot for layer in self._layers for spot in spots_of(layer)]
        self._like = torch.empty(0, dtype=torch.float32)
        self._rows = self._left = 0
        self._caches: list[Any] = []

    def load(self, cache: Sequence[Any]) -> None:
        """Go on from `cache`, which is copied."""
        self._rows, self._caches = self._apart(cache)
        self._make_room(ROOM)
        with torch.no_grad():
            self._decoding.load(self._states())

    def join(self, cache: Sequence[Any]) -> None:
        """One more row, the last, from a `cache` of one row, which is copied."""
        if not self._caches:
            self.load(cache)
            return
        rows, news = self._apart(cache)
        if rows != 1:
            raise ValueError(f"one row joins at a time, got a cache of {rows}")
        pairs = zip(self._caches, news, strict=True)
        self._caches = [with_row(own, new, self._rows) for own, new in pairs]
        self._rows += 1
        self._make_room(self._left or ROOM)
        self._decoding.move(self._states())

    def leave(self, row: int) -> None:
        """The last row takes the place of this one."""
        self._rows -= 1
        for tensor in (t for one in self._caches for t in one if isinstance(t, Tensor)):
            if row != self._rows:
                tensor[row].copy_(tensor[self._rows])
            if not tensor.is_floating_point():
                # Counts by which caches grow.
                tensor[self._rows] = 0

    def row(self, row: int) -> tuple[Any, ...]:
        """A copy of the state of one row."""
        return self._together([select_row(one, row, row + 1) for one in self._caches])

    def step(self, ids_b: Tensor) -> Tensor:
        """One more token of every row."""
        if not self._caches or tuple(ids_b.shape) != (self._rows,):
            raise ValueError(f"ids_b has shape {tuple(ids_b.shape)}, but a cache of {self._rows} rows was loaded")
        if any(not 0 <= token < self._vocabulary for token in ids_b.tolist()):
            raise ValueError(f"ids_b has ids outside 0 to {self._vocabulary - 1}")
        if self._left == 0:
            # Twice as much every time, so that all the copying takes as long as the last.
            self._make_room(max(ROOM, *(most_slots(one) for one in self._caches)))
            self._decoding.move(self._states())
        self._left -= 1
        return self._decoding.step(ids_b)

    def cache(self) -> tuple[Any, ...]:
        """A copy of the states, as the model's own `step` would return them."""
        return self._together([select_row(one, 0, self._rows) for one in self._caches])

    def _apart(self, cache: Sequence[Any]) -> tuple[int, list[Any]]:
        """The number of rows of a model's cache, and copies of its parts, spot by spot."""
        if len(cache) != len(self._layers):
            raise ValueError(f"the cache is of {len(cache)} layers, but this model has {len(self._layers)}")
        carried = [layer.apart(one) for layer, one in zip(self._layers, cache, strict=True)]
        layers = zip(self._layers, carried, strict=True)
        pairs = [(block, own.get(block, NoCache())) for layer, own in layers for _, block in layer.parts]
        found = [one for block, own in pairs for one in unfolded_cache(block, own)]
        rows = len(next(t for one in found for t in one if isinstance(t, Tensor)))
        for block, own in pairs:
            block.check_cache(own, rows, self._like)
        for spot, one in zip(self._spots, found, strict=True):
            for name in spot.block.cache_shapes(rows):
                if getattr(one, name).dtype != torch.float32:
                    raise ValueError(f"cache.{name} is {getattr(one, name).dtype}, expected float32")
        return rows, [copied(one) for one in found]

    def _together(self, parts: list[Any]) -> tuple[Any, ...]:
        """A model's cache of copies of its parts."""
        pairs = zip(self._spots, parts, strict=True)
        own = iter([copied(with_slots(spot.block, one, 0)) for spot, one in pairs])
        return tuple(layer.together([folded(block, own) for _, block in layer.parts]) for layer in self._layers)

    def _make_room(self, tokens: int) -> None:
        """For so many more tokens, at least, in the caches that grow."""
        pairs = zip(self._spots, self._caches, strict=True)
        self._caches = [with_slots(spot.block, one, tokens, shrink=False) for spot, one in pairs]
        self._left = tokens

    def _states(self) -> list[dict[str, Tensor | int]]:
        pairs = zip(self._spots, self._caches, strict=True)
        return [states_of(step_of(spot.block), one) for spot, one in pairs]


class Spot(NamedTuple):
    """A block where a token passes it."""

    block: Any
    norm: Any
    in_scale: float
    scale: float
    """Of what it adds."""
    beside: bool
    """Whether it reads what the block before it read."""


def spots_of(layer: Any) -> Iterator[Spot]:
    for norm, block in layer.parts:
        yield from unfolded(Spot(block, norm, 1.0, layer.residual_scale, False))


def unfolded(spot: Spot) -> Iterator[Spot]:
    """`spot`, or those of the blocks inside of its block."""
    config = spot.block.config
    spot = spot._replace(in_scale=spot.in_scale * config.in_scale, scale=spot.scale * config.out_scale)
    for place, block in enumerate(step_of(spot.block).inside(spot.block)):
        one = spot._replace(block=block, beside=spot.beside or place > 0)
        if block is spot.block:
            yield one
        else:
            yield from unfolded(one)


def unfolded_cache(block: Block, cache: Any) -> list[Any]:
    """The caches of what `unfolded` finds."""
    inside = step_of(block).inside(block)
    if inside[0] is block:
        return [cache, *(NoCache() for _ in inside[1:])]
    return [found for one, own in zip(inside, cache, strict=True) for found in unfolded_cache(one, own)]


def folded(block: Block, caches: Iterator[Any]) -> Any:
    """The cache that `unfolded_cache` takes apart, of the next ones."""
    inside = step_of(block).inside(block)
    if inside[0] is block:
        own, *_ = [next(caches) for _ in inside]
        return own
    return block.cache_class(*(folded(one, caches) for one in inside))


def with_slots(block: Block, cache: Any, tokens: int, shrink: bool = True) -> Any:
    """`cache` as long as it is after so many more tokens, what is new being zero; the same where it does not grow."""
    slots = step_of(block).slots
    if slots is None:
        return cache
    length, changed = slots(block, cache, tokens), {}
    if length <= most_slots(cache) and not shrink:
        return cache
    for name, axis in cache.grows.items():
        tensor = getattr(cache, name)
        changed[name] = F.pad(tensor, padding(tensor.dim(), axis, length - tensor.shape[axis]))
    return cache._replace(**changed)


def with_row(cache: Any, new: Any, row: int) -> Any:
    """`cache` with the only row of `new` in place `row`; with twice as much memory where there is none left for it."""
    grows, changed = getattr(cache, "grows", {}), []
    for name, tensor, added in zip(cache._fields, cache, new, strict=True):
        if not isinstance(tensor, Tensor):
            changed.append(tensor)
            continue
        missing = [0] * tensor.dim()
        if row == len(tensor):
            missing[0] = row
        if name in grows:
            axis = grows[name]
            missing[axis] = max(0, added.shape[axis] - tensor.shape[axis])
            added = F.pad(added, padding(added.dim(), axis, tensor.shape[axis] + missing[axis] - added.shape[axis]))
        if any(missing):
            tensor = F.pad(tensor, [side for count in reversed(missing) for side in (0, count)])
        tensor[row].copy_(added[0])
        changed.append(tensor)
    return type(cache)(*changed)


def select_row(cache: Any, start: int, stop: int) -> Any:
    """Rows of a block's cache, without copying."""
    return type(cache)(*(t[start:stop] if isinstance(t, Tensor) else t for t in cache))


def padding(axes: int, axis: int, count: int) -> list[int]:
    """So many zeros at the end of one axis, for `F.pad`."""
    return [0, 0] * (axes - 1 - axis) + [0, count]


def states_of(step: FusedStep, cache: Any) -> dict[str, Tensor | int]:
    """A cache in the words of the kernels."""
    states = {place: getattr(cache, name) for name, place in step.places.items()}
    return states if step.slots is None else {**states, "slots": most_slots(cache)}


def most_slots(cache: Any) -> int:
    return max((getattr(cache, name).shape[axis] for name, axis in getattr(cache, "grows", {}).items()), default=0)


def packed(model: LanguageModel) -> decode.Model:
    """What `DECODE` reads of a model that `why_not` has nothing against."""
    backbone = model.backbone
    return decode.Model(
        embedding=backbone.embedding.weight,
        embedding_scale=model.config.embedding_scale,
        parts=[packed_part(spot) for real in backbone.order for spot in spots_of(backbone.layers[real])],
        norm_f=packed_norm(backbone.norm_f),
        head=model.lm_head.stored(),
        logits_scale=model.config.logits_scale,
        vocab_size=model.config.vocab_size,
    )


def packed_part(spot: Spot) -> decode.Part:
    block, step = spot.block, step_of(spot.block)
    # Aliases, for a parameter may be replaced while everything else is read where it lay.
    own = {name: tensor.detach() for name, tensor in block.named_parameters(recurse=False)}
    kept = SimpleNamespace(config=block.config, **own)
    return decode.Part(
        kind=family_of(block).name,
        fields=step.fields(block),
        prepared=lambda: step.prepared(kept),
        projections={name: stored(getattr(block, name, None)) for name in step.projections},
        carried=[*step.places.values(), *(["slots"] if step.slots is not None else [])],
        norm=packed_norm(spot.norm)._replace(scale=spot.in_scale),
        scale=spot.scale,
        beside=spot.beside,
    )


def stored(matrix: Any) -> few_rows.Weights | None:
    """Of a projection, or of several in one parameter, one after the other."""
    if isinstance(matrix, Tensor):
        return few_rows.Weights(few_rows.FLOAT32, matrix.shape[-1], matrix.flatten(0, -2))
    return None if matrix is None else matrix.stored()


def packed_norm(norm: Any) -> decode.Norm:
    centred = isinstance(norm, nn.LayerNorm)
    return decode.Norm(norm.weight, norm.bias if centred else None, centred, norm.eps)


def step_of(block: Block) -> FusedStep:
    step = family_of(block).step
    assert step is not None, "the kernel knows families that have one"
    return step


def copied(cache: Any) -> Any:
    """In contiguous memory of its own, cut off from what computed it."""
    if isinstance(cache, Tensor):
        return torch.clone(cache, memory_format=torch.contiguous_format).detach()
    if not isinstance(cache, tuple):
        return cache
    parts = [copied(part) for part in cache]
    return type(cache)(*parts) if hasattr(cache, "_fields") else tuple(parts)


def why_not(model: nn.Module) -> str | None:
    """What keeps `model` from being decoded in one call, or None."""
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return "there are hooks on all modules"
    if type(model) is not LanguageModel:
        return f"it is a {type(model).__name__}"
    kinds = known_modules()
    for name, module in model.named_modules():
        reason = why_not_module(module, kinds)
        if reason is not None:
            return f"{name or 'the model'} {reason}"
    backbone = model.backbone
    if backbone.levels:
        return "it has class tokens or latents"
    if backbone.residual.gate_of is not None:
        return "it has MultiGate residuals"
    if backbone.config.ignore_first_residual or backbone.config.ignore_last_residual:
        return "it leaves out a residual"
    if all(block.cache_class is NoCache for layer in backbone.layers for _, block in layer.parts):  # type: ignore[union-attr]
        return "its blocks carry nothing from token to token"
    return why_not_tensors(model)


def known_modules() -> set[type]:
    """Of these very classes: a derived one may compute something else."""
    fused = [(family.block, family.step) for family in FAMILIES.values() if family.step is not None]
    return {*MODULES, *(kind for block, step in fused for kind in (block, *step.modules))}


def why_not_module(module: nn.Module, kinds: set[type]) -> str | None:
    if type(module) not in kinds:
        return f"is a {type(module).__name__}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has hooks"
    if not module.__dict__.keys().isdisjoint(CALLED):
        return "has a method replaced"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "renormalises its rows"
    if isinstance(module, nn.LayerNorm) and not module.elementwise_affine:
        return "has no weight"
    if type(module) is Layer and any(getattr(norm, "group_size", None) is not None for norm, _ in module.parts):
        return "norms in groups"
    if isinstance(module, Block):
        return step_of(module).why_not(module)
    if isinstance(module, PROJECTIONS) and not few_rows.is_stored_well(module.stored()):
        return f"has weights of {module.stored().weight.dtype} in a form that the kernels do not read"
    return None


def why_not_tensors(model: LanguageModel) -> str | None:
    """The first tensor that is not as the config says: the kernels trust it."""
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers()))
    for name, shape in shapes_of(model).items():
        tensor = tensors.get(name)
        if tensor is None:
            found: Any = stored_shape(model, name, shape)
        elif tensor.dtype == torch.float32 and few_rows.is_plain(tensor):
            found = tuple(tensor.shape)
        else:
            found = f"{tensor.dtype} on {tensor.device}"
        if found != shape:
            return f"{name} is {found}, expected {shape}, contiguous float32 on the CPU"
    return None


def stored_shape(model: LanguageModel, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | str:
    """Of the quantized weight of that name, if it is one; matrices of a stack are one after the other there."""
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    module = module if own == "weight" else getattr(module, own, None)
    if not isinstance(module, PROJECTIONS):
        return "missing"
    stored = module.stored()
    found = stored.weight.shape[0], stored.columns
    return shape if found == (math.prod(shape[:-1]), shape[-1]) else found


def shapes_of(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """What the config says of a model's parameters and buffers; remembered, as it takes as long as many tokens."""
    config, shapes = SHAPES.get(model, (None, {}))
    if config is not model.config:
        made = LanguageModel(model.config, device="meta")
        named = (*made.named_parameters(remove_duplicate=False), *made.named_buffers())
        shapes = {name: tuple(tensor.shape) for name, tensor in named}
        SHAPES[model] = (model.config, shapes)
    return shapes
