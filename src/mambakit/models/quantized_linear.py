"""What stands in for `nn.Linear` with weights in 16, 8 or 4 bits, and how these are found. See docs/quantization.md."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.ops import few_rows
from mambakit.ops.grouped_product import used_of

# The 16 values of NF4 (Dettmers and others, 2023): equally likely for normally distributed weights, with an exact 0.
NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
# Scales to try, as parts of a group's largest weight: clipping it a little often serves the other 31 better.
STRETCHES = (1.0, 0.76, 0.82, 0.88, 0.94, 1.06, 1.12)
# Weights decoded at a time: enough to keep the bookkeeping small, few enough to stay in the processor's cache.
BLOCK = 1 << 19
# Rows that are quantized at a time: what that takes beside the result is small.
ROWS = 2048
LEVELS = tuple(round(127 * value) for value in NF4)
"""The values of NF4 as integers."""
SMALLEST = 1e-36
"""The largest number of a row below this is no number to divide by."""
Empty = tuple[tuple[int, ...], torch.dtype]
"""What a tensor without memory is like."""


def int4_values(device: torch.device) -> Tensor:
    """`values[scale, code]`: LEVELS[code] scale / 255, rounded, which is never halfway between two integers."""
    levels = torch.tensor(LEVELS, device=device)
    size = (2 * levels.abs() * torch.arange(256, device=device)[:, None] + 255) // 510
    return (size * levels.sign()).to(torch.int8)


def rounded_input(x: Tensor, activations: str) -> Tensor:
    """`x` as the products read it: as it is, in bfloat16, or as 255 integers times a scale of each row.

    Gradients pass as if nothing were rounded.
    """
    if activations == "float32":
        return x
    if activations == "bfloat16":
        near = x.detach().bfloat16().to(x.dtype)
    else:
        most = x.detach().abs().amax(-1, keepdim=True)
        by = torch.where(most > SMALLEST, 127 / most, 0)
        # Not 0 times infinity: what is no number makes the whole row so.
        near = (x.detach() * by).round() * torch.where(most.isfinite(), most / 127, torch.nan)
    return near + (x - x.detach()) if x.requires_grad else near


class QuantizedLinear(nn.Module, ABC):
    """What stands in for an `nn.Linear`; its weights are decoded a block of rows at a time, whenever it is called.

    Rows are multiplied by a kernel where there is one, which decodes as it reads: those of a decoding step, and any
    number of them where `activations` says that they are rounded like the weights. Sums are in at least float32, and
    returned in the dtype of the input, through which gradients flow.

    It stands in for matrices stacked in one parameter too, whose rows it has one after the other: `counts_e` then says
    how many rows of the input each of them gets, as in `grouped_product`.
    """

    format: str
    """Its name in files."""
    tensors: tuple[str, ...]
    """What it holds beside the bias. These keep their dtypes, whatever the model's is."""
    choices: tuple[str, ...]
    """What `activations` may be."""

    def __init__(self, linear: nn.Linear, activations: str):
        super().__init__()
        if activations not in self.choices:
            raise ValueError(f"activations is {activations!r}, expected {' or '.join(map(repr, self.choices))}")
        if activations == "int8" and linear.in_features > few_rows.MAX_COLUMNS:
            most = few_rows.MAX_COLUMNS
            raise ValueError(f"activations in int8 are for at most {most} inputs, got {linear.in_features}")
        self.activations = activations
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
        # Empty: it follows the model's dtype, as the weight did, where `scales` have one of their own.
        self.register_buffer("like", linear.weight.detach().new_empty(0), persistent=False)

    def hold(self, weight: Tensor, encode: Callable[[Tensor], tuple[Tensor, ...]], *empty: Empty) -> None:
        """Keep what `encode` makes of a weight as `tensors`; of one without memory, `empty` ones."""
        made = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in empty]
        for name, tensor in zip(self.tensors, made if weight.is_meta else encode(weight.detach()), strict=True):
            self.register_buffer(name, tensor)

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
        return {"format": self.format, **({} if self.activations == "float32" else {"activations": self.activations})}

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
        near = rounded_input(x.to(wide), self.activations)
        y = torch.cat([self.product(near, block) for block in blocks], -1)
        return (y if self.bias is None else y + self.bias[part]).to(x.dtype)

    def product(self, x: Tensor, rows: slice) -> Tensor:
        return F.linear(x, self.decoded(rows, x.dtype))

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, activations={self.activations}"


