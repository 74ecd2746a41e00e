"""A language model's decoding step in one call: token ids to logits, with the states in place. See docs/generation.md.

It is made for plain models in float32 on the CPU, their projections in float32 or quantized. `why_not` says what else
stands in a model's way; such a model is stepped module by module.
"""

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from mambakit.blocks.block import Block
from mambakit.blocks.family import FAMILIES, FusedStep, family_of
from mambakit.blocks.modules import CausalConv1d, GatedRMSNorm, Linear, RMSNorm
from mambakit.models.language_model import Backbone, LanguageModel
from mambakit.models.layer import GatedMLP, Layer, LayerNorm
from mambakit.models.multi_gate import Residual
from mambakit.models.quantization import Bfloat16Linear, Int4Linear, Int8Linear
from mambakit.ops import decode, few_rows
from mambakit.ops.backends import overwriting, use_backend
from mambakit.ops.decode import DECODE, Decoding

PROJECTIONS = (Linear, Bfloat16Linear, Int8Linear, Int4Linear)
PARTS = (LanguageModel, Backbone, Layer, GatedMLP, Residual, nn.ModuleList)
PARTS += (nn.Embedding, LayerNorm, RMSNorm, GatedRMSNorm, CausalConv1d, *PROJECTIONS)
# What a caller may replace on a module to change what a step computes.
CALLED = ("forward", "step", "embed", "logits", "run", "with_mlp")
MATRICES = ("in_proj", "out_proj", "x_proj", "dt_proj", "fc1", "fc2")
"""The projections of a block and of an MLP."""


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
        self._caches: list[Any] = []
        backbone = model.backbone
        blocks: list[Any] = [backbone.layers[real].mixer for real in backbone.order]
        self._steps = [(step_of(block), block.cache_shapes) for block in blocks]

    def load(self, cache: Sequence[Any]) -> None:
        """Go on from `cache`, which is copied."""
        if len(cache) != len(self._steps):
            raise ValueError(f"the cache is of {len(cache)} layers, but this model has {len(self._steps)}")
        rows = len(cache[0][0])
        for one, (_, shapes_of) in zip(cache, self._steps, strict=True):
            for name, shape in shapes_of(rows).items():
                tensor = getattr(one, name)
                if (tuple(tensor.shape), tensor.dtype, tensor.device.type) != (shape, torch.float32, "cpu"):
                    raise ValueError(
                        f"cache.{name} is {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}, "
                        f"expected {shape}, float32 on the CPU"
                    )
        self._caches = [copied(one) for one in cache]
        pairs = zip(self._caches, self._steps, strict=True)
        places = [{place: getattr(one, name) for name, place in step.places.items()} for one, (step, _) in pairs]
        with torch.no_grad():
            self._decoding.load(places)

    def step(self, ids_b: Tensor) -> Tensor:
        """One more token of every row."""
        rows = len(self._caches[0][0]) if self._caches else 0
        if not self._caches or tuple(ids_b.shape) != (rows,):
            raise ValueError(f"ids_b has shape {tuple(ids_b.shape)}, but a cache of {rows} rows was loaded")
        if any(not 0 <= token < self._vocabulary for token in ids_b.tolist()):
            raise ValueError(f"ids_b has ids outside 0 to {self._vocabulary - 1}")
        return self._decoding.step(ids_b)

    def cache(self) -> tuple[Any, ...]:
        """A copy of the states, as the model's own `step` would return them."""
        return tuple(copied(one) for one in self._caches)


def packed(model: LanguageModel) -> decode.Model:
    """What `DECODE` reads of a model that `why_not` has nothing against."""
    backbone = model.backbone
    return decode.Model(
        embedding=backbone.embedding.weight,
        layers=[packed_layer(backbone.layers[real]) for real in backbone.order],
        norm_f=packed_norm(backbone.norm_f),
        head=model.lm_head.stored(),
        vocab_size=model.config.vocab_size,
    )


def packed_layer(layer: Any) -> decode.Layer:
    block, mlp = layer.mixer, getattr(layer, "mlp", None)
    step = step_of(block)
    # Aliases, for a parameter may be replaced while everything else is read where it lay.
    own = SimpleNamespace(**{name: tensor.detach() for name, tensor in block.named_parameters(recurse=False)})
    owners = [(owner, name) for owner in (block, mlp) for name in MATRICES if hasattr(owner, name)]
    return decode.Layer(
        step=step.operation.name,
        fields=step.fields(block),
        prepared=lambda: step.prepared(own),
        matrices={name: getattr(owner, name).stored() for owner, name in owners},
        norm=packed_norm(layer.norm),
        norm2=None if mlp is None else packed_norm(layer.norm2),
    )


