"""What `mambakit bench` times: forward, training and step of a block or a language model, path by path."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mambakit.blocks.block import Block
from mambakit.blocks.family import family_of
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.ops.ssd import SSD
from mambakit.ops.ssd_path import SsdPath
from mambakit.tools.measure import gemm_task, interleaved, median, peak_bytes, read_task

KINDS = ("forward", "train", "step")


class Subject(NamedTuple):
    """A module and what it is fed."""

    module: nn.Module
    inputs: Tensor
    paths: list[SsdPath]


def make_model(config: Any, layers: int, vocabulary: int) -> LanguageModel:
    return LanguageModel(ModelConfig(block=config, n_layer=layers, vocab_size=vocabulary))


def tasks(subject: Subject, path: SsdPath) -> dict[str, Callable[[], Any]]:
    """One call of each kind. A step runs from a cache that is never written into, so every call is the same."""
    module, x = subject.module, subject.inputs
    with torch.no_grad():
        cache = module(x[:, :8], path=path)[1]

    def forward() -> None:
        with torch.no_grad():
            module(x, path=path)

    def train() -> None:
        module.zero_grad()
        module(x, path=path)[0].square().mean().backward()

    def step() -> None:
        with torch.no_grad():
            module(x[:, :1], cache, path=path)

    return {"forward": forward, "train": train, "step": step}


def measure(subject: Subject, kinds: Iterable[str], repeats: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """One row per path and kind, and the limits of the machine from the same rounds."""
    kinds = tuple(kinds)
    jobs: dict[Any, Callable[[], Any]] = {}
    for path in subject.paths:
        made = tasks(subject, path)
        jobs |= {(path, kind): made[kind] for kind in kinds}
    gemm, flops = gemm_task()
    read, count = read_task()
    times = interleaved({**jobs, "gemm": gemm, "read": read}, repeats)
    limits = {"gemm_gflops": flops / median(times["gemm"]) / 1e9, "read_gb_s": count / median(times["read"]) / 1e9}
    rows = []
    for (path, kind), task in jobs.items():
        seconds = median(times[path, kind])
        floor = floor_seconds(subject, kind, limits)
        rows.append(
            {
                "kind": kind,
                "algorithm": path.algorithm,
                "chunk_len": path.chunk_len,
                "backend": path.backend,
                "ran": "cpu" if path.backend != "torch" and runs_kernels(subject, path) else "torch",
                "ms": 1e3 * seconds,
                "floor_ms": 1e3 * floor,
                "over_floor": seconds / floor,
                "peak_mb": peak_bytes(task) / 1e6,
            }
        )
    return rows, limits


def runs_kernels(subject: Subject, path: SsdPath) -> bool:
    parameter = next(subject.module.parameters())
    return path.algorithm == "serial_recalculated" and SSD.choose(path.backend, parameter) is not None


def floor_seconds(subject: Subject, kind: str, limits: dict[str, float]) -> float:
    """The least the machine needs: matrix products at the rate of one large one, weights read once per step."""
    if kind == "step":
        return sum(p.nbytes for p in subject.module.parameters()) / limits["read_gb_s"] / 1e9
    flops = (3 if kind == "train" else 1) * module_flops(subject.module, subject.inputs.shape[:2].numel())
    return flops / limits["gemm_gflops"] / 1e9


def module_flops(module: nn.Module, tokens: int) -> float:
    """Of a forward's matrix products: every projection, and what else a family has."""
    total = 0.0
    for part in module.modules():
        if isinstance(part, nn.Linear):
            total += 2.0 * tokens * part.weight.numel()
        elif isinstance(part, Block):
            total += family_of(part).flops(part.config, tokens)
    return total
