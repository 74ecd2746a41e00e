"""Train a variant on a task, short sequences first, and measure it on longer ones than it has seen."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mambakit.tools.experiments.interrupted import Interrupted
from mambakit.tools.experiments.recipe import Lengths, Recipe, Trial
from mambakit.tools.experiments.tasks import Task
from mambakit.tools.experiments.variants import Variant

Progress = Callable[[int, float, int], None]
"""Called after every step with how many there were, the loss and the longest length."""

TEST_SEED, CHOICE_SEED = 2**40, 2**41
"""Far from the seeds of trainings, so that no test sequence was trained on, nor one a run was chosen by."""


@dataclass(kw_only=True)
class Fit:
    """One trained model. Scores are scaled accuracies in per cent: see `Task.scaled`."""

    task: str
    variant: str
    trial: Trial
    parameters: int
    recipe: Recipe
    seconds: float = 0.0
    """All trials and the measuring, by the clock."""
    cpu_seconds: float = 0.0
    """The same, of this process alone: what the clock would show on a machine with nothing else to do."""
    losses: list[float] = field(default_factory=list)
    """Mean losses of the parts of the training, at most 100 parts."""
    lengths: list[int] = field(default_factory=list)
    """The longest length at the end of each of these parts."""
    valid_score: float = 0.0
    """At the task's validation length, on sequences used for nothing else; runs are chosen by this one."""
    scores: dict[int, float] = field(default_factory=dict)
    """By length; the task's test length is the one in the table."""
    tried: list[tuple[str, float]] = field(default_factory=list)
    """Trials by `Recipe.called` and their `valid_score`, this one included."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "taken": self.recipe.called(self.trial)}


def search(task: Task, variant: Variant, recipe: Recipe, progress: Progress, kept: Interrupted | None = None) -> Fit:
    """The fit to report: chosen among trials at the validation length, and only then measured on the test.

    What `kept` has from before an interruption is not done again; the result is the same.
    """
    with one_thread():
        return _search(task, variant, recipe, progress, kept or Interrupted())


def _search(task: Task, variant: Variant, recipe: Recipe, progress: Progress, kept: Interrupted) -> Fit:
    best: tuple[Fit, nn.Module] | None = None
    if kept.best is not None:
        best = begin(task, variant, recipe, recipe.trials[kept.best["trial"]])
        best[0].losses, best[0].lengths, best[0].valid_score = kept.best["found"]
        best[1].load_state_dict(kept.best["weights"])
    for number, trial in enumerate(recipe.trials):
        if number < len(kept.tried):
            continue
        if best is not None and best[0].valid_score >= recipe.solved:
            break
        fit, model = train(task, variant, recipe, trial, progress, kept)
        kept.tried.append((recipe.called(trial), fit.valid_score))
        kept.training = None
        if best is None or fit.valid_score > best[0].valid_score:
            best = fit, model
            if kept.path is not None:
                found = (fit.losses, fit.lengths, fit.valid_score)
                kept.best = {"trial": number, "found": found, "weights": model.state_dict()}
        kept.write()
    assert best is not None, "a recipe has at least one trial"
    fit, model = best
    fit.tried = kept.tried
    for length in lengths_measured(task):
        fit.scores[length] = score(task, model, length, recipe.test_sequences, TEST_SEED + length)
    fit.seconds, fit.cpu_seconds = (round(seconds, 1) for seconds in kept.clocks())
    return fit


def begin(task: Task, variant: Variant, recipe: Recipe, trial: Trial) -> tuple[Fit, nn.Module]:
    """Before the first step."""
    model = variant.build(task, recipe, trial.d_model, trial.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Fit(task=task.name, variant=variant.name, trial=trial, parameters=parameters, recipe=recipe), model


def train(
    task: Task, variant: Variant, recipe: Recipe, trial: Trial, progress: Progress, kept: Interrupted
) -> tuple[Fit, nn.Module]:
    fit, model = begin(task, variant, recipe, trial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    rng, lengths = random.Random(trial.seed), Lengths(task, recipe)
    losses: list[float] = []
    longest: list[int] = []
    if kept.training is not None:
        model.load_state_dict(kept.training["model"])
        optimizer.load_state_dict(kept.training["optimizer"])
        version, numbers, gauss = kept.training["rng"]
        rng.setstate((version, tuple(numbers), gauss))
        lengths.restore(kept.training["lengths"])
        losses, longest = list(kept.training["losses"]), list(kept.training["longest"])
    for step in range(len(losses), recipe.steps):
        optimizer.param_groups[0]["lr"] = trial.learning_rate * recipe.rate(step)
        count, length = lengths.draw(step, rng)
        ids_bs, targets_bs = task.generate(count, length, rng)
        logits_bsw = model(ids_bs)[0][..., : task.classes]
        loss = F.cross_entropy(logits_bsw.flatten(0, 1), targets_bs.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scored_bs = task.scored(targets_bs)
        lengths.learn(length, (logits_bsw.argmax(-1) == targets_bs)[scored_bs].float().mean().item())
        losses.append(loss.item())
        longest.append(lengths.longest(step))
        if kept.due():
            kept.training = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": rng.getstate(),
                "lengths": lengths.state(),
                "losses": losses,
                "longest": longest,
            }
            kept.write()
        progress(step + 1, losses[-1], longest[-1])
    part = -(-len(losses) // 100)
    fit.losses = [round(mean(losses[i : i + part]), 5) for i in range(0, len(losses), part)]
    fit.lengths = [max(longest[i : i + part]) for i in range(0, len(losses), part)]
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
