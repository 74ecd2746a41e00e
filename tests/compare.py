"""How two results are compared, in one place: per tensor, by name, relative to the largest reference element."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"

# Relative to max(1, largest reference element).
VALUE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
GRADIENT = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# What the parts around a scan are held to in float32, on every backend.
CLOSE_VALUE = {**VALUE, torch.float32: 1e-5}
CLOSE_GRADIENT = {**GRADIENT, torch.float32: 1e-4}


def error(got: Tensor, want: Tensor, floor: float = 1.0) -> float:
    """Largest difference over the largest reference element, the latter at least `floor`."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if want.numel() == 0:
        return 0.0
    wide = torch.complex128 if want.is_complex() else torch.float64
    got, want = got.detach().to(wide), want.detach().to(wide)
    worst = (got - want).abs().max().item()
    return worst / max(want.abs().max().item(), floor) if worst == worst else float("inf")


def check(tolerance: float, got: dict[str, Tensor], want: dict[str, Tensor], floor: float = 1.0) -> None:
    """Every tensor of `want` is in `got` within `tolerance`; a failure names each one that is not."""
    missing = want.keys() - got.keys()
    assert not missing, f"missing: {sorted(missing)}"
    errors = {name: error(got[name], want[name], floor) for name in want}
    bad = {name: f"{e:.3g}" for name, e in errors.items() if not e <= tolerance}
    assert not bad, f"beyond {tolerance:g}: {bad}"


def gradients(outputs: dict[str, Tensor], heads: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of `sum(output * head)` over all outputs, for every input, by name."""
    loss = sum((outputs[name] * heads[name].to(outputs[name].dtype)).sum() for name in heads)
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if grad is None else grad
        for (name, tensor), grad in zip(inputs.items(), grads, strict=True)
    }


def leaves(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Fresh leaves with the same values, each with its own graph."""
    return {name: t.detach().to(dtype or t.dtype).clone().requires_grad_() for name, t in tensors.items()}


def with_gradients(module: Any, run: Callable[[Any, Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """The output `y` of `run(module, x)` and the gradients of `x` and the parameters, from a fixed head."""
    x = x.detach().clone().requires_grad_()
    y = run(module, x)
    head = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
    found = gradients({"y": y}, {"y": head}, {"x": x, **dict(module.named_parameters())})
    return {"y": y} | {f"d {name}": grad for name, grad in found.items()}


def check_only_inputs_are_kept(function: Callable[..., Any], *inputs: Tensor) -> None:
    """The backward of `function(*inputs)` holds on to no tensor but these."""
    kept = set()

    def note(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(*inputs)
    assert kept <= {tensor.untyped_storage().data_ptr() for tensor in inputs}


def load_golden(case: dict[str, Any]) -> dict[str, Tensor]:
    return load_file(GOLDEN / case["file"])
