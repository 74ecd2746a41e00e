"""Time per token and memory of what is remembered, by length: a Mamba beside a Transformer of its size."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.blocks.attention import AttentionCache, AttentionConfig
from mambakit.blocks.mlp import MLPConfig
from mambakit.inference.decoder import make_decoder
from mambakit.models.language_model import LanguageModel, ModelConfig

LENGTHS = (512, 2048, 8192, 32768)
ROUNDS, STEPS = 9, 8


class Point(NamedTuple):
    length: int
    """Tokens read before."""
    ms: float
    """For one more, in the best of some rounds."""
    megabytes: float
    """Of the cache after them."""


def transformer_like(model: LanguageModel) -> LanguageModel:
    """As many layers of attention and a gated MLP, as wide, with as many parameters as its hidden width can give."""
    config, d = model.config, model.config.d_model
    within = sum(parameter.numel() for parameter in model.backbone.layers.parameters()) // config.n_layer
    mlp = MLPConfig(d, max(1, round((within - 4 * d * d - 2 * d) / (3 * d))))
    attention = AttentionConfig(d, n_heads=max(1, d // 64), rope_theta=10_000.0)
    return LanguageModel(ModelConfig(layers=((attention, mlp),) * config.n_layer, vocab_size=config.vocab_size))


def measure(models: Sequence[LanguageModel], lengths: Sequence[int] = LENGTHS) -> list[list[Point]]:
    """For each model, a point per length. Models take turns, so that a busy moment falls on all of them."""
    found: list[list[Point]] = [[] for _ in models]
    with torch.no_grad():
        for length in lengths:
            decoders, caches = [], [after(model, length) for model in models]
            for model, cache in zip(models, caches, strict=True):
                decoders.append(make_decoder(model, "auto"))
                decoders[-1].load(cache)
            rounds = [[milliseconds(decoder) for decoder in decoders] for _ in range(1 + ROUNDS)][1:]
            for points, cache, times in zip(found, caches, zip(*rounds, strict=True), strict=True):
                points.append(Point(length, min(times), size_of(cache) / 1e6))
    return found


def after(model: LanguageModel, length: int) -> Any:
    """A cache as after `length` tokens. Keys and values are drawn: neither time nor memory depends on them."""
    _, cache = model.backbone(model.embed(torch.zeros(1, 1, dtype=torch.int64)))
    return tuple(grown(part, length) for part in cache)


def grown(cache: Any, length: int) -> Any:
    if isinstance(cache, AttentionCache):
        sizes = (1, length, *cache.k_btgp.shape[2:])
        return AttentionCache(torch.randn(sizes), torch.randn(sizes), torch.full_like(cache.position_b, length))
    if isinstance(cache, tuple):
        parts = [grown(part, length) for part in cache]
        return type(cache)(*parts) if hasattr(cache, "_fields") else tuple(parts)
    return cache


def milliseconds(decoder: Any) -> float:
    ids_b = torch.tensor([65])
    begun = time.perf_counter()
    for _ in range(STEPS):
        decoder.step(ids_b)
    return 1e3 * (time.perf_counter() - begun) / STEPS


def size_of(cache: Any) -> int:
    if isinstance(cache, Tensor):
        return cache.numel() * cache.element_size()
    return sum(map(size_of, cache)) if isinstance(cache, tuple) else 0


def table(mamba: Sequence[Point], transformer: Sequence[Point]) -> str:
    lines = [f"{'tokens read':>11} {'Mamba':>22} {'Transformer':>22}"]
    for one, other in zip(mamba, transformer, strict=True):
        cells = [f"{point.ms:.2f} ms, {point.megabytes:.2f} MB" for point in (one, other)]
        lines.append(f"{one.length:11,} {cells[0]:>22} {cells[1]:>22}")
    return "\n".join(lines)


def draw(mamba: Sequence[Point], transformer: Sequence[Point], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for name, points, color in (("Mamba-3", mamba, "tab:blue"), ("Transformer", transformer, "tab:red")):
        lengths = [point.length for point in points]
        time_axes.plot(lengths, [point.ms for point in points], "o-", color=color, label=name)
        memory_axes.plot(lengths, [point.megabytes for point in points], "o-", color=color, label=name)
    time_axes.set(title="time for one more token", ylabel="milliseconds")
    memory_axes.set(title="memory of what was read", ylabel="megabytes")
    for axes in (time_axes, memory_axes):
        axes.set(xlabel="tokens read before", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.legend()
    figure.savefig(path, dpi=110)
