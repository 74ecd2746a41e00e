"""`mambakit experiment`: small trainings that show what the blocks can and cannot do."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich import progress as rich
from rich.console import Console

from mambakit.optional import need
from mambakit.tools.experiments import report, state_tracking
from mambakit.tools.experiments.fitting import Progress, search
from mambakit.tools.experiments.interrupted import Interrupted, path_of
from mambakit.tools.experiments.recipe import Recipe
from mambakit.tools.experiments.tasks import TASKS, Task
from mambakit.tools.experiments.variants import VARIANTS, Variant

EXAMPLE = "mambakit experiment state-tracking --quick --out runs/state-tracking"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True)
    tracking = kinds.add_parser(
        "state-tracking",
        help="parity, modular arithmetic, words in A5, associative recall",
        description="Train small models on short sequences, measure them on longer ones, beside the Mamba-3 paper.",
        allow_abbrev=False,
    )
    tracking.add_argument("--task", nargs="+", metavar="TASK", help=f"of {', '.join(TASKS)}; default: all of them")
    tracking.add_argument("--variant", nargs="+", metavar="MODEL", help=f"of {', '.join(VARIANTS)}; default: all")
    tracking.add_argument("--steps", type=int, help="training steps instead of each task's own")
    tracking.add_argument("--seeds", type=int, nargs="+", help="tried in order until one has learned the task")
    tracking.add_argument("--sequences", type=int, help="to measure on, at each length (default: 1024)")
    tracking.add_argument(
        "--paper", action="store_true", help="the paper's steps, sizes and sweep: many hours; stop and --resume at will"
    )
    tracking.add_argument("--resume", action="store_true", help="go on with what was stopped; keep rows that are done")
    digits = kinds.add_parser(
        "digits",
        help="handwritten digits read pixel by pixel: a classifier and an autoencoder",
        description="Train a classifier and a bidirectional autoencoder on scikit-learn's 8 by 8 digits.",
        allow_abbrev=False,
    )
    digits.add_argument("--epochs", type=int, help="passes over the training digits")
    digits.add_argument("--seed", type=int, default=0)
    for kind, name in ((tracking, "state-tracking"), (digits, "digits")):
        quick = f"a few minutes; only {', '.join(state_tracking.QUICK_TASKS)} unless --task says more"
        kind.add_argument("--quick", action="store_true", help=quick if kind is tracking else "a minute or two")
        kind.add_argument("--out", type=Path, default=Path("runs") / name, help="folder (default: %(default)s)")
        kind.add_argument("--json", action="store_true", help="results on standard output, all else on standard error")


def run(args: argparse.Namespace) -> None:
    need("an experiment", "matplotlib", *(["sklearn"] if args.experiment == "digits" else []))
    stream = sys.stderr if args.json else sys.stdout
    # A file or a pipe has no width; the table has one.
    console = Console(file=stream, width=None if stream.isatty() else 100)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.experiment == "digits":
        run_digits(args, console)
    else:
        run_state_tracking(args, console)


def run_state_tracking(args: argparse.Namespace, console: Any) -> None:
    """Rows of earlier runs in the same folder stay in the table, so tasks can be run one by one."""
    if args.quick and args.paper:
        raise ValueError("--quick and --paper are two budgets; choose one")
    budget = "quick" if args.quick else "paper" if args.paper else "full"
    tasks = state_tracking.chosen(args.task or state_tracking.budget_tasks(budget), tuple(TASKS), "task")
    variants = state_tracking.chosen(args.variant, tuple(VARIANTS), "model") if args.variant else None
    todo = state_tracking.pairs(tasks, variants)
    seeds = tuple(args.seeds) if args.seeds else None
    recipes = state_tracking.recipes(budget, steps=args.steps, seeds=seeds, test_sequences=args.sequences)
    results, picture, training = (args.out / name for name in report.FILES)
    rows = report.load_rows(results)
    with bars() as progress:
        for task, variant in todo:
            recipe = recipes[task.name]
            if args.resume and report.has(rows, task.name, variant.name, recipe):
                continue
            path = path_of(args.out / "stopped", task.name, variant.name, recipe.to_dict())
            kept = Interrupted(path, resume=args.resume)
            fit = search(task, variant, recipe, watch(progress, task, variant, recipe), kept)
            rows = report.merge(rows, report.as_row(fit))
            report.save_rows(results, rows)
            kept.remove()
    report.plot(rows, picture)
    report.plot_training(rows, training)
    console.print(report.table(rows))
    console.print(f"written: {results}, {picture}, {training}", soft_wrap=True)
    if args.json:
        print(results.read_text("utf-8"), end="")


def watch(progress: Any, task: Task, variant: Variant, recipe: Recipe) -> Progress:
    """A bar for a search, from the start again with each of its trials."""
    bar = progress.add_task(f"{task.title}: {variant.title}", total=recipe.steps, note="")
    trial = 0

    def tell(step: int, loss: float, longest: int) -> None:
        nonlocal trial
        trial += step == 1
        note = f"loss {loss:.3f}, length {longest}"
        if len(recipe.trials) > 1:
            note += f", {max(trial, 1)} of up to {len(recipe.trials)}"
        progress.update(bar, completed=step, note=note)

    return tell


def run_digits(args: argparse.Namespace, console: Any) -> None:
    from mambakit.tools.experiments import digits

    with bars() as progress:
        bar = progress.add_task("digits", total=None, note="")

        def tell(what: str, step: int, steps: int, loss: float) -> None:
            progress.update(bar, description=what, completed=step, total=steps, note=f"loss {loss:.3f}")

        results = digits.run(args.out, digits.recipe(args.quick, args.epochs, args.seed), tell)
    console.print(digits.table(results))
    console.print(f"written: {', '.join(str(args.out / name) for name in digits.FILES)}", soft_wrap=True)
    if args.json:
        print(json.dumps(results, indent=1))


def bars() -> Any:
    """Progress on standard error, whether or not it is a terminal's."""
    columns = ("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
    return rich.Progress(*columns, "{task.fields[note]}", console=Console(stderr=True))