class Bfloat16Linear(QuantizedLinear):
    """`weight_bfloat16[o, i]`, the weight rounded to bfloat16."""

    format, tensors, choices = "bfloat16", ("weight_bfloat16",), ("float32", "bfloat16")
    weight_bfloat16: Tensor

    def __init__(self, linear: nn.Linear, activations: str = "float32"):
        super().__init__(linear, activations)
        self.hold(
            linear.weight,
            lambda weight: (weight.to(torch.bfloat16, copy=True).contiguous(),),
            ((self.out_features, self.in_features), torch.bfloat16),
        )

    def stored(self) -> few_rows.Weights:
        format = few_rows.BFLOAT16 if self.activations == "float32" else few_rows.BFLOAT16_NARROW
        return few_rows.Weights(format, self.in_features, self.weight_bfloat16, None, self.bias)

    def decoded(self, rows: slice, dtype: torch.dtype) -> Tensor:
        return self.weight_bfloat16[rows].to(dtype)


class Int8Linear(QuantizedLinear):
    """`weight[o, i] = scales[o] weight_int8[o, i]`, the largest of a row being 127 or -127."""

    format, tensors, choices = "int8", ("weight_int8", "scales"), ("float32", "int8")
    weight_int8: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, activations: str = "float32"):
        super().__init__(linear, activations)
        shape = self.out_features, self.in_features
        self.hold(linear.weight, int8_of, (shape, torch.int8), (shape[:1], torch.float32))

    def stored(self) -> few_rows.Weights:
        format = few_rows.INT8 if self.activations == "float32" else few_rows.INT8_NARROW
        return few_rows.Weights(format, self.in_features, self.weight_int8, self.scales, self.bias)

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

    format, tensors, choices = "nf4", ("weight_int4", "scales"), ("float32",)
    weight_int4: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, group_size: int, activations: str = "float32"):
        super().__init__(linear, activations)
        self.group_size = group_size
        groups = -(-self.in_features // group_size)
        codes = ((self.out_features, groups * (group_size // 2)), torch.uint8)
        self.hold(linear.weight, self.encoded, codes, ((self.out_features, groups), torch.bfloat16))

    def encoded(self, weight: Tensor) -> tuple[Tensor, ...]:
        parts = []
        for rows in weight.split(ROWS):
            block = F.pad(rows.float(), (0, -self.in_features % self.group_size))
            scales, codes = encoded(block.unflatten(1, (-1, self.group_size)))
            low, high = codes.chunk(2, -1)
            parts.append(((low | high << 4).flatten(1), scales))
        return joined(parts)

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


class IntegerInt4Linear(QuantizedLinear):
    """`weight[o, g, i] = scales[o] int4_values[scale[o, g], code[o, g, i]]` in groups of 32 inputs.

    So it is an integer from -127 to 127 times its row's scale, for products with exact sums. A row of `weight_int4` has
    the codes of all groups as in `Int4Linear`, an even number of them, the last filled with zeros, then the groups'
    scales.
    """

    format, tensors, choices = "int4", ("weight_int4", "scales"), ("int8",)
    weight_int4: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, activations: str = "int8"):
        super().__init__(linear, activations)
        codes = ((self.out_features, -(-self.in_features // 64) * 34), torch.uint8)
        self.hold(linear.weight, int4_of, codes, ((self.out_features,), torch.float32))

    def stored(self) -> few_rows.Weights:
        return few_rows.Weights(
            few_rows.INT4_NARROW, self.in_features, self.weight_int4, self.scales, self.bias, few_rows.GROUP
        )

    def settings(self) -> dict[str, Any]:
        return {"format": self.format}

    def decoded(self, rows: slice, dtype: torch.dtype) -> Tensor:
        return self.integers(rows).to(dtype) * self.scales[rows, None].to(dtype)

    def product(self, x: Tensor, rows: slice) -> Tensor:
        return F.linear(x, self.integers(rows).to(x.dtype)) * self.scales[rows].to(x.dtype)

    def integers(self, rows: slice) -> Tensor:
        """The weights without their scales."""
        groups = self.weight_int4.shape[1] // 17
        packed, scales = self.weight_int4[rows].split([16 * groups, groups], 1)
        halves = packed.unflatten(1, (groups, 16))
        codes = torch.cat([halves & 15, halves >> 4], -1)
        values = int4_values(packed.device).flatten()
        place = scales[..., None].int() * 16 + codes
        return values.index_select(0, place.flatten()).view(len(packed), -1)[:, : self.in_features]


def scaled_blocks(weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of a weight at a time, in float32, and scales that make the largest of each 127 or -127."""
    for rows in weight.split(ROWS):
        block = rows.float()
        yield block, block.abs().amax(1) / 127


def int8_of(weight: Tensor) -> tuple[Tensor, ...]:
    """The tensors of `Int8Linear`."""
    return joined(
        ((block / nonzero(scales)[:, None]).round().to(torch.int8), scales) for block, scales in scaled_blocks(weight)
    )


def int4_of(weight: Tensor) -> tuple[Tensor, ...]:
    """The tensors of `IntegerInt4Linear`."""
    filling = -weight.shape[1] % 64
    return joined(
        (encoded_integers(F.pad(block / nonzero(scales)[:, None], (0, filling))), scales)
        for block, scales in scaled_blocks(weight)
    )


def joined(parts: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Tensors of some rows at a time as those of all."""
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def encoded_integers(weight: Tensor) -> Tensor:
    """Rows of `IntegerInt4Linear.weight_int4`; the largest of a row is 127 or -127."""
    weight_ogi, values = weight.unflatten(1, (-1, few_rows.GROUP)), int4_values(weight.device).float()
    most_og = weight_ogi.abs().amax(-1)
    best: tuple[Tensor, ...] | None = None
    for stretch in STRETCHES:
        scale_og1 = (most_og * (255 / 127 * stretch)).round().clamp(max=255).int()[..., None]
        of_scale = [value.take(scale_og1.long()) for value in values.unbind(1)]
        code_ogi = torch.zeros_like(weight_ogi, dtype=torch.uint8)
        for below, above in itertools.pairwise(of_scale):
            code_ogi += weight_ogi > (below + above) / 2
        value_ogi = values.flatten().index_select(0, (16 * scale_og1 + code_ogi).flatten()).view_as(weight_ogi)
        tried = scale_og1, code_ogi, (weight_ogi - value_ogi).square().sum(-1, keepdim=True)
        best = (
            tried if best is None else tuple(torch.where(tried[2] < best[2], *p) for p in zip(tried, best, strict=True))
        )
    assert best is not None
    scale_og1, code_ogi, _ = best
    low, high = code_ogi.chunk(2, -1)
    return torch.cat([(low | high << 4).flatten(1), scale_og1[..., 0].to(torch.uint8)], 1)


def encoded(weight_ogi: Tensor) -> tuple[Tensor, Tensor]:
    """Scales in bfloat16 and codes of groups of weights, by that of `STRETCHES` with the smallest squared error."""
    best = rounded(weight_ogi, STRETCHES[0])
    for stretch in STRETCHES[1:]:
        best = better(rounded(weight_ogi, stretch), best)
    scale_og1, code_ogi, _ = best
    return scale_og1[..., 0], code_ogi


def better(tried: tuple[Tensor, ...], best: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The one with the smaller squared error, which is the third of each, group by group."""
    return tuple(torch.where(tried[2] < best[2], new, old) for new, old in zip(tried, best, strict=True))


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
