"""What experiments leave behind: a table on the terminal, a JSON file, pictures."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from mambakit.optional import need
from mambakit.tools.experiments.fitting import Fit
from mambakit.tools.experiments.recipe import Recipe
from mambakit.tools.experiments.state_tracking import COMPARED, paper_figure
from mambakit.tools.experiments.tasks import TASKS
from mambakit.tools.experiments.variants import VARIANTS

FILES = ("results.json", "state-tracking.png", "training.png")
Row = dict[str, Any]
"""A `Fit` as JSON knows it."""


def load_rows(path: Path) -> list[Row]:
    """The rows of an earlier run, none if there was none."""
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text("utf-8"))["rows"]
        return [with_trial(row) for row in rows if row["variant"] in COMPARED[row["task"]]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of this experiment; move it away or choose another --out") from error


def with_trial(row: Row) -> Row:
    """Rows written before there were widths and rates to choose from name a seed only."""
    if "seed" in row:
        row = {**row, "taken": str(row["seed"]), "tried": [[str(seed), score] for seed, score in row["tried"]]}
    return row


def save_rows(path: Path, rows: Sequence[Row]) -> None:
    document = {"metric": METRIC, "torch": torch.__version__, "threads": 1, "rows": list(rows)}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    os.replace(part, path)


METRIC = "scaled accuracy in per cent: 0 is guessing, 100 is no error"


def as_row(fit: Fit) -> Row:
    """As it is read back: JSON turns keys into strings and tuples into lists."""
    return json.loads(json.dumps(fit.to_dict()))


def has(rows: Sequence[Row], task: str, variant: str, recipe: Recipe) -> bool:
    wanted = (task, variant, json.loads(json.dumps(recipe.to_dict())))
    return any((row["task"], row["variant"], row["recipe"]) == wanted for row in rows)


def merge(rows: Sequence[Row], new: Row) -> list[Row]:
    """With the new row in place of an older one of the same task and variant, in the order of the tables."""
    by_name = {(row["task"], row["variant"]): row for row in (*rows, new)}
    order = [(task, variant) for task, variants in COMPARED.items() for variant in variants]
    return [by_name[name] for name in order if name in by_name]


def table(rows: Sequence[Row]) -> Any:
    """A rich table with the paper's figures beside ours."""
    made = Table(title=f"State tracking: {METRIC}")
    for title in ("task", "model"):
        made.add_column(title)
    for title in ("paper", "ours", "as trained", "steps", "seed", "CPU min"):
        made.add_column(title, justify="right")
    for last, row in enumerate(rows, 1):
        task = TASKS[row["task"]]
        paper = paper_figure(row["task"], row["variant"])
        made.add_row(
            task.title,
            VARIANTS[row["variant"]].title,
            "" if paper is None else f"{paper:.1f}",
            f"{score_at(row, task.test_length):.1f} at {task.test_length}",
            f"{score_at(row, task.lengths[2]):.1f} at {task.lengths[2]}",
            str(row["recipe"]["steps"]),
            tried(row),
            f"{row['cpu_seconds'] / 60:.1f}",
            end_section=last < len(rows) and rows[last]["task"] != row["task"],
        )
    return made


def tried(row: Row) -> str:
    """The trial that was taken, and in brackets the others, or how many they were."""
    taken, others = row["taken"], [name for name, _ in row["tried"] if name != row["taken"]]
    if len(others) > 3:
        return f"{taken} (of {len(others) + 1})"
    return ", ".join(f"({name})" if name != taken else name for name, _ in row["tried"])


def score_at(row: Row, length: int) -> float:
    return {int(known): score for known, score in row["scores"].items()}[length]


def plot(rows: Sequence[Row], path: Path) -> None:
    """One panel per task: scaled accuracy against length, a line per model."""
    tasks = [task for task in COMPARED if any(row["task"] == task for row in rows)]
    figure = need("the picture", "matplotlib.figure").Figure(
        figsize=(3.6 * len(tasks) + 0.6, 3.6), layout="constrained"
    )
    for column, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), column + 1)
        for row in (row for row in rows if row["task"] == task):
            points = sorted((int(length), score) for length, score in row["scores"].items())
            axes.plot(*zip(*points, strict=True), marker="o", label=VARIANTS[row["variant"]].title)
        longest = TASKS[task].lengths[2]
        axes.axvspan(0, longest, color="0.93", zorder=0)
        axes.set(title=TASKS[task].title, xlabel="length (grey: trained)", ylim=(-12, 105), xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.axes[0].set_ylabel("scaled accuracy, %")
    figure.savefig(path, dpi=130)


def plot_training(rows: Sequence[Row], path: Path) -> None:
    """How a training went: losses, and the longest length there was, over the steps. A line per row that has both."""
    rows = [row for row in rows if row.get("lengths")]
    figure = need("the picture", "matplotlib.figure").Figure(figsize=(7.8, 3.6), layout="constrained")
    for column, name in enumerate(("losses", "lengths")):
        axes = figure.add_subplot(1, 2, column + 1)
        for row in rows:
            steps, count = row["recipe"]["steps"], len(row[name])
            over = [steps * (part + 1) / count for part in range(count)]
            axes.plot(over, row[name], label=f"{TASKS[row['task']].title}: {VARIANTS[row['variant']].title}")
        axes.set(xlabel="step", yscale="log", title={"losses": "loss", "lengths": "longest length"}[name])
        axes.grid(alpha=0.3)
    figure.axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=130)
