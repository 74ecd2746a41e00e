"""A language model's decoding step in one call: token ids to logits, with the states in place. See docs/generation.md.

It is made for plain models in float32 or bfloat16 on the CPU, their projections as they are or quantized. It computes
in float32 whatever the weights are, and rounds what projections read where they do. `why_not` says what else stands in
a model's way; such a model is stepped module by module.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from mambakit.arguments import shown
from mambakit.blocks import caches
from mambakit.blocks.block import Block
from mambakit.blocks.family import FAMILIES, family_of
from mambakit.blocks.modules import CausalConv1d, GatedRMSNorm, Linear, RMSNorm
from mambakit.blocks.stateless import NoCache
from mambakit.inference.decoder_states import States, copied, step_of, take_out
from mambakit.models.language_model import Backbone, LanguageModel
from mambakit.models.layer import Layer, LayerNorm
from mambakit.models.multi_gate import Residual
from mambakit.models.outline import outline
from mambakit.models.quantized_linear import Bfloat16Linear, Int4Linear, Int8Linear, IntegerInt4Linear
from mambakit.ops import decode, few_rows
from mambakit.ops.backends import overwriting, use_backend
from mambakit.ops.decode import DECODE, At, Decoding
from mambakit.ops.shapes import check_readable

PROJECTIONS = (Linear, Bfloat16Linear, Int8Linear, Int4Linear, IntegerInt4Linear)
MODULES = (LanguageModel, Backbone, Layer, Residual, nn.ModuleList)
MODULES += (nn.Embedding, LayerNorm, RMSNorm, GatedRMSNorm, CausalConv1d, *PROJECTIONS)
# What a caller may replace on a module to change what a step computes.
CALLED = ("forward", "step", "embed", "logits", "run", "scaled", "apart", "together", "route", "mix")
AHEAD = few_rows.MAX_ROWS
"""Tokens by which a chain may go on."""
SHAPES: "WeakKeyDictionary[LanguageModel, tuple[Any, dict[str, tuple[int, ...]]]]" = WeakKeyDictionary()


class StepByStep:
    """A model's own steps, in the form of a `Decoder`; with `backend="torch"` in torch's operators alone.

    The states between them are copies that the next step overwrites.
    """

    def __init__(self, model: LanguageModel, backend: str):
        self._model, self._backend = model, backend
        self.best: list[int] | None = None
        """Not known here; see `Decoder`."""
        # A step that somebody else wrote may need its cache for longer.
        self._overwrites = getattr(model.step, "__func__", None) is LanguageModel.step
        self._cache: Any = None

    def load(self, cache: Any) -> None:
        self._cache = cache
        if self._overwrites:
            self._cache = tuple(copied(one) for one in cache)

    def step(self, ids_b: Tensor | list[int]) -> Tensor:
        if isinstance(ids_b, list):
            ids_b = torch.tensor(ids_b, device=self._model.backbone.embedding.weight.device)
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


def at_places(text_b: list[int], before_b: list[int], after_b: list[int], stays: bool = True) -> At:
    """One tensor is made of the numbers: that takes a third as long as three."""
    texts_b, befores_b, afters_b = torch.tensor([text_b, before_b, after_b]).unbind()
    return At(texts_b, befores_b, afters_b, stays=stays)


def check_one_call(model: LanguageModel, backend: str) -> None:
    """ValueError where a backend that decodes in one call is asked for by name and cannot."""
    reason = why_not(model) if backend in DECODE.kernels else None
    if reason is not None:
        raise ValueError(f'this model cannot be decoded in one call (backend "{backend}"): {reason}')


STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What states may be kept in between tokens."""


