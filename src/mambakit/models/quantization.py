"""Weights in 16, 8 or 4 bits: less to read per token, which is what decoding waits for. See docs/quantization.md."""

import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.arguments import check_kind, shown
from mambakit.blocks.modules import Linear
from mambakit.ops import few_rows
from mambakit.ops.grouped_product import used_of
from mambakit.ops.shapes import check_readable

Model = TypeVar("Model", bound=nn.Module)

PROJECTIONS = ("in_proj", "out_proj", "x_proj", "fc1", "fc2", "latent_in", "latent_out", "lm_head")
"""What is quantized, beside the matrices that blocks stack in one parameter (`stacked_maps`): the experts of a mixture.
`dt_proj` is small and sets step sizes, to which the state is sensitive; a mixture's `router` is small too and chooses.
"""

# The 16 values of NF4 (Dettmers and others, 2023): equally likely for normally distributed weights, with an exact 0.
NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
# Scales to try, as parts of a group's largest weight: clipping it a little often serves the other 31 better.
STRETCHES = (1.0, 0.76, 0.82, 0.88, 0.94, 1.06, 1.12)
# Weights decoded at a time: enough to keep the bookkeeping small, few enough to stay in the processor's cache.
BLOCK = 1 << 19


class QuantizedLinear(nn.Module, ABC):
    """What stands in for an `nn.Linear`; its weights are decoded a block of rows at a time, whenever it is called.

    The few rows of a decoding step are multiplied by a kernel where there is one, which decodes as it reads. Products
    are computed in at least float32 and returned in the dtype of the input, through which gradients flow.

    It stands in for matrices stacked in one parameter too, whose rows it has one after the other: `counts_e` then says
    how many rows of the input each of them gets, as in `grouped_product`.
    """

    format: str
    """Its name in files."""
    tensors: tuple[str, ...]
    """What it holds beside the bias. These keep their dtypes, whatever the model's is."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
        # Empty: it follows the model's dtype, as the weight did, where `scales` have one of their own.
        self.register_buffer("like", linear.weight.detach().new_empty(0), persistent=False)

    @abstractmethod
    def decoded(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """These rows of the weight."""

    @property
    def weight(self) -> Tensor:
        """The whole weight as numbers, decoded anew each time."""
        assert isinstance(self.like, Tensor)
        return self.decoded(slice(None), torch.float32).to(self.like.dtype)

    @abstractmethod
    def stored(self) -> few_rows.Weights:
        """The weight as the decoding kernels read it."""

    def settings(self) -> dict[str, Any]:
        """What a file says of it."""
        return {"format": self.format}

    def forward(self, x: Tensor, counts_e: Tensor | None = None) -> Tensor:
        if counts_e is None:
            return self.multiply(x, range(self.out_features))
        each, sizes = self.out_features // len(counts_e), used_of(counts_e)
        parts = zip(x.split([count for _, count in sizes]), sizes, strict=True)
        found = [self.multiply(part, range(e * each, (e + 1) * each)) for part, (e, _) in parts]
        return torch.cat(found) if found else x.new_empty(0, each)

    def multiply(self, x: Tensor, rows: range) -> Tensor:
        """With these rows of the weight."""
        stored, part = self.stored(), slice(rows.start, rows.stop)
        if len(rows) < self.out_features:
            scales, bias = (None if t is None else t[part] for t in (stored.scales, stored.bias))
            stored = stored._replace(weight=stored.weight[part], scales=scales, bias=bias)
        y = few_rows.multiply(x, stored)
        if y is not None:
            return y
        wide, step = torch.promote_types(x.dtype, torch.float32), max(1, BLOCK // self.in_features)
        blocks = [slice(start, min(start + step, rows.stop)) for start in rows[::step]]
        y = torch.cat([self.product(x.to(wide), block) for block in blocks], -1)
        return (y if self.bias is None else y + self.bias[part]).to(x.dtype)

    def product(self, x: Tensor, rows: slice) -> Tensor:
        return F.linear(x, self.decoded(rows, x.dtype))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Bfloat16Linear(QuantizedLinear):
    """`weight_bfloat16[o, i]`, the weight rounded to bfloat16."""

    format, tensors = "bfloat16", ("weight_bfloat16",)
    weight_bfloat16: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        self.register_buffer("weight_bfloat16", linear.weight.detach().to(torch.bfloat16, copy=True).contiguous())

    def stored(self) -> few_rows.Weights:
        return few_rows.Weights(few_rows.BFLOAT16, self.in_features, self.weight_bfloat16, None, self.bias)

    def decoded(self, rows: slice, dtype: torch.dtype) -> Tensor:
        return self.weight_bfloat16[rows].to(dtype)


class Int8Linear(QuantizedLinear):
    """`weight[o, i] = scales[o] weight_int8[o, i]`, the largest of a row being 127 or -127."""

    format, tensors = "int8", ("weight_int8", "scales")
    weight_int8: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1) / 127
        self.register_buffer("weight_int8", (weight / nonzero(scales)[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def stored(self) -> few_rows.Weights:
        return few_rows.Weights(few_rows.INT8, self.in_features, self.weight_int8, self.scales, self.bias)

    def decoded(self, rows: slice, dtype: torch.dtype) -> Tensor:
        return self.weight_int8[rows].to(dtype) * self.scales[rows, None].to(dtype)

    def product(self, x: Tensor, rows: slice) -> Tensor:
        # Scaling the result instead of the weights is one pass less over them.
        return F.linear(x, self.weight_int8[rows].to(x.dtype)) * self.scales[rows].to(x.dtype)


class Int4Linear(QuantizedLinear):
    """`weight[o, g, i] = scales[o, g] NF4[code[o, g, i]]` in groups of `group_size` inputs, the last filled with zeros.

    Byte `j` of a group holds the code of its input `j` in the low half and of input `j + group_size / 2` in the high
    one, so that a kernel gets neighbouring inputs from neighbouring bytes.
    """

    format, tensors = "nf4", ("weight_int4", "scales")
    weight_int4: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, group_size: int):
        super().__init__(linear)
        self.group_size = group_size
        weight = F.pad(linear.weight.detach().float(), (0, -self.in_features % group_size))
        scales, codes = zip(
            *(encoded(block.unflatten(1, (-1, group_size))) for block in weight.split(4096)), strict=True
        )
        low, high = torch.cat(codes).chunk(2, -1)
        self.register_buffer("weight_int4", (low | high << 4).flatten(1))
        self.register_buffer("scales", torch.cat(scales))

    def stored(self) -> few_rows.Weights:
        return few_rows.Weights(
            few_rows.NF4, self.in_features, self.weight_int4, self.scales, self.bias, self.group_size
        )

    def decoded(self, rows: slice, dtype: torch.dtype) -> Tensor:
        pairs = self.paired(rows, dtype).unflatten(1, (-1, self.group_size // 2, 2))
        return pairs.mT.flatten(1)[:, : self.in_features]

    def product(self, x: Tensor, rows: slice) -> Tensor:
        # Rather the input than the weights in the order of the bytes: there are far fewer.
        x = F.pad(x, (0, -self.in_features % self.group_size))
        return F.linear(x.unflatten(-1, (-1, 2, self.group_size // 2)).mT.flatten(-3), self.paired(rows, x.dtype))

    def paired(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """The weights in the order of the bytes: input `j` of a group beside input `j + group_size / 2`."""
        code = torch.tensor(NF4, dtype=dtype, device=self.scales.device)
        # Both halves of a byte at once, as one complex number: twice as fast as one after the other.
        of_byte = torch.complex(code.repeat(16), code.repeat_interleave(16))
        packed = self.weight_int4[rows]
        values = torch.view_as_real(of_byte.index_select(0, packed.flatten().int())).reshape(
            *self.scales[rows].shape, -1
        )
        return (values * self.scales[rows, :, None].to(dtype)).flatten(1)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "group_size": self.group_size}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group_size={self.group_size}"


def encoded(weight_ogi: Tensor) -> tuple[Tensor, Tensor]:
    """Scales in bfloat16 and codes of groups of weights, by that of `STRETCHES` with the smallest squared error."""
    best = rounded(weight_ogi, STRETCHES[0])
    for stretch in STRETCHES[1:]:
        tried = rounded(weight_ogi, stretch)
        better_og1 = tried[2] < best[2]
        best = tuple(torch.where(better_og1, new, old) for new, old in zip(tried, best, strict=True))
    scale_og1, code_ogi, _ = best
    return scale_og1[..., 0], code_ogi


def rounded(weight_ogi: Tensor, stretch: float) -> tuple[Tensor, ...]:
    """Scale, codes and squared error of each group, with `stretch` times its largest weight as the largest value."""
    # In bfloat16 before the codes are chosen: they make up for its rounding.
    scale_og1 = (stretch * weight_ogi.abs().amax(-1, keepdim=True)).bfloat16()
    divisor_og1 = nonzero(scale_og1.float())
    code_ogi = nearest(weight_ogi / divisor_og1)
    value_ogi = torch.tensor(NF4, device=weight_ogi.device)[code_ogi.int()] * divisor_og1
    return scale_og1, code_ogi, (weight_ogi - value_ogi).square().sum(-1, keepdim=True)


def nearest(x: Tensor) -> Tensor:
    """The index of the nearest value of NF4."""
    index = torch.zeros_like(x, dtype=torch.uint8)
    for below, above in itertools.pairwise(NF4):
        index += x > (below + above) / 2
    return index


def nonzero(scales: Tensor) -> Tensor:
    """Scales to divide by: those of weights that are all zero become 1."""
    return torch.where(scales > 0, scales, 1)


def quantize(model: Model, bits: int = 8, group_size: int | None = None) -> Model:
    """A copy of `model` whose projections are `Bfloat16Linear`, `Int8Linear` or `Int4Linear`; it itself stays as it is.

    Quantized are the `nn.Linear` modules named in `PROJECTIONS` and the experts of mixtures. A head tied to the
    embedding becomes one of its own and the embedding stays. `group_size` is for 4 bits, 32 if not given. `save_model`
    writes such a model and `load_model` reads it, with the same bits.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> small = mk.quantize(model, bits=4, group_size=32)
    """
    check_kind("model", model, nn.Module, "a model")
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"bits is {shown(bits)}, expected 16, 8 or 4")
    if bits != 4 and group_size is not None:
        others = {8: "8 bits have one scale per row", 16: "16 bits have no scales"}
        raise ValueError(f"group_size = {shown(group_size)} is for 4 bits; {others[bits]}")
    found = matrices_of(model)
    broken = [name for name, matrix in found.items() if not matrix.weight.isfinite().all()]
    if broken:
        raise ValueError(f"weights with a NaN or an infinity: {', '.join(broken)}")
    replaced = {name: make_quantized(matrix, BITS[bits], group_size) for name, matrix in found.items()}
    # deepcopy takes what it finds under an object's id for that object's copy.
    originals = {name: attribute(model, name) for name in found}
    copied = copy.deepcopy(model, {id(originals[name]): new for name, new in replaced.items()})
    put_in(copied, replaced)
    return copied


BITS = {16: "bfloat16", 8: "int8", 4: "nf4"}
MAX_GROUP = 1 << 20
"""Rows are filled up to whole groups."""


def make_quantized(linear: nn.Linear, format: str, group_size: int | None = None) -> QuantizedLinear:
    """What stands in for `linear`, which may be on the meta device. `group_size` is for `"nf4"`."""
    if format == "nf4":
        group_size = 32 if group_size is None else group_size
        if type(group_size) is not int or not 2 <= group_size <= MAX_GROUP or group_size % 2:
            raise ValueError(f"group_size is {shown(group_size)}, expected a positive even number, at most {MAX_GROUP}")
        return Int4Linear(linear, group_size)
    return {"bfloat16": Bfloat16Linear, "int8": Int8Linear}[format](linear)


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
    check_kind("model", model, nn.Module, "a model")
    check_readable("ids_bs", ids_bs)
    if ids_bs.dim() != 2 or ids_bs.shape[1] < 2:
        raise ValueError(f"ids_bs has shape {tuple(ids_bs.shape)}, expected [batch, s] with s of at least 2")
    with torch.no_grad():
        logits_bsw, _ = model(ids_bs[:, :-1])
        return F.cross_entropy(logits_bsw.flatten(0, 1).double(), ids_bs[:, 1:].flatten()).item() / math.log(2)


def weight_bytes(model: nn.Module) -> int:
    """Of parameters and buffers, shared ones once."""
    # Both leave out duplicates, and a tied head is the same parameter.
    return sum(t.nbytes for t in model.parameters()) + sum(t.nbytes for t in model.buffers())
