"""Weights in 16, 8 or 4 bits: less to read per token, which is what decoding waits for. See docs/quantization.md."""

import copy
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.arguments import check_flag, check_kind, shown
from mambakit.blocks.modules import Linear
from mambakit.blocks.shares import check_whole
from mambakit.models.language_model import check_language_model
from mambakit.models.quantized_linear import (
    Bfloat16Linear,
    Int4Linear,
    Int8Linear,
    IntegerInt4Linear,
    QuantizedLinear,
)
from mambakit.ops import few_rows
from mambakit.ops.shapes import check_numbers, check_readable

Model = TypeVar("Model", bound=nn.Module)

PROJECTIONS = ("in_proj", "out_proj", "x_proj", "fc1", "fc2", "latent_in", "latent_out", "lm_head")
"""What is quantized, beside the matrices that blocks stack in one parameter (`stacked_maps`): the experts of a mixture.
`dt_proj` is small and sets step sizes, to which the state is sensitive; a mixture's `router` is small too and chooses.
"""


def quantize(
    model: Model,
    bits: int = 8,
    group_size: int | None = None,
    *,
    activations: str | None = None,
    head_bits: int | None = None,
    in_place: bool = False,
) -> Model:
    """A copy of `model` whose projections have weights of 16, 8 or 4 bits; it itself stays as it is.

    With `in_place` it does not: its projections are replaced one after the other, and there is never a second copy.

    Quantized are the `nn.Linear` modules named in `PROJECTIONS` and the experts of mixtures. A head tied to the
    embedding becomes one of its own, of `head_bits` if given, and the embedding stays.

    `activations` says what weights are multiplied with: rows as they are, `"float32"`, or rounded like the weights,
    which is several times as fast for prompts and batches: `"bfloat16"` for 16 bits, `"int8"` with a scale for each row
    for 8 and 4. That is the default, as it costs next to nothing in loss; see docs/quantization.md. `group_size` is for
    4 bits, 32 if not given; another one needs `activations="float32"`, and implies it. `save_model` writes such a model
    and `load_model` reads it, with the same bits.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> small = mk.quantize(model, bits=4, head_bits=8)
    """
    check_kind("model", model, nn.Module, "a model")
    for name, given in (("bits", bits), ("head_bits", head_bits)):
        if (type(given) is not int or given not in NARROW) and (name, given) != ("head_bits", None):
            raise ValueError(f"{name} is {shown(given)}, expected 16, 8 or 4")
    if bits != 4 and group_size is not None:
        others = {8: "8 bits have one scale per row", 16: "16 bits have no scales"}
        raise ValueError(f"group_size = {shown(group_size)} is for 4 bits; {others[bits]}")
    if group_size is not None:
        check_group(group_size)
        if group_size != few_rows.GROUP:
            activations = activations or "float32"
    if activations is not None and (type(activations) is not str or activations not in ("float32", NARROW[bits])):
        given = shown(activations)
        raise ValueError(f"activations is {given}, expected 'float32' or {NARROW[bits]!r} for {bits} bits")
    check_flag("in_place", in_place)
    check_whole("quantize", model)
    found = matrices_of(model)
    for name, matrix in found.items():
        check_readable(f"{name}.weight", matrix.weight)
    broken = [name for name, matrix in found.items() if not matrix.weight.isfinite().all()]
    if broken:
        raise ValueError(f"weights with a NaN or an infinity: {', '.join(broken)}")
    replaced: dict[str, QuantizedLinear] = {}
    originals = {name: attribute(model, name) for name in found}
    for name in list(found):
        matrix = found.pop(name)
        own = head_bits if head_bits is not None and name.rpartition(".")[2] == "lm_head" else bits
        rows = activations if activations == "float32" else NARROW[own]
        replaced[name] = make_quantized(matrix, format_of(own, rows), group_size if own == bits else None, rows)
        if in_place:
            put_in(model, {name: replaced[name]})
            del originals[name]
    if in_place:
        return model
    # deepcopy takes what it finds under an object's id for that object's copy.
    copied = copy.deepcopy(model, {id(originals[name]): new for name, new in replaced.items()})
    put_in(copied, replaced)
    return copied


NARROW = {16: "bfloat16", 8: "int8", 4: "int8"}
"""What rows are rounded to beside weights of so many bits."""
FORMATS = ("bfloat16", "int8", "nf4", "int4")
MAX_GROUP = 1 << 20
"""Rows are filled up to whole groups."""


