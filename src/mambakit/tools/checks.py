"""Whether this installation computes what it should: known answers, forward against step, gradients.

Every check compares with something independent: plain loops in float64, or the same block in float64.
"""

import copy
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mambakit import __version__
from mambakit.blocks.block import Block
from mambakit.blocks.config import BlockConfig
from mambakit.blocks.family import FAMILIES, presets
from mambakit.blocks.mlp import MLPConfig
from mambakit.blocks.moe import MoEConfig
from mambakit.blocks.parallel import ParallelConfig
from mambakit.inference.decoder import Decoder
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.models.stack import Stack, StackConfig
from mambakit.ops.backends import BACKENDS
from mambakit.ops.decode import DECODE
from mambakit.ops.operation import OPERATIONS
from mambakit.ops.selective_scan import SELECTIVE_SCAN, selective_scan
from mambakit.ops.ssd import SSD, ssd
from mambakit.ops.ssd_path import SsdPath

PACKAGES = ("torch", "safetensors", "transformers", "tokenizers", "huggingface_hub", "rich", "matplotlib", "triton")
MIXERS = ("mamba2", "mamba3", "attention")
# Largest error relative to the largest element: of values, and of gradients.
LIMITS = {
    torch.float64: (1e-10, 1e-8),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (5e-2, 1e-1),
    torch.float16: (1e-2, 5e-2),
}


class Check(NamedTuple):
    device: str
    dtype: str
    backend: str
    what: str
    error: float
    limit: float
    reason: str = ""
    """Why it could not run at all."""

    @property
    def passed(self) -> bool:
        return not self.reason and self.error <= self.limit


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "mambakit": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def devices() -> list[str]:
    found = ["cpu"]
    found += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return found + (["mps"] if torch.backends.mps.is_available() else [])


def kernels() -> dict[str, Any]:
    """What is known about the compiled CPU kernels."""
    cpu = BACKENDS["cpu"]
    reason = cpu.why_missing()
    return {"built": True, **cpu.about()} if reason is None else {"built": False, "reason": reason}


def operations() -> list[tuple[str, str]]:
    """Each operation and, for every backend, whether it has a kernel for it that can be used here, or why not."""
    reasons = {name: backend.why_missing() for name, backend in BACKENDS.items()}
    return [
        (name, "; ".join(f"{b}: {'yes' if r is None else r}" for b, r in reasons.items() if b in operation.kernels))
        for name, operation in OPERATIONS.items()
    ]


def proofs() -> list[dict[str, Any]]:
    """What kernels found that have to prove themselves on the device they run on."""
    return [row for backend in BACKENDS.values() if backend.why_missing() is None for row in backend.prove()]


def run_checks() -> Iterator[Check]:
    """Every check on every device, in every dtype and backend that can run there."""
    for device in devices():
        for dtype, (limit, gradient_limit) in LIMITS.items():
            if device == "mps" and dtype == torch.float64:
                continue
            for backend in backends(device, dtype):
                path = SsdPath(backend=backend)
                for what, measure, bound in checks_of(backend, dtype, limit, gradient_limit):
                    named = (device, str(dtype).removeprefix("torch."), backend, what)
                    try:
                        error = measure(path, torch.device(device), dtype)
                    except (RuntimeError, NotImplementedError) as problem:
                        yield Check(*named, float("nan"), bound, str(problem).splitlines()[0])
                    else:
                        yield Check(*named, error, bound)


def checks_of(
    backend: str, dtype: torch.dtype, limit: float, gradient_limit: float
) -> Iterator[tuple[str, Callable[..., float], float]]:
    """What is measured, how, and the largest error allowed; of operations, those that the backend has."""
    if backend == "torch" or backend in SSD.kernels:
        yield "ssd, known answer", ssd_error, limit
    if backend == "torch" or backend in SELECTIVE_SCAN.kernels:
        yield "selective scan, known answer", scan_error, limit
    for name, (family, given) in presets().items():
        config = family.configure(family.example, given)
        make = partial(family.block, config)
        yield f"{name}, forward = step", partial(step_error, make), limit
        yield f"{name}, gradients", partial(gradient_error, make), gradient_limit
        if backend in DECODE.kernels and dtype == torch.float32 and family.step is not None:
            model = ModelConfig(block=config, n_layer=2, vocab_size=40, d_intermediate=16)
            yield f"{name}, a model's token in one call", partial(decoder_error, model), limit
    yield "hybrid, forward = step", partial(step_error, partial(Stack, StackConfig(layers=hybrid()))), limit
    if backend in DECODE.kernels and dtype == torch.float32:
        model = ModelConfig(layers=hybrid(), vocab_size=40)
        yield "hybrid, a model's token in one call", partial(decoder_error, model), limit


def hybrid() -> tuple[tuple[BlockConfig, ...], ...]:
    """Layers of several kinds of blocks. All experts are chosen, as rounding might choose others."""
    mamba2, mamba3, attention = (FAMILIES[name].configure(FAMILIES[name].example) for name in MIXERS)
    width = mamba2.d_model
    experts, mlp = MoEConfig(width, 16, 2, 2), MLPConfig(width, 40)
    return (mamba2, experts), (attention, mlp), (ParallelConfig(mamba3, attention), mlp)


