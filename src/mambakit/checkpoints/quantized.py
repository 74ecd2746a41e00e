"""Quantized models in files of our own format: `config.json` names each matrix with its format.

"quantization": {"lm_head": {"format": "int8"}, "backbone.layers.0.mixer.in_proj": {"format": "nf4", "group_size": 32}}

`"activations"` says what inputs are rounded to before they are multiplied; without it they are not, but for "int4".
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mambakit.checkpoints.fields import shown
from mambakit.models.quantization import FORMATS, make_quantized, matrices_of, put_in, quantized_in

FIELD = "quantization"
Formats = Mapping[str, Mapping[str, Any]]
"""Of matrices, by name."""
MAX_GROUP = 2**16


def formats_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What `config.json` says of a model's quantized matrices."""
    return {name: module.settings() for name, module in quantized_in(model).items()}


def read_formats(values: Any) -> Formats:
    """ValueError names all that is wrong."""
    if not isinstance(values, dict) or not values:
        raise ValueError(f"{FIELD} = {shown(values)}, expected names of matrices with their formats")
    wrong = [f"{shown(name)}: {shown(given)}" for name, given in values.items() if not _is_format(given)]
    if wrong:
        known = ", ".join(FORMATS)
        raise ValueError(
            f"{FIELD} has {'; '.join(wrong[:20])}, expected a format of {known}, and group_size for nf4, "
            "or activations, bfloat16 for bfloat16 and int8 for int8"
        )
    return values


def _is_format(given: Any) -> bool:
    if not isinstance(given, dict) or given.get("format") not in list(FORMATS):
        return False
    format = given["format"]
    if format == "nf4":
        size = given.get("group_size")
        return (
            given.keys() == {"format", "group_size"} and type(size) is int and 0 < size <= MAX_GROUP and size % 2 == 0
        )
    if format in ("bfloat16", "int8") and "activations" in given:
        return given.keys() == {"format", "activations"} and given["activations"] == format
    return given.keys() == {"format"}


def stand_in(model: nn.Module, formats: Formats) -> None:
    """Make these matrices of an empty model quantized ones, empty too."""
    if not formats:
        return
    found = matrices_of(model)
    unknown = sorted(formats.keys() - found.keys())
    if unknown:
        told = ", ".join(map(shown, unknown[:20]))
        raise ValueError(f"{FIELD} names matrices that the model does not have, or that stay as they are: {told}")
    made = {
        n: make_quantized(found[n], given["format"], given.get("group_size"), given.get("activations", "float32"))
        for n, given in formats.items()
    }
    put_in(model, made)


def check_types(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """ValueError names packed integers and scales that are of another type than their format has, and integers else."""
    exact = {
        f"{name}.{own}": getattr(module, own).dtype
        for name, module in quantized_in(model).items()
        for own in module.tensors
    }
    wrong = [
        f"{name} is {tensor.dtype}, expected {exact.get(name, 'floating-point numbers')}"
        for name, tensor in tensors.items()
        if tensor.dtype != exact.get(name, tensor.dtype) or not (name in exact or tensor.is_floating_point())
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def refuse_quantized(model: nn.Module, what: str) -> None:
    """ValueError for what takes numbers only."""
    if quantized_in(model):
        raise ValueError(f"{what} takes no quantized model; give the one it was made from")
