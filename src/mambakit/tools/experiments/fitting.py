"""Train a variant on a task, short sequences first, and measure it on longer ones than it has seen."""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mambakit.blocks.config import check_positive
from mambakit.tools.experiments.tasks import Task
from mambakit.tools.experiments.variants import Variant

Progress = Callable[[int, float], None]
"""Called after every step with how many there were and the loss."""

TEST_SEED, CHOICE_SEED = 2**40, 2**41
"""Far from the seeds of trainings, so that no test sequence was trained on, nor one a run was chosen by."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    steps: int
    tokens: int = 1280
    """Per step: short sequences come in larger batches."""
    d_model: int = 64
    learning_rate: float = 3e-3
    warmup: int = 100
    seeds: tuple[int, ...] = (0, 1, 2)
    """Tried in order until one has learned the task at the validation length; else the best there."""
    solved: float = 99.5
    """The scaled accuracy there that ends the search."""
    test_sequences: int = 1024

    def __post_init__(self) -> None:
        check_positive(self, "steps", "tokens", "test_sequences")
        if not self.seeds:
            raise ValueError("seeds is empty; give at least one")

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero."""
        return min(1, (step + 1) / self.warmup) * (0.5 + 0.5 * math.cos(math.pi * step / self.steps))

    def longest(self, task: Task, step: int) -> int:
        """The curriculum: from the first length to the last by equal factors, which it reaches at 7 tenths of the way.

        A rotation has to be twice as exact for twice the length; so it is never asked for more than a little more.
        """
        _, first, last = task.lengths
        return round(first * (last / first) ** min(step / self.steps / 0.7, 1))


@dataclass(kw_only=True)
class Fit:
    """One trained model. Scores are scaled accuracies in per cent: see `Task.scaled`."""

    task: str
    variant: str
    seed: int
    parameters: int
    recipe: Recipe
    seconds: float = 0.0
    """All seeds and the measuring, by the clock."""
    cpu_seconds: float = 0.0
    """The same, of this process alone: what the clock would show on a machine with nothing else to do."""
    losses: list[float] = field(default_factory=list)
    """Mean losses of the parts of the training, at most 100 parts."""
    valid_score: float = 0.0
    """At the task's validation length, on sequences used for nothing else; runs are chosen by this one."""
    scores: dict[int, float] = field(default_factory=dict)
    """By length; the task's test length is the one in the table."""
    tried: list[tuple[int, float]] = field(default_factory=list)
    """Seeds and their `valid_score`, this one included."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def search(task: Task, variant: Variant, recipe: Recipe, progress: Progress) -> Fit:
    """The fit to report: chosen among seeds at the validation length, and only then measured on the test."""
    with one_thread():
        return _search(task, variant, recipe, progress)


def _search(task: Task, variant: Variant, recipe: Recipe, progress: Progress) -> Fit:
    best: tuple[Fit, nn.Module] | None = None
    tried, started, cpu_started = [], time.perf_counter(), time.process_time()
    for seed in recipe.seeds:
        fit, model = train(task, variant, recipe, seed, progress)
        tried.append((seed, fit.valid_score))
        if best is None or fit.valid_score > best[0].valid_score:
            best = fit, model
        if fit.valid_score >= recipe.solved:
            break
    assert best is not None, "a recipe has at least one seed"
    fit, model = best
    fit.tried = tried
    for length in lengths_measured(task):
        fit.scores[length] = score(task, model, length, recipe.test_sequences, TEST_SEED + length)
    fit.seconds = round(time.perf_counter() - started, 1)
    fit.cpu_seconds = round(time.process_time() - cpu_started, 1)
    return fit


def train(task: Task, variant: Variant, recipe: Recipe, seed: int, progress: Progress) -> tuple[Fit, nn.Module]:
    model = variant.build(task, recipe.d_model, seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    fit = Fit(task=task.name, variant=variant.name, seed=seed, parameters=parameters, recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate)
    rng, losses = random.Random(seed), []
    for step in range(recipe.steps):
        longest = recipe.longest(task, step)
        length = rng.randint(max(longest // 2, task.lengths[0]), longest)
        ids_bs, targets_bs = task.generate(max(recipe.tokens // longest, 1), length, rng)
        logits_bsw = model(ids_bs)[0][..., : task.classes]
        loss = F.cross_entropy(logits_bsw.flatten(0, 1), targets_bs.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        progress(step + 1, losses[-1])
    part = -(-len(losses) // 100)
    fit.losses = [round(mean(losses[i : i + part]), 5) for i in range(0, len(losses), part)]
    fit.valid_score = score(task, model, task.valid_length, recipe.test_sequences, CHOICE_SEED)
    return fit, model


@torch.no_grad()
def score(task: Task, model: nn.Module, length: int, sequences: int, seed: int) -> float:
    """Scaled accuracy in per cent."""
    rng, right, count = random.Random(seed), 0, 0
    for start in range(0, sequences, 64):
        ids_bs, targets_bs = task.generate(min(64, sequences - start), length, rng)
        answers_bs = model(ids_bs)[0][..., : task.classes].argmax(-1)
        scored_bs = task.scored(targets_bs)
        right += int((answers_bs == targets_bs)[scored_bs].sum())
        count += int(scored_bs.sum())
    return round(task.scaled(right / count), 2)


def lengths_measured(task: Task) -> list[int]:
    """A quarter of the longest in training, that one, the validation's and the test's."""
    longest = task.lengths[2]
    return sorted({longest // 4, longest, task.valid_length, task.test_length})


@contextmanager
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread, and sums come out the same on every machine with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
