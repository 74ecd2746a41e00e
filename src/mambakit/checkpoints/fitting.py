"""Named tensors and the model they belong to: whether they fit, and putting them in."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mambakit.blocks.family import family_of
from mambakit.checkpoints.names import Renamed, Rule, renamed
from mambakit.checkpoints.quantized import Formats, check_types, stand_in
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.models.outline import outline
from mambakit.models.quantized_linear import QuantizedLinear

EMBEDDING = "backbone.embedding.weight"
HEAD = "lm_head.weight"
EMBEDDINGS = (EMBEDDING, "backbone.embeddings.weight")
"""What the embedding is called, here and in transformers. All other weights have one name everywhere."""
PLAUSIBLE = 2**16
"""A size up to this takes no time and no memory to compare, whatever the weights are."""
MIXER = "backbone.layers.0.mixer."


def with_embedding_called(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if all(other in tensors for other in EMBEDDINGS):
        raise ValueError(f"there are two embeddings, {' and '.join(EMBEDDINGS)}")
    return {name if key in EMBEDDINGS else key: tensor for key, tensor in tensors.items()}


def empty_model(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    embedding: str,
    dtype: torch.dtype | None,
    quantization: Formats | None = None,
) -> LanguageModel:
    """A model without memory, in `dtype` or that of the stored projections."""
    _check_counts(config, tensors)
    if dtype is None:
        projections = (MIXER + "in_proj.weight", embedding)
        dtype = next((tensors[name].dtype for name in projections if name in tensors), torch.float32)
        dtype = dtype if dtype.is_floating_point else torch.float32
    try:
        model = outline(config, dtype)
        stand_in(model, quantization or {})
        return model
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes whose product is no number for torch
        raise ValueError(f"no such model can be built: {str(error).splitlines()[0]}") from error


def _check_counts(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Even a model without memory is built one by one in some respects: these are held to the weights before."""
    # A layer has some tensor at least.
    if config.n_layer > len(tensors):
        raise ValueError(f"the config has {config.n_layer} layers, but there are {len(tensors)} tensors in all")
    longest = max((axis for tensor in tensors.values() for axis in tensor.shape), default=0)
    gate = config.multi_gate
    if gate is not None:
        gates = len(config.order) if gate.per_virtual_layer else config.n_layer
        if gates > len(tensors) or gate.n_streams > longest:
            raise ValueError(f"the weights have no {gates} gates with n_streams = {gate.n_streams}")
    values = {"vocab_size": config.vocab_size, "d_intermediate": config.d_intermediate}
    blocks = [asdict(block) for block in dict.fromkeys(block for blocks in config.blocks for block in blocks)]
    large = {
        name: value
        for part in (values, *blocks)
        for name, value in _numbers(part)
        if type(value) is int and value > max(longest, PLAUSIBLE)
    }
    if large:
        told = ", ".join(f"{name} = {value}" for name, value in large.items())
        raise ValueError(f"the config has {told}, but no tensor has an axis above {longest}")


