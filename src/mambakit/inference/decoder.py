"""A language model's decoding step in one call: token ids to logits, with the states in place. See docs/generation.md.

It is made for plain models in float32 on the CPU, their projections in float32 or quantized. `why_not` says what else
stands in a model's way; such a model is stepped module by module.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from mambakit.blocks.block import Block
from mambakit.blocks.family import FAMILIES, FusedStep, family_of
from mambakit.blocks.modules import CausalConv1d, GatedRMSNorm, Linear, RMSNorm
from mambakit.kernels.cpu import decode as native
from mambakit.kernels.cpu.few_rows import matrix
from mambakit.kernels.cpu.library import why_missing
from mambakit.models.language_model import Backbone, LanguageModel
from mambakit.models.layer import GatedMLP, Layer
from mambakit.models.multi_gate import Residual
from mambakit.models.quantization import Bfloat16Linear, Int4Linear, Int8Linear
from mambakit.ops import few_rows
from mambakit.ops.backends import asked, overwriting, use_backend

PROJECTIONS = (Linear, Bfloat16Linear, Int8Linear, Int4Linear)
PARTS = (LanguageModel, Backbone, Layer, GatedMLP, Residual, nn.ModuleList)
PARTS += (nn.Embedding, nn.LayerNorm, RMSNorm, GatedRMSNorm, CausalConv1d, *PROJECTIONS)
# What a caller may replace on a module to change what a step computes.
CALLED = ("forward", "step", "embed", "logits", "run", "with_mlp")
STEPS: dict[str, tuple[int, type[ctypes.Structure]]] = {
    "mamba1": (1, native.Mamba1Step),
    "mamba2": (2, native.Mamba2Step),
    "mamba3": (3, native.Mamba3Step),
}
"""The families that the kernel knows, each with its number and struct there."""
MATRICES = ("in_proj", "out_proj", "x_proj", "dt_proj", "fc1", "fc2")
"""What it calls the projections of a layer's block and MLP, as they do."""


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
    if backend == "cpu":
        return Decoder(model)
    if backend == "torch" or rows > few_rows.MAX_ROWS or asked() == "torch" or why_not(model) is not None:
        return StepByStep(model, backend)
    return Decoder(model)


