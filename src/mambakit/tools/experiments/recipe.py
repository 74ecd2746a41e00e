"""How long, how large and with which lengths a task is trained: the three budgets are made of these."""

import math
import random
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

from mambakit.blocks.config import check_positive
from mambakit.tools.experiments.tasks import Task

CURRICULA = ("factors", "mastery", "linear")


class Trial(NamedTuple):
    """One training of a search."""

    d_model: int
    learning_rate: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    steps: int
    tokens: int = 1280
    """Per step: short sequences come in larger batches."""
    sequences: int | None = None
    """Per step, whatever their length, instead of `tokens`."""
    n_layer: int | None = None
    """Instead of the task's own."""
    d_models: tuple[int, ...] = (64,)
    state_rank: int = 64
    per_head_dim: int = 32
    dt_range: tuple[float, float] = (1e-3, 0.1)
    """Of the step sizes that the blocks start with; a rotation turns by at most half a turn per unit of it."""
    learning_rates: tuple[float, ...] = (3e-3,)
    warmup: int = 100
    held: float = 0.0
    """Share of the steps at the full rate, before it falls to zero by a cosine."""
    curriculum: str = "factors"
    """`Lengths` says what each is."""
    first: int | None = None
    """The longest length at the start, instead of the task's own."""
    mastered: float = 0.95
    """The accuracy at the longest length with which "mastery" goes on to longer ones."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Trials with each width and rate go on until one has learned the task at the validation length; else the best."""
    solved: float = 99.5
    """The scaled accuracy there that ends the search."""
    test_sequences: int = 1024

    def __post_init__(self) -> None:
        check_positive(self, "steps", "tokens", "test_sequences")
        for name in ("seeds", "d_models", "learning_rates"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one")
        if self.curriculum not in CURRICULA:
            raise ValueError(f"curriculum {self.curriculum!r} is unknown; choose from {', '.join(CURRICULA)}")

    @property
    def trials(self) -> list[Trial]:
        return [Trial(*found) for found in product(self.d_models, self.learning_rates, self.seeds)]

    def called(self, trial: Trial) -> str:
        """What tells it from the others of this recipe."""
        told = f"{trial.seed}"
        if len(self.d_models) * len(self.learning_rates) > 1:
            told = f"width {trial.d_model}, rate {trial.learning_rate:.1e}, seed {told}"
        return told

    def rate(self, step: int) -> float:
        """Linear warm-up, the full rate for a while, then a cosine to zero."""
        held = self.held * self.steps
        falling = max(step - held, 0) / (self.steps - held)
        return min(1, (step + 1) / self.warmup) * (0.5 + 0.5 * math.cos(math.pi * falling))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Lengths:
    """A training's curriculum, by its recipe's word for it.

    "factors": the longest length grows by equal factors, and reaches the last at 7 tenths of the way; a step's lies
    between half of it and all of it. A rotation has to be twice as exact for twice the length; so it is never asked for
    more than a little more.

    "mastery": it grows by a seventh whenever the running accuracy at the longest length is good enough; every other
    step is of that length, the others of any below.

    "linear": it grows by equal steps to the end; a step's length is any.
    """

    FACTOR, MEMORY = 8 / 7, 0.9

    def __init__(self, task: Task, recipe: Recipe):
        self.task, self.recipe = task, recipe
        self.first = recipe.first or task.lengths[1]
        self.grown = float(self.first)
        """Of "mastery": the longest length, not yet rounded down."""
        self.accuracy = 0.0

    def longest(self, step: int) -> int:
        last, done = self.task.lengths[2], step / self.recipe.steps
        if self.recipe.curriculum == "factors":
            return round(self.first * (last / self.first) ** min(done / 0.7, 1))
        if self.recipe.curriculum == "linear":
            return round(self.first + (last - self.first) * done)
        return int(self.grown)

    def draw(self, step: int, rng: random.Random) -> tuple[int, int]:
        """How many sequences of which length."""
        longest, shortest = self.longest(step), self.task.lengths[0]
        if self.recipe.curriculum == "factors":
            length, counted = rng.randint(max(longest // 2, shortest), longest), longest
        elif self.recipe.curriculum == "mastery" and rng.random() < 0.5:
            length = counted = longest
        else:
            length = counted = rng.randint(shortest, longest)
        return self.recipe.sequences or max(self.recipe.tokens // counted, 1), length

    def learn(self, length: int, accuracy: float) -> None:
        """After a step with answers this good."""
        if self.recipe.curriculum != "mastery" or length != int(self.grown):
            return
        self.accuracy = self.MEMORY * self.accuracy + (1 - self.MEMORY) * accuracy
        if self.accuracy > self.recipe.mastered:
            self.grown = min(max(self.grown * self.FACTOR, self.grown + 1), self.task.lengths[2])
            # To be shown again at the new length.
            self.accuracy = self.recipe.mastered - 0.05

    def state(self) -> dict[str, float]:
        return {"grown": self.grown, "accuracy": self.accuracy}

    def restore(self, state: dict[str, float]) -> None:
        self.grown, self.accuracy = state["grown"], state["accuracy"]
