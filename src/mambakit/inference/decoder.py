"""A language model's decoding step in one call: token ids to logits, with the states in place. See docs/generation.md.

It is made for plain models in float32 on the CPU, their projections in float32 or quantized. `why_not` says what else
stands in a model's way; such a model is stepped module by module.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from mambakit.blocks.mamba1 import Mamba1
from mambakit.blocks.mamba2 import Mamba2
from mambakit.blocks.mamba3 import Mamba3
from mambakit.blocks.modules import CausalConv1d, GatedRMSNorm, Linear, RMSNorm
from mambakit.kernels.cpu import decode as native
from mambakit.kernels.cpu.library import why_missing
from mambakit.models.language_model import Backbone, LanguageModel
from mambakit.models.layer import GatedMLP, Layer, LayerNorm
from mambakit.models.multi_gate import Residual
from mambakit.models.quantization import Bfloat16Linear, Int4Linear, Int8Linear
from mambakit.ops import few_rows
from mambakit.ops.backends import auto_means, use_kernels
from mambakit.ops.fused_step import let_overwrite

PROJECTIONS = (Linear, Bfloat16Linear, Int8Linear, Int4Linear)
PARTS = (LanguageModel, Backbone, Layer, GatedMLP, Residual, Mamba1, Mamba2, Mamba3, nn.ModuleList)
PARTS += (nn.Embedding, LayerNorm, RMSNorm, GatedRMSNorm, CausalConv1d, *PROJECTIONS)
# What a caller may replace on a module to change what a step computes.
CALLED = ("forward", "step", "embed", "logits", "run", "with_mlp")


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
            for one in self._cache:
                for tensor in one:
                    if isinstance(tensor, Tensor):
                        let_overwrite(tensor)

    def step(self, ids_b: Tensor) -> Tensor:
        operators = auto_means("torch") if self._backend == "torch" else nullcontext()
        with operators, torch.inference_mode() if self._overwrites else torch.no_grad():
            logits_bw, self._cache = self._model.step(ids_b, self._cache)
        # An ordinary tensor, as those of `cache` are.
        return logits_bw.clone() if self._overwrites else logits_bw

    def cache(self) -> Any:
        return tuple(copied(one) for one in self._cache) if self._overwrites else self._cache


def make_decoder(model: LanguageModel, backend: str, rows: int) -> "Decoder | StepByStep":
    """The fastest way to decode `rows` rows, or the one asked for: `"cpu"` is one call per token, `"torch"` is not."""
    if backend == "cpu":
        return Decoder(model)
    if backend == "torch" or rows > few_rows.MAX_ROWS or not use_kernels("auto") or why_not(model) is not None:
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
        self._shapes = [block.cache_shapes for block in blocks]

    def load(self, cache: Sequence[Any]) -> None:
        """Go on from `cache`, which is copied."""
        if len(cache) != len(self._layers):
            raise ValueError(f"the cache is of {len(cache)} layers, but this model has {len(self._layers)}")
        rows = len(cache[0][0])
        for one, shapes_of in zip(cache, self._shapes, strict=True):
            for name, shape in shapes_of(rows).items():
                tensor = getattr(one, name)
                if (tuple(tensor.shape), tensor.dtype, tensor.device.type) != (shape, torch.float32, "cpu"):
                    raise ValueError(
                        f"cache.{name} is {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}, "
                        f"expected {shape}, float32 on the CPU"
                    )
        self._caches = [copied(one) for one in cache]
        for layer, one in zip(self._layers, self._caches, strict=True):
            for name, place in PLACES.items():
                if hasattr(one, name):
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

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        # An alias of its own keeps the memory, whatever becomes of the parameter.
        self._held.append(tensor.detach())
        return tensor.data_ptr()

    def _pack_layer(self, layer: Any) -> native.Layer:
        block = layer.mixer
        family, pack_step = FAMILIES[type(block)]
        step = pack_step(block, self._address)
        self._held.append(step)
        packed = native.Layer(family=family, step=ctypes.addressof(step), norm=self._pack_norm(layer.norm))
        names = ("in_proj", "out_proj", *(("x_proj", "dt_proj") if family == 1 else ()))
        for name in names:
            setattr(packed, name, self._pack_projection(getattr(block, name)))
        if hasattr(layer, "mlp"):
            packed.norm2 = self._pack_norm(layer.norm2)
            packed.fc1, packed.fc2 = self._pack_projection(layer.mlp.fc1), self._pack_projection(layer.mlp.fc2)
        return packed

    def _pack_projection(self, linear: Any) -> Any:
        weights = linear.stored()
        self._held += [t.detach() for t in (weights.weight, weights.scales, weights.bias) if t is not None]
        return weights.matrix()

    def _pack_norm(self, norm: Any) -> native.Norm:
        centred = isinstance(norm, nn.LayerNorm)
        bias = norm.bias if centred else None
        return native.Norm(self._address(norm.weight), self._address(bias), norm.weight.numel(), centred, norm.eps)


PLACES = {
    "ssm_bir": "state",
    "ssm_bhpr": "state",
    "conv_bik": "window",
    "conv_bvk": "window",
    "k_state_bmhr": "k_state",
    "v_state_bhp": "v_state",
    "rotation": "angle",
}
"""Where each field of a cache stands in a packed layer."""
Address = Callable[[Tensor | None], int | None]


def pack_mamba1(block: Mamba1, address: Address) -> native.Mamba1Step:
    i, r, k = block.config.d_inner, block.config.state_rank, block.config.conv_kernel
    rates_ir = -torch.exp(block.A_log.detach())
    tensors = (block.conv1d.weight, block.conv1d.bias, block.A_log, rates_ir, block.D)
    return native.Mamba1Step(i, r, k, *map(address, tensors))


def pack_mamba2(block: Mamba2, address: Address) -> native.Mamba2Step:
    config = block.config
    norm = block.norm if config.rmsnorm else None
    conv, mlp = block.conv1d, config.d_inner - config.ssm_width
    weight, eps, before_gate = (None, 0.0, False) if norm is None else (norm.weight, norm.eps, norm.norm_before_gate)
    group = config.norm_width if norm is None else norm.group_size
    return native.Mamba2Step(
        *(config.nheads, config.per_head_dim, config.state_rank, config.ngroups, config.conv_kernel, mlp),
        *map(address, (conv.weight, conv.bias, block.dt_bias, block.A_log, block.D, weight)),
        *(group, eps, *config.dt_limit, config.D_has_hdim, before_gate),
    )


def pack_mamba3(block: Mamba3, address: Address) -> native.Mamba3Step:
    config = block.config
    mimo = (block.mimo_x, block.mimo_z, block.mimo_o) if config.is_mimo else (None, None, None)
    norm_weight = block.norm.weight if config.is_outproj_norm else None
    parameters = (block.dt_bias, block.B_norm.weight, block.C_norm.weight, block.B_bias, block.C_bias)
    return native.Mamba3Step(
        *(config.nheads, config.per_head_dim, config.state_rank, config.ngroups, config.ranks, config.rope_dim // 2),
        *(config.pairing == "half", config.a_activation == "heavy_tail"),
        *map(address, (*parameters, *mimo, block.D, norm_weight)),
        *(block.B_norm.eps, *config.dt_limit, config.a_floor, config.rotation_range),
    )


FAMILIES: dict[type, tuple[int, Callable[[Any, Address], Any]]] = {
    Mamba1: (1, pack_mamba1),
    Mamba2: (2, pack_mamba2),
    Mamba3: (3, pack_mamba3),
}


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
    if getattr(model.config.block, "rotation", "complex") != "complex":
        return "it rotates by quaternions"
    for name, tensor in model.named_parameters():
        if tensor.dtype != torch.float32 or not few_rows.is_plain(tensor):
            return f"{name} is {tensor.dtype} on {tensor.device}, expected contiguous float32 on the CPU"
    return None


def why_not_module(module: nn.Module) -> str | None:
    if type(module) not in PARTS:
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
    if type(module) is Mamba1 and type(module.dt_proj) is not Linear:
        return "has a quantized dt_proj"
    if isinstance(module, PROJECTIONS) and not few_rows.is_stored_well(module.stored()):
        return f"has weights of {module.stored().weight.dtype} in a form that the kernels do not read"
    return None
