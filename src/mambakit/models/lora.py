"""Low-rank adapters: a small product beside a frozen projection is trained in its place. See docs/training.md."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from mambakit.arguments import check_kind, number, shown
from mambakit.models.quantization import PROJECTIONS
from mambakit.models.quantized_linear import QuantizedLinear

Model = TypeVar("Model", bound=nn.Module)

TARGETS = tuple(name for name in PROJECTIONS if name != "lm_head")
"""What gets an adapter unless the caller says otherwise: every projection of every block."""
MAX_RANK = 1 << 16


class LoraLinear(nn.Module):
    """`base_layer(x) + alpha / rank * lora_B(lora_A(x))`; parameters are named as peft names them.

    The second map starts at zero, so a fresh adapter changes nothing.
    """

    def __init__(self, base_layer: nn.Linear | QuantizedLinear, rank: int, alpha: float):
        super().__init__()
        self.base_layer, self.rank, self.alpha = base_layer, rank, alpha
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        weight = base_layer.weight
        made = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32)}
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, **made)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, **made)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def weight(self) -> Tensor:
        """The frozen weight, which adapters of other packages show too."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        return y + (self.scale * self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))).to(y.dtype)

    def merged(self) -> nn.Linear:
        """The projection with the product added to its weight, once and for all."""
        if not isinstance(self.base_layer, nn.Linear):
            raise ValueError(f"a {type(self.base_layer).__name__} holds rounded weights, which nothing can be added to")
        weight = self.base_layer.weight
        with torch.no_grad():
            product = self.lora_B.weight.double() @ self.lora_A.weight.double()
            weight.copy_(weight.double() + self.scale * product)
        return self.base_layer

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha:g}"


def add_lora(model: Model, rank: int, *, alpha: float | None = None, targets: Sequence[str] = TARGETS) -> Model:
    """Put adapters of `rank` on every linear map in `model` that has one of these names, and freeze all else.

    Changes the model itself and returns it. `alpha` is twice the rank by default. Experts of a mixture, which are no
    linear modules, have none.

        model = mk.add_lora(mk.load_model("run"), 8)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=257))
        >>> model = mk.add_lora(model, rank=4)
        >>> trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        >>> all("lora" in name for name in trained)
        True
    """
    _check_plain(model)
    targets = [targets] if isinstance(targets, str) else targets
    if not isinstance(targets, Sequence) or not all(isinstance(name, str) for name in targets):
        raise ValueError(f"targets is {shown(targets)}, expected names of projections")
    targets = list(targets)
    found = [path for path, _ in _linears(model) if path.rpartition(".")[2] in targets]
    absent = [name for name in targets if not any(path.rpartition(".")[2] == name for path in found)]
    if not found or (absent and targets != list(TARGETS)):
        known = sorted({path.rpartition(".")[2] for path, _ in _linears(model)})
        raise ValueError(f"the model has no projections called {', '.join(absent)}; it has {', '.join(known)}")
    return wrap(model, found, rank, alpha)


def wrap(model: Model, paths: Iterable[str], rank: int, alpha: float | None = None) -> Model:
    """Adapters on exactly these modules; everything else is frozen."""
    if type(rank) is not int or not 0 < rank <= MAX_RANK:
        raise ValueError(f"rank = {shown(rank)} has to be a positive integer of at most {MAX_RANK}")
    alpha = 2.0 * rank if alpha is None else number("alpha", alpha)
    if not alpha > 0:
        raise ValueError(f"alpha = {alpha!r} has to be positive")
    _check_plain(model)
    model.requires_grad_(False)
    for path in paths:
        owner, name = _place(model, path)
        setattr(owner, name, LoraLinear(getattr(owner, name), rank, alpha))
    return model


def merge_lora(model: Model) -> Model:
    """Add the adapters to the weights they stand beside. Changes the model itself, which is an ordinary one again.

    Outputs stay the same up to rounding. Every parameter can be trained afterwards.

        mk.save_model(mk.merge_lora(model), "merged")

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=257))
        >>> model = mk.merge_lora(mk.add_lora(model, rank=4))
        >>> mk.save_model(model, "merged")
    """
    found = dict(adapters(model))
    if not found:
        raise ValueError("the model has no adapters to merge")
    for path, adapter in found.items():
        owner, name = _place(model, path)
        setattr(owner, name, adapter.merged())
    return model.requires_grad_(True)


def adapters(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Every adapter with its place."""
    check_kind("model", model, nn.Module, "a model")
    return ((path, module) for path, module in model.named_modules() if isinstance(module, LoraLinear))


def _check_plain(model: nn.Module) -> None:
    if next(adapters(model), None) is not None:
        raise ValueError("the model has adapters already; merge_lora(model) makes them part of its weights")


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | QuantizedLinear):
            yield path, module


def _place(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    owner, _, name = path.rpartition(".")
    return model.get_submodule(owner), name