def _numbers(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Those of a config and of the configs inside it."""
    inside = [item for value in values.values() if isinstance(value, dict) for item in _numbers(value)]
    return [*values.items(), *inside]


def check_tensors(
    model: LanguageModel, tensors: Mapping[str, Tensor], found: Sequence[Rule], embedding: str = EMBEDDING
) -> None:
    """ValueError lists every tensor that is missing, left over or misshapen, or says that a tied head is none."""
    # A quantized head is one of its own.
    tied = model.config.tie_embeddings and HEAD in model.state_dict()
    wanted = {name: tensor.shape for name, tensor in renamed(model.state_dict(), found).items()}
    missing = sorted(wanted.keys() - tensors.keys() - ({HEAD} if tied else set()))
    left_over = sorted(tensors.keys() - wanted.keys())
    misshapen = [
        f"{name} is {list(tensor.shape)} instead of {list(wanted[name])}"
        for name, tensor in tensors.items()
        if name in wanted and tensor.shape != wanted[name]
    ]
    problems = [f"missing {', '.join(missing)}"] if missing else []
    problems += [f"left over {', '.join(left_over)}"] if left_over else []
    problems += misshapen
    if problems:
        problems += [str(size) for size in sizes(model.config, tensors) if size.stored != size.configured]
    elif tied and HEAD in tensors and not _same(tensors[HEAD], tensors[embedding]):
        problems.append(f"the head is tied, but {HEAD} differs from {embedding}")
    if problems:
        raise ValueError("; ".join(problems))
    check_types(model, tensors)


@dataclass
class Size:
    """A size that the tensors show and the config implies."""

    name: str
    stored: int
    configured: int

    def __str__(self) -> str:
        return f"the tensors have {self.name} = {self.stored}, the config gives {self.configured}"


def sizes(config: ModelConfig, tensors: Mapping[str, Tensor]) -> list[Size]:
    """Those of the sizes that can be told from the tensors there are, under our names."""
    if config.layers is not None:
        return []  # the shapes say it all
    layers = {name.split(".")[2] for name in tensors if name.startswith("backbone.layers.")}
    found = [Size("n_layer", len(layers), config.n_layer)]
    block: Any = config.block

    def add(name: str, key: str, axis: int, configured: int) -> None:
        if key in tensors and tensors[key].dim() > axis:
            found.append(Size(name, tensors[key].shape[axis], configured))

    padded = f"a vocabulary padded to a multiple of {config.pad_vocab_size_multiple}"
    add(padded, EMBEDDING, 0, config.padded_vocab_size)
    add("d_model", EMBEDDING, 1, block.d_model)
    add("an MLP width rounded up to 128", "backbone.layers.0.mlp.fc2.weight", 1, -(-config.d_intermediate // 128) * 128)
    for name, (key, axis, called) in family_of(block).sizes.items():
        add(name, MIXER + key, axis, getattr(block, called))
    return found


def warn_about_casts(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """The model has one dtype, that of its projections; say so where it holds less than what is stored."""
    narrowed = [
        f"{name} ({tensors[name].dtype})"
        for name, parameter in model.named_parameters()
        if torch.promote_types(tensors[name].dtype, parameter.dtype) != parameter.dtype
    ]
    if narrowed:
        dtype = model.backbone.embedding.weight.dtype
        warnings.warn(
            f"the projections are stored in {dtype}, and so these become narrower: {', '.join(narrowed)}; "
            "pass dtype=torch.float32 to keep them",
            UserWarning,
            stacklevel=3,
        )


def fill(model: LanguageModel, tensors: Renamed, device: torch.device | str | None) -> None:
    """Give every parameter of an empty model its values, which it takes; parameters that are one stay one."""
    device = torch.get_default_device() if device is None else device
    full: dict[nn.Parameter, nn.Parameter] = {}
    for name, empty in list(model.named_parameters(remove_duplicate=False)):
        if empty not in full:
            # Copied, since the tensors are parts of the mapped files.
            copy = not (name == EMBEDDING and _is_read_by_rows(model))
            values = tensors.take(name).to(device, empty.dtype, copy=copy, memory_format=torch.contiguous_format)
            full[empty] = nn.Parameter(values, requires_grad=empty.requires_grad)
            vars(full[empty]).update(vars(empty))
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, full[empty])
    for name, empty in list(model.named_buffers()):
        module, _, leaf = name.rpartition(".")
        # What is not stored is empty, and only says the model's dtype.
        values = tensors.take(name) if name in tensors else torch.empty(empty.shape)
        setattr(model.get_submodule(module), leaf, values.to(device, empty.dtype, copy=True))
    assert not any(buffer.is_meta for buffer in model.buffers())


def _is_read_by_rows(model: LanguageModel) -> bool:
    """Whether a model is meant to be small, and its embedding is no head: of that, every token reads one row.

    It stays in the file then, mapped, and takes the memory of what was read. Other systems lock files that are mapped.
    """
    return os.name == "posix" and isinstance(model.lm_head, QuantizedLinear)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or (a.dtype == b.dtype and torch.equal(a, b))