def check_states(model: LanguageModel, backend: str, states: str) -> None:
    """ValueError where `states` is no word for them, or this model's cannot be kept so."""
    if type(states) is not str or states not in STATES:
        raise ValueError(f"states is {shown(states)}, expected one of {', '.join(map(repr, STATES))}")
    if states == "float32":
        return
    reason = f'backend="{backend}" steps module by module' if backend == "torch" else why_not(model)
    if reason is None and DECODE.offer(model.backbone.embedding.weight.detach()) is None:
        reason = "no kernel decodes it in one call"
    if reason is None:
        blocks = [spot.block for layer in model.backbone.layers for spot in spots_of(layer)]
        # Tokens that are kept are no states.
        stateful = [b for b in blocks if b.cache_class is not NoCache and not hasattr(b.cache_class, "grows")]
        others = sorted({family_of(block).title for block in stateful if step_of(block).narrow is None})
        reason = f"it is for Mamba-2, and there is {', '.join(others)}" if others else None
    if reason is not None:
        raise ValueError(f'states="{states}": {reason}; leave it out')


def make_decoder(model: LanguageModel, backend: str, states: str = "float32") -> "Decoder | StepByStep":
    """The fastest way to decode rows, or the one asked for: `"cpu"` is one call per token, `"torch"` is not."""
    check_states(model, backend, states)
    if backend in DECODE.kernels:
        return Decoder(model, backend, states)
    if backend == "auto" and why_not(model) is None:
        kernel = DECODE.offer(model.backbone.embedding.weight.detach())
        if kernel is not None:
            return Decoder(model, kernel.backend.name, states)
    return StepByStep(model, backend)


class Chain:
    """Tokens of a row that were computed in one call, or in several that went on."""

    def __init__(self, place: int):
        self.places = [place]
        """What is small after each token, and the notes of those that may be taken back."""
        self.settled = 1
        """How many are written into the large states."""
        self.counted = 1
        """How many count."""