def packed_norm(norm: Any) -> decode.Norm:
    centred = isinstance(norm, nn.LayerNorm)
    return decode.Norm(norm.weight, norm.bias if centred else None, centred, norm.eps)


def step_of(block: Block) -> FusedStep:
    step = family_of(block).step
    assert step is not None, "the kernel knows families that have one"
    return step


def copied(cache: Any) -> Any:
    made = (torch.clone(t, memory_format=torch.contiguous_format) if isinstance(t, Tensor) else t for t in cache)
    return type(cache)(*(t.detach() if isinstance(t, Tensor) else t for t in made))


def why_not(model: nn.Module) -> str | None:
    """What keeps `model` from being decoded in one call, or None."""
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return "there are hooks on all modules"
    if type(model) is not LanguageModel:
        return f"it is a {type(model).__name__}"
    for name, module in model.named_modules():
        reason = why_not_module(module)
        if reason is not None:
            return f"{name or 'the model'} {reason}"
    backbone = model.backbone
    if backbone.levels:
        return "it has class tokens or latents"
    if backbone.residual.gate_of is not None:
        return "it has MultiGate residuals"
    if backbone.config.ignore_first_residual or backbone.config.ignore_last_residual:
        return "it leaves out a residual"
    for name, tensor in model.named_parameters():
        if tensor.dtype != torch.float32 or not few_rows.is_plain(tensor):
            return f"{name} is {tensor.dtype} on {tensor.device}, expected contiguous float32 on the CPU"
    return wrong_size(model)


def wrong_size(model: LanguageModel) -> str | None:
    """Which tensor somebody replaced by one of another size, if any: kernels take the sizes that configs say."""
    d, backbone = model.config.block.d_model, model.backbone
    sizes: dict[str, tuple[int, ...]] = {}
    for i, layer in enumerate(backbone.layers):
        at, mlp = f"backbone.layers.{i}", getattr(layer, "mlp", None)
        block: Any = layer.mixer
        sizes |= {f"{at}.mixer.{name}": size for name, size in sizes_of(type(block), block.config).items()}
        sizes |= {f"{at}.{norm}.{name}": (d,) for norm in ("norm", "norm2") for name in ("weight", "bias")}
        if mlp is not None:
            inner = mlp.fc2.stored().columns
            sizes |= {f"{at}.mlp.fc1.weight": (2 * inner, d), f"{at}.mlp.fc2.weight": (d, inner)}
    sizes |= {f"backbone.norm_f.{name}": (d,) for name in ("weight", "bias")}
    rows = backbone.embedding.num_embeddings
    sizes |= {"backbone.embedding.weight": (rows, d), "lm_head.weight": (rows, d)}
    given = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, PROJECTIONS):
            stored = module.stored()
            given[f"{name}.weight"] = (len(stored.weight), stored.columns)
            try:
                few_rows.check_sizes(stored)
            except ValueError as error:
                return f"{name} does not fit: {error}"
    for name, size in given.items():
        if sizes.get(name, size) != size:
            return f"{name} has shape {size}, expected {sizes[name]}"
    return None


@lru_cache(maxsize=64)
def sizes_of(kind: type[Block], config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a block's parameters by name, as it is made."""
    return {name: tuple(parameter.shape) for name, parameter in kind(config, device="meta").named_parameters()}


def why_not_module(module: nn.Module) -> str | None:
    # Of these very classes: a derived one may compute something else.
    fused = (family.block for family in FAMILIES.values() if family.step is not None)
    if type(module) not in (*PARTS, *fused):
        return f"is a {type(module).__name__}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has hooks"
    if not module.__dict__.keys().isdisjoint(CALLED):
        return "has a method replaced"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "renormalises its rows"
    if isinstance(module, nn.LayerNorm) and not module.elementwise_affine:
        return "has no weight"
    if type(module) is Layer and any(getattr(norm, "group_size", None) is not None for norm in module.children()):
        return "norms in groups"
    if isinstance(module, Block):
        return step_of(module).why_not(module)
    if isinstance(module, PROJECTIONS) and not few_rows.is_stored_well(module.stored()):
        return f"has weights of {module.stored().weight.dtype} in a form that the kernels do not read"
    return None