def backends(device: str, dtype: torch.dtype) -> list[str]:
    """Those that can run on a device, in a dtype."""
    found = (b for b in BACKENDS.values() if device.startswith(b.device) and dtype in b.dtypes)
    return ["torch", *(backend.name for backend in found if backend.why_missing() is None)]


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest element. NaN counts as infinite."""
    error = (found.detach().cpu().double() - expected.detach().cpu().double()).abs().max()
    return float(torch.nan_to_num(error / expected.detach().abs().max().cpu().double().clamp(min=1e-30), torch.inf))


def drawer(seed: int) -> Callable[..., Tensor]:
    source = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64)


def ssd_error(path: SsdPath, device: torch.device, dtype: torch.dtype) -> float:
    """The core against its recurrence, one token at a time."""
    draw = drawer(1)
    v, b, c = (draw(1, 70, 1, 2, 5) for _ in range(3))
    da, w_now, w_later, state = -draw(1, 70, 2).abs(), draw(1, 70, 2), draw(1, 70, 2), draw(1, 2, 5, 5)
    v, b, c = (t.to(dtype).double() for t in (v, b, c))
    h, expected = state[0], []
    for t in range(70):
        u = v[0, t, 0, :, :, None] * b[0, t, 0, :, None, :]
        held = da[0, t].exp()[:, None, None] * h
        expected.append(((held + w_now[0, t, :, None, None] * u) * c[0, t, 0, :, None, :]).sum(-1))
        h = held + w_later[0, t, :, None, None] * u
    narrow = [t.to(device, dtype) for t in (v, b, c)]
    wide = [t.to(device, torch.promote_types(dtype, torch.float32)) for t in (da, w_now, w_later, state)]
    y, last = ssd(*narrow, *wide, path=path)
    return max(relative(y[0, :, 0], torch.stack(expected)), relative(last[0], h))


def scan_error(path: SsdPath, device: torch.device, dtype: torch.dtype) -> float:
    """Mamba-1's scan against its recurrence."""
    draw = drawer(2)
    x, dt, a, b, c = draw(1, 70, 6), draw(1, 70, 6).abs(), -draw(6, 3).abs(), draw(1, 70, 1, 3), draw(1, 70, 1, 3)
    x, dt, b, c = (t.to(dtype).double() for t in (x, dt, b, c))
    a = a.to(torch.promote_types(dtype, torch.float32)).double()
    h, expected = torch.zeros(6, 3, dtype=torch.float64), []
    for t in range(70):
        h = torch.exp(dt[0, t, :, None] * a) * h + (dt[0, t] * x[0, t])[:, None] * b[0, t, 0]
        expected.append((h * c[0, t, 0]).sum(-1))
    x, dt, b, c = (t.to(device, dtype) for t in (x, dt, b, c))
    a = a.to(device, torch.promote_types(dtype, torch.float32))
    y, last = selective_scan(x, dt, a, b, c, backend=path.backend)
    return max(relative(y[0], torch.stack(expected)), relative(last[0], h))


def made(make: Any, device: torch.device, dtype: torch.dtype) -> Block | Stack:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make().to(device, dtype)


def step_error(make: Any, path: SsdPath, device: torch.device, dtype: torch.dtype) -> float:
    draw = drawer(4)
    block = made(make, device, dtype)
    x = draw(2, 9, block.d_model).to(device, dtype)
    with torch.no_grad():
        whole, last = block(x, path=path)
        cache, steps = None, []
        for t in range(x.shape[1]):
            y, cache = block(x[:, t : t + 1], cache, path=path)
            steps.append(y)
    assert cache is not None, "nine tokens leave a cache"
    pairs = zip(tensors_in(cache), tensors_in(last), strict=True)
    states = [relative(a, b) for a, b in pairs if a.any()]
    return max([relative(torch.cat(steps, 1), whole), *states])


def tensors_in(cache: Any) -> list[Tensor]:
    if not isinstance(cache, tuple):
        return [cache] if isinstance(cache, Tensor) else []
    return [tensor for part in cache for tensor in tensors_in(part)]


def gradient_error(make: Any, path: SsdPath, device: torch.device, dtype: torch.dtype) -> float:
    """Gradients of the input and of every parameter against the same block in float64 on the CPU."""
    draw = drawer(5)
    block = made(make, device, dtype)
    x = draw(2, 40, block.d_model).to(dtype)
    twin = made(make, torch.device("cpu"), dtype).double()
    weight = draw(*x.shape)

    def gradients(module: nn.Module, x: Tensor, path: SsdPath) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y, _ = module(x, path=path)
        inputs = [x, *module.parameters()]
        return list(torch.autograd.grad((y.cpu().double() * weight).sum(), inputs, materialize_grads=True))

    plain = gradients(twin, x.double(), SsdPath(backend="torch"))
    found = gradients(block, x.to(device), path)
    return max(relative(a, b) for a, b in zip(found, plain, strict=True) if b.abs().max() > 0)


def decoder_error(config: ModelConfig, path: SsdPath, device: torch.device, dtype: torch.dtype) -> float:
    """A model decoding in one call per token against the same model in float64, stepped by modules."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model = LanguageModel(config).to(device, dtype)
    ids_bs = torch.arange(14, device=device).view(2, 7) * 5 % 40
    with torch.no_grad():
        whole, _ = copy.deepcopy(model).double()(ids_bs, path=SsdPath(backend="torch"))
        decoder = Decoder(model, path.backend)
        decoder.load(model.fresh_cache(2))
        return relative(torch.stack([decoder.step(ids_b) for ids_b in ids_bs.unbind(1)], 1), whole)