def check_group(size: int) -> None:
    if type(size) is not int or not 2 <= size <= MAX_GROUP or size % 2:
        raise ValueError(f"group_size is {shown(size)}, expected a positive even number, at most {MAX_GROUP}")


def format_of(bits: int, activations: str) -> str:
    return {16: "bfloat16", 8: "int8", 4: "nf4" if activations == "float32" else "int4"}[bits]


def make_quantized(
    linear: nn.Linear, format: str, group_size: int | None = None, activations: str = "float32"
) -> QuantizedLinear:
    """What stands in for `linear`, which may be on the meta device. `group_size` is for `"nf4"`."""
    if format == "nf4":
        group_size = 32 if group_size is None else group_size
        check_group(group_size)
        return Int4Linear(linear, group_size, activations)
    if format == "int4":
        if group_size is not None and group_size != few_rows.GROUP:
            raise ValueError(f"group_size is {shown(group_size)}, expected 32; others need activations='float32'")
        return IntegerInt4Linear(linear)
    return {"bfloat16": Bfloat16Linear, "int8": Int8Linear}[format](linear, activations)


def put_in(model: nn.Module, made: Mapping[str, QuantizedLinear]) -> None:
    """In the places of the modules and parameters of these names."""
    for name, module in made.items():
        owner, _, leaf = name.rpartition(".")
        place = model.get_submodule(owner)
        place._parameters.pop(leaf, None)
        setattr(place, leaf, module)


def matrices_of(model: nn.Module) -> dict[str, nn.Linear]:
    """What there is to quantize, by name, stacked matrices as one; ValueError where something is in the way."""
    found: dict[str, Any] = {n: m for n, m in model.named_modules() if n.rpartition(".")[2] in PROJECTIONS}
    stacked = {
        f"{name}.{leaf}".removeprefix("."): getattr(module, leaf)
        for name, module in model.named_modules()
        for leaf in getattr(module, "stacked_maps", ())
    }
    if not found and not stacked:
        raise ValueError(f"the model has none of the projections {', '.join(PROJECTIONS)}")
    if quantized_in(model):
        raise ValueError("the model is quantized already; quantize the one it was made from")
    wrapped = [name for name, module in found.items() if type(module) not in (nn.Linear, Linear)]
    wrapped += [name for name, tensor in stacked.items() if type(tensor) is not nn.Parameter]
    if wrapped:
        raise ValueError(f"not nn.Linear: {', '.join(wrapped)}; merge adapters into the weights first")
    return {**found, **{name: one_matrix(tensor) for name, tensor in stacked.items()}}


def one_matrix(weight_eoi: nn.Parameter) -> nn.Linear:
    """Of the rows of several, one after the other, where they lie."""
    e, o, i = weight_eoi.shape
    linear = nn.Linear(i, e * o, bias=False, device="meta")
    linear.weight = nn.Parameter(weight_eoi.detach().flatten(0, 1), requires_grad=False)
    return linear


def quantized_in(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized matrices of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def attribute(model: nn.Module, name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def quantization_report(model: nn.Module, quantized: nn.Module, ids_bs: Tensor) -> dict[str, float]:
    """What quantizing costs and saves: bits per token of `ids_bs` before and after, and the bytes of all weights."""
    before, after = bits_per_token(model, ids_bs), bits_per_token(quantized, ids_bs)
    bytes_before, bytes_after = weight_bytes(model), weight_bytes(quantized)
    return {
        "bits_per_token": before,
        "bits_per_token_quantized": after,
        "change": after - before,
        "bytes": bytes_before,
        "bytes_quantized": bytes_after,
        "ratio": bytes_after / bytes_before,
    }


def bits_per_token(model: nn.Module, ids_bs: Tensor) -> float:
    """The mean of -log2 of the probability of every token but the first, given those before it."""
    check_language_model(model)
    check_readable("ids_bs", ids_bs)
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        check_numbers(name, weight)
    if ids_bs.dim() != 2 or ids_bs.shape[1] < 2:
        raise ValueError(f"ids_bs has shape {tuple(ids_bs.shape)}, expected [batch, s] with s of at least 2")
    with torch.no_grad():
        logits_bsw, _ = model(ids_bs[:, :-1])
        return F.cross_entropy(logits_bsw.flatten(0, 1).double(), ids_bs[:, 1:].flatten()).item() / math.log(2)


def weight_bytes(model: nn.Module) -> int:
    """Of parameters and buffers, shared ones once."""
    # Both leave out duplicates, and a tied head is the same parameter.
    return sum(t.nbytes for t in model.parameters()) + sum(t.nbytes for t in model.buffers())
