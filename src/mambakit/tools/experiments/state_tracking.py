"""Which models are compared on which tasks, how long each is trained, and what the Mamba-3 paper found."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mambakit.tools.experiments.recipe import Recipe
from mambakit.tools.experiments.tasks import TASKS, Task
from mambakit.tools.experiments.variants import VARIANTS, Variant

FAMILY = ("mamba3", "mamba3-fixed", "mamba3-still", "mamba2")
COMPARED = {
    "parity": FAMILY,
    "arithmetic": FAMILY,
    "brackets": FAMILY,
    "a5": ("mamba3", "mamba3-quaternion"),
    "recall": FAMILY,
}

PAPER = {
    "parity": (100.00, 1.56, 2.27, 0.90),
    "arithmetic": (98.51, 20.70, 1.49, 47.81),
    "brackets": (87.75, 2.62, 0.72, 0.88),
}
"""Scaled accuracy in per cent for `FAMILY`: table 5b of "Mamba-3", arXiv 2603.15569, at length 256."""

FULL = {
    "parity": Recipe(steps=1000),
    "arithmetic": Recipe(
        steps=6000,
        n_layer=2,
        tokens=2560,
        d_models=(32,),
        state_rank=16,
        per_head_dim=16,
        dt_range=(0.1, 1.0),
        learning_rates=(1e-2,),
        curriculum="mastery",
        first=5,
        seeds=(0,),
    ),
    "brackets": Recipe(steps=3000, seeds=(0,)),
    "a5": Recipe(steps=3000, seeds=(0,)),
    "recall": Recipe(steps=2000, seeds=(0,)),
}
QUICK_TASKS = ("parity",)
QUICK_STEPS = 1000
AS_THE_PAPER = Recipe(
    steps=10000,
    sequences=256,
    d_models=(32, 64),
    learning_rates=tuple(round(1e-4 * 100 ** (i / 7), 6) for i in range(8)),
    curriculum="linear",
    first=40,
    seeds=(0,),
)
"""Appendix D: state 64, lengths from 3 to 40 at first and 160 at last, the best of two widths and eight rates."""
PAPER_TASKS = tuple(PAPER)
BUDGETS = ("quick", "full", "paper")


def paper_figure(task: str, variant: str) -> float | None:
    return PAPER[task][FAMILY.index(variant)] if task in PAPER and variant in FAMILY else None


def chosen(names: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """The names, in the order in which they are known."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{what} {', '.join(unknown)} is unknown; choose from {', '.join(known)}")
    return [name for name in known if name in names]


def recipes(budget: str, **given: Any) -> dict[str, Recipe]:
    """For each task of `budget_tasks`, or any. Fields that are given, and not None, are the same for all."""
    made = dict(FULL)
    if budget == "quick":
        made = {name: replace(r, steps=min(r.steps, QUICK_STEPS)) for name, r in made.items()}
    elif budget == "paper":
        made = {
            name: replace(AS_THE_PAPER, first=min(AS_THE_PAPER.first or 0, TASKS[name].lengths[2])) for name in made
        }
    given = {name: value for name, value in given.items() if value is not None}
    return {name: replace(r, **given) for name, r in made.items()}


def budget_tasks(budget: str) -> tuple[str, ...]:
    """What is trained where no task is named."""
    return {"quick": QUICK_TASKS, "full": tuple(TASKS), "paper": PAPER_TASKS}[budget]


def pairs(tasks: Sequence[str], variants: Sequence[str] | None) -> list[tuple[Task, Variant]]:
    """What is compared on these tasks, or only these variants of it."""
    found = [
        (TASKS[task], VARIANTS[variant])
        for task in tasks
        for variant in COMPARED[task]
        if variants is None or variant in variants
    ]
    if not found:
        raise ValueError(f"none of {', '.join(variants or ())} is compared on {', '.join(tasks)}")
    return found