class Decoder:
    """`logits_bw = decoder.step(ids_b)` after `decoder.load(cache)`; `cache()` is the cache at any time.

    The weights are those of the model when this was made: their memory is read where it lies, so training on shows
    after the next `load`, but a parameter that is replaced does not, nor do other numbers, hooks or modules.
    """

    def __init__(self, model: LanguageModel, backend: str = "cpu", states: str = "float32"):
        check_one_call(model, backend)
        check_states(model, backend, states)
        self._chained = states == "float32"
        """Whether it knows chains: what they take back is noted in float32."""
        kernel = DECODE.choose(backend, model.backbone.embedding.weight.detach())
        assert kernel is not None, "a backend asked for by name runs or raises"
        self._vocabulary = model.backbone.embedding.num_embeddings
        self._wide = Wide()
        with torch.no_grad():
            self._decoding: Decoding = kernel(packed(model, self._wide))
        backbone = model.backbone
        self._layers: list[Any] = [backbone.layers[real] for real in backbone.order]
        self._spots = [spot for layer in self._layers for spot in spots_of(layer)]
        self._like = torch.empty(0, dtype=torch.float32)
        self._fresh = [dtypes_of(one) for one in self._found(model.fresh_cache(1))[1]]
        """What caches may be in, spot by spot, beside float32."""
        self._dtypes = self._fresh
        """What the last one was in."""
        self._states = States([spot.block for spot in self._spots], STATES[states])
        self._chains: list[Chain] = []
        """Of every row its last one."""
        self.best: list[int] | None = None
        """After each token of the last call the likeliest next one, -1 where logits are not finite."""
        self._at: At | None = None
        """Of one more token of every row, while rows stay where they are."""
        self._steps: tuple[list[int], list[int], At] | None = None
        """The texts and places for which the last of these was made: a guess that was wrong leads back to them."""

    def load(self, cache: Sequence[Any]) -> None:
        """Go on from `cache`, which is copied."""
        _, parts, self._dtypes = self._apart(cache)
        self._states.load(parts)
        self._chains, self._at = [Chain(place) for place in self._states.places], None
        with torch.no_grad():
            self._wide.refresh()
            self._decoding.load(self._states.of_kernels())

    def join(self, cache: Sequence[Any]) -> None:
        """One more row, the last, from a `cache` of one row, which is copied."""
        if not self._chains:
            self.load(cache)
            return
        rows, news, _ = self._apart(cache)
        if rows != 1:
            raise ValueError(f"one row joins at a time, got a cache of {rows}")
        self._states.join(news, {place for chain in self._chains for place in chain.places})
        self._chains.append(Chain(self._states.places[-1]))
        self._at = None
        self._decoding.move(self._states.of_kernels())

    def leave(self, row: int) -> None:
        """The last row takes the place of this one."""
        self._states.leave(row)
        take_out(self._chains, row)
        self._at = None

    def row(self, row: int) -> tuple[Any, ...]:
        """A copy of the state of one row."""
        self._settle()
        return self._together(self._states.rows([row]))

    def step(self, ids_b: Tensor | list[int]) -> Tensor:
        """One more token of every row."""
        rows = len(self._states.places)
        ids = ids_b if isinstance(ids_b, list) else self._listed(ids_b, rows)
        if not rows or len(ids) != rows:
            raise ValueError(f"ids_b has shape ({len(ids)},), but a cache of {rows} rows was loaded")
        self._check_ids(ids)
        logits_bw, self.best = self._decoding.step(ids, self._again() or self._plan([1] * rows, False))
        return logits_bw

    def _listed(self, ids_b: Tensor, rows: int) -> list[int]:
        check_readable("ids_b", ids_b)
        if ids_b.ndim != 1:
            raise ValueError(f"ids_b has shape {tuple(ids_b.shape)}, but a cache of {rows} rows was loaded")
        if ids_b.dtype != torch.int64 or ids_b.device.type != "cpu":
            raise ValueError(f"ids_b is {ids_b.dtype} on {ids_b.device}, expected int64 on the CPU")
        return ids_b.tolist()

    def chains(self, ids: Sequence[Sequence[int]], on: bool = False) -> Tensor:
        """Tokens of every row that follow one another, in one call: the logits after each, row after row.

        They are, to the last digit, those of a step per token. Afterwards a row stands after the first of its tokens;
        the others are guesses, and `accept` says how many of them count. With `on`, all are guesses that follow the
        last `chains` or `step`, and `accept` counts from that one's first.
        """
        rows = len(self._states.places)
        if not self._chained:
            raise ValueError("tokens are computed one by one where states are kept in bfloat16")
        if not rows or len(ids) != rows or (not on and not all(ids)):
            raise ValueError(
                f"ids has tokens of {len(ids)} rows, but a cache of {rows} rows was loaded; each needs one"
            )
        tokens = [token for own in ids for token in own]
        self._check_ids(tokens)
        logits_bw, self.best = self._decoding.step(tokens, self._plan([len(own) for own in ids], on))
        return logits_bw

    def _again(self) -> At | None:
        """Where one more token of every row belongs, if that is where the last one did."""
        if self._at is not None:
            if self._states.make_room(1 + AHEAD):
                self._decoding.move(self._states.of_kernels())
            self._states.left -= 1
        return self._at

    def _plan(self, lengths: list[int], on: bool) -> At:
        """Where so many tokens of each row belong, with new chains of them or longer ones."""
        most, tokens = max(lengths), sum(lengths)
        if on and most > self._states.left:
            raise ValueError(f"a chain goes on for at most {AHEAD} tokens")
        noted = [chain.places[chain.settled : len(chain.places) if on else chain.counted] for chain in self._chains]
        if not on:
            self._chains = [Chain(place) for place in self._states.places]
        taken = {place for places in (*noted, *(chain.places for chain in self._chains)) for place in places}
        needed = len(taken) + tokens - (0 if on else len(lengths))
        if self._states.make_places(needed) | (not on and self._states.make_room(most + AHEAD)):
            self._decoding.move(self._states.of_kernels())
        spare = (place for place in range(needed) if place not in taken)
        text_b, before_b, after_b = [], [], []
        for chain, text, length in zip(self._chains, self._states.texts, lengths, strict=True):
            for number in range(length):
                before_b.append(chain.places[-1])
                if number or on:
                    chain.places.append(next(spare))
                after_b.append(chain.places[-1])
            text_b += [text] * length
        # Those that will not count are counted too: room is made early, not late.
        self._states.left -= most
        self._at = None
        if on or tokens > len(lengths) or any(noted):
            return self._in_order(at_places(text_b, before_b, after_b, stays=not on), noted, lengths)
        if self._steps is None or self._steps[:2] != (text_b, before_b):
            self._steps = text_b, before_b, at_places(text_b, before_b, after_b)
        self._at = self._steps[2]
        return self._at

    def _in_order(self, at: At, noted: list[list[int]], lengths: list[int]) -> At:
        """With the notes of each row's text, then its tokens."""
        runs, note, row = [], 0, 0
        for text, own, length in zip(self._states.texts, noted, lengths, strict=True):
            runs.append([text, note, note + len(own), row, row + length])
            note, row = note + len(own), row + length
        again = torch.tensor([place for own in noted for place in own], dtype=torch.int64)
        return at._replace(runs=torch.tensor(runs), again=again)

    def _settle(self) -> None:
        """Write what counts into the states."""
        noted = [chain.places[chain.settled : chain.counted] for chain in self._chains]
        if any(noted):
            none = torch.empty(0, dtype=torch.int64)
            self._decoding.step([], self._in_order(At(none, none, none), noted, [0] * len(noted)))
        for chain in self._chains:
            chain.settled = chain.counted

    def expect(self, tokens: int) -> None:
        """Make room for chains of so many tokens, so that the first one need not."""
        if self._states.make_places(len(self._states.places) + 2 * tokens):
            self._decoding.move(self._states.of_kernels())

    def accept(self, row: int, tokens: int) -> None:
        """A row stands after so many tokens of its last chain; until the next, or `cache`, it may be told otherwise."""
        chain = self._chains[row]
        if not chain.settled <= tokens <= len(chain.places):
            expected = f"{chain.settled} to the {len(chain.places)} of the row's last chain"
            raise ValueError(f"{tokens} tokens count, expected {expected}")
        chain.counted = tokens
        self._states.places[row] = chain.places[tokens - 1]
        self._at = None

    def cache(self) -> tuple[Any, ...]:
        """A copy of the states, as the model's own `step` would return them."""
        self._settle()
        return self._together(self._states.rows(range(len(self._states.places))))

    def _check_ids(self, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise ValueError(f"ids_b has ids outside 0 to {self._vocabulary - 1}")

    def _found(self, cache: Sequence[Any]) -> tuple[list[tuple[Block, Any]], list[Any]]:
        """The parts of a model's cache: block by block of its layers, and spot by spot."""
        if len(cache) != len(self._layers):
            raise ValueError(f"the cache is of {len(cache)} layers, but this model has {len(self._layers)}")
        carried = [layer.apart(one) for layer, one in zip(self._layers, cache, strict=True)]
        layers = zip(self._layers, carried, strict=True)
        pairs = [(block, own.get(block, NoCache())) for layer, own in layers for _, block in layer.parts]
        found = [one for block, own in pairs for one in unfolded_cache(block, own)]
        return pairs, found

    def _apart(self, cache: Sequence[Any]) -> tuple[int, list[Any], list[dict[str, torch.dtype]]]:
        """The number of rows of a model's cache, and its parts, spot by spot, in float32 and what they were in."""
        pairs, found = self._found(cache)
        rows = len(next(t for one in found for t in one if isinstance(t, Tensor)))
        for block, own in pairs:
            block.check_cache(own, rows, self._like)
        dtypes = [dtypes_of(one) for one in found]
        for own, fresh in zip(dtypes, self._fresh, strict=True):
            for name, given in own.items():
                if given not in (torch.float32, fresh[name]):
                    raise ValueError(f"cache.{name} is {given}, expected {str(fresh[name]).removeprefix('torch.')}")
        wide = (dict.fromkeys(own, torch.float32) for own in dtypes)
        return rows, list(map(in_dtypes, found, wide)), dtypes

    def _together(self, parts: list[Any]) -> tuple[Any, ...]:
        """A model's cache of its parts, which are copies, in the dtypes that it has there."""
        own = iter(map(in_dtypes, parts, self._dtypes))
        return tuple(layer.together([folded(block, own) for _, block in layer.parts]) for layer in self._layers)


def dtypes_of(cache: Any) -> dict[str, torch.dtype]:
    """Of its floating-point tensors, by field."""
    named = zip(getattr(cache, "_fields", ()), cache, strict=False)
    return {name: t.dtype for name, t in named if isinstance(t, Tensor) and t.is_floating_point()}


def in_dtypes(cache: Any, dtypes: Mapping[str, torch.dtype]) -> Any:
    return cache._replace(**{name: getattr(cache, name).to(dtype) for name, dtype in dtypes.items()})


def widened(value: Any) -> Any:
    """bfloat16 in float32; what is anything else stays what it is."""
    return value.detach().float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


class Wide:
    """Small parameters of a half-precision model in float32, as kernels read them."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, value: Any) -> Any:
        wide = widened(value)
        if wide is not value:
            self._pairs.append((value.detach(), wide))
        return wide

    def refresh(self) -> None:
        """They are what the parameters are now."""
        for narrow, wide in self._pairs:
            wide.copy_(narrow)


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


def packed(model: LanguageModel, wide: Wide) -> decode.Model:
    """What `DECODE` reads of a model that `why_not` has nothing against."""
    backbone = model.backbone
    embedding = stored(backbone.embedding.weight, wide)
    assert embedding is not None, "it is a tensor"
    head = model.lm_head.stored()
    return decode.Model(
        embedding=embedding,
        embedding_scale=model.config.embedding_scale,
        parts=[packed_part(spot, wide) for real in backbone.order for spot in spots_of(backbone.layers[real])],
        norm_f=packed_norm(backbone.norm_f, wide),
        head=head._replace(bias=wide(head.bias)),
        logits_scale=model.config.logits_scale,
        vocab_size=model.config.vocab_size,
    )


def packed_part(spot: Spot, wide: Wide) -> decode.Part:
    block, step = spot.block, step_of(spot.block)
    # Aliases, for a parameter may be replaced while everything else is read where it lay.
    own = {name: tensor.detach() for name, tensor in block.named_parameters(recurse=False)}
    kept = SimpleNamespace(config=block.config, **own)
    return decode.Part(
        kind=family_of(block).name,
        fields={name: wide(value) for name, value in step.fields(block).items()},
        prepared=lambda: {name: widened(tensor) for name, tensor in step.prepared(kept).items()},
        projections={name: stored(getattr(block, name, None), wide) for name in step.projections},
        carried=[
            *step.places.values(),
            *(["first", "slots"] if step.slots else []),
            *(["notes"] if step.notes else []),
        ],
        norm=packed_norm(spot.norm, wide)._replace(scale=spot.in_scale),
        scale=spot.scale,
        beside=spot.beside,
    )


def stored(matrix: Any, wide: Wide) -> few_rows.Weights | None:
    """Of a projection, or of several in one parameter, one after the other."""
    if isinstance(matrix, Tensor):
        return few_rows.Weights(few_rows.plain_format(matrix), matrix.shape[-1], matrix.flatten(0, -2))
    if matrix is None:
        return None
    weights = matrix.stored()
    return weights._replace(bias=wide(weights.bias))


def packed_norm(norm: Any, wide: Wide) -> decode.Norm:
    centred = isinstance(norm, nn.LayerNorm)
    return decode.Norm(wide(norm.weight), wide(norm.bias) if centred else None, centred, norm.eps)


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
        elif tensor.dtype in (torch.float32, torch.bfloat16) and few_rows.is_plain(tensor):
            found = tuple(tensor.shape)
        else:
            found = f"{tensor.dtype} on {tensor.device}"
        if found != shape:
            return f"{name} is {found}, expected {shape}, contiguous float32 or bfloat16 on the CPU"
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
        made = outline(model.config)
        named = (*made.named_parameters(remove_duplicate=False), *made.named_buffers())
        shapes = {name: tuple(tensor.shape) for name, tensor in named}
        SHAPES[model] = (model.config, shapes)
    return shapes