class Decoder:
    """`logits_bw = decoder.step(ids_b)` after `decoder.load(cache)`; `cache()` is the cache at any time.

    The weights are those of the model when this was made: their memory is read where it lies, so training on shows, but
    a parameter that is replaced does not.
    """

    def __init__(self, model: LanguageModel):
        reason = why_not(model)
        if reason is not None:
            raise ValueError(f'this model cannot be decoded in one call (backend "cpu"): {reason}')
        self._held: list[Any] = []  # what the structs point to
        self._vocabulary = model.backbone.embedding.num_embeddings
        backbone = model.backbone
        layers = [self._pack_layer(backbone.layers[real]) for real in backbone.order]
        self._layers = (native.Layer * len(layers))(*layers)
        head = self._pack_projection(model.lm_head)
        head.rows = model.config.vocab_size  # the others only pad
        self._model = native.Model(
            width=model.config.block.d_model,
            layers=len(layers),
            embedding=self._address(backbone.embedding.weight),
            layer=ctypes.addressof(self._layers),
            norm_f=self._pack_norm(backbone.norm_f),
            head=head,
        )
        self._caches: list[Any] = []
        blocks: list[Any] = [backbone.layers[real].mixer for real in backbone.order]
        self._steps = [(step_of(block), block.cache_shapes) for block in blocks]

    def load(self, cache: Sequence[Any]) -> None:
        """Go on from `cache`, which is copied."""
        if len(cache) != len(self._layers):
            raise ValueError(f"the cache is of {len(cache)} layers, but this model has {len(self._layers)}")
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
        for layer, one, (step, _) in zip(self._layers, self._caches, self._steps, strict=True):
            for name, place in step.places.items():
                setattr(layer, place, getattr(one, name).data_ptr())

    def step(self, ids_b: Tensor) -> Tensor:
        """One more token of every row."""
        rows = len(self._caches[0][0]) if self._caches else 0
        if not self._caches or tuple(ids_b.shape) != (rows,):
            raise ValueError(f"ids_b has shape {tuple(ids_b.shape)}, but a cache of {rows} rows was loaded")
        if any(not 0 <= token < self._vocabulary for token in ids_b.tolist()):
            raise ValueError(f"ids_b has ids outside 0 to {self._vocabulary - 1}")
        return native.decode(self._model, ids_b)

    def cache(self) -> tuple[Any, ...]:
        """A copy of the states, as the model's own `step` would return them."""
        return tuple(copied(one) for one in self._caches)

    def _address(self, tensor: Tensor) -> int:
        # An alias of its own keeps the memory, whatever becomes of the parameter.
        self._held.append(tensor.detach())
        return tensor.data_ptr()

    def _pack_layer(self, layer: Any) -> native.Layer:
        block = layer.mixer
        number, struct = STEPS[family_of(block).name]
        fields = {**step_of(block).fields(block), **step_of(block).prepared(block)}
        assert fields.keys() == {name for name, *_ in struct._fields_}, "a struct would take others without a word"
        step = struct(**{name: self._address(it) if isinstance(it, Tensor) else it for name, it in fields.items()})
        self._held.append(step)
        packed = native.Layer(family=number, step=ctypes.addressof(step), norm=self._pack_norm(layer.norm))
        if hasattr(layer, "mlp"):
            packed.norm2 = self._pack_norm(layer.norm2)
        for owner in (block, getattr(layer, "mlp", None)):
            for name in MATRICES:
                if hasattr(owner, name):
                    setattr(packed, name, self._pack_projection(getattr(owner, name)))
        return packed

    def _pack_projection(self, linear: Any) -> Any:
        weights = linear.stored()
        self._held += [t.detach() for t in (weights.weight, weights.scales, weights.bias) if t is not None]
        return matrix(weights)

    def _pack_norm(self, norm: Any) -> native.Norm:
        centred = type(norm) is nn.LayerNorm
        bias = None if not centred or norm.bias is None else self._address(norm.bias)
        return native.Norm(self._address(norm.weight), bias, norm.weight.numel(), centred, norm.eps)


def step_of(block: Block) -> FusedStep:
    step = family_of(block).step
    assert step is not None, "the kernel knows families that have one"
    return step


def copied(cache: Any) -> Any:
    made = (torch.clone(t, memory_format=torch.contiguous_format) if isinstance(t, Tensor) else t for t in cache)
    return type(cache)(*(t.detach() if isinstance(t, Tensor) else t for t in made))


def why_not(model: nn.Module) -> str | None:
    """What keeps `model` from being decoded in one call, or None."""
    reason = why_missing()
    if reason is not None:
        return f"the compiled kernels are missing: {reason}"
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
    return None


def why_not_module(module: nn.Module) -> str | None:
    # Of these very classes: a derived one may compute something else.
    if type(module) not in (*PARTS, *(FAMILIES[name].block for name in STEPS)):
        return f"is a {type(module).__name__}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has hooks"
    if not module.__dict__.keys().isdisjoint(CALLED):
        return "has a method replaced"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "renormalises its rows"
    if type(module) is nn.LayerNorm and not module.elementwise_affine:
        return "has no weight"
    if type(module) is Layer and any(getattr(norm, "group_size", None) is not None for norm in module.children()):
        return "norms in groups"
    if isinstance(module, Block):
        return step_of(module).why_not(module)
    if isinstance(module, PROJECTIONS) and not few_rows.is_stored_well(module.stored()):
        return f"has weights of {module.stored().weight.dtype} in a form that the kernels do not read"
    return None
