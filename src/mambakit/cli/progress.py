"""How a training run is shown: a moving line in a terminal, plain lines elsewhere, and TensorBoard's log."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mambakit.training.loop import Step
from mambakit.training.run import Watch
from mambakit.training.settings import TrainSettings

SECONDS_BETWEEN_LINES = 10.0


class Pace:
    """Tokens per second and time left, from the steps alone: evaluations and saving come between them."""

    def __init__(self, settings: TrainSettings):
        self._settings = settings
        self._seconds_per_step: float | None = None
        self._tokens_per_step = 0.0
        self._ranks = int(os.environ.get("WORLD_SIZE", 1))
        self._since = time.perf_counter()

    def step(self, step: Step) -> tuple[float, float]:
        """Tokens per second, and the seconds that the steps after this one will take."""
        now = time.perf_counter()
        took, self._since = now - self._since, now
        before = took if self._seconds_per_step is None else self._seconds_per_step
        self._seconds_per_step = 0.95 * before + 0.05 * took
        tokens = step.tokens * self._ranks
        # Rows of examples are of several lengths.
        self._tokens_per_step = 0.95 * (self._tokens_per_step or tokens) + 0.05 * tokens
        left = (self._settings.steps - step.number) * self._seconds_per_step
        return self._tokens_per_step / self._seconds_per_step, left

    def pause(self) -> None:
        self._since = time.perf_counter()


class Lines:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, settings: TrainSettings, bits_per_nat: float | None):
        self._settings, self._bits = settings, bits_per_nat
        self._pace = Pace(settings)
        self._shown = time.perf_counter()

    def step(self, step: Step) -> None:
        rate, left = self._pace.step(step)
        now = time.perf_counter()
        if step.number in (1, self._settings.steps) or now - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = now
            self._say(
                f"step {step.number}/{self._settings.steps}  {loss_of(step, self._bits)}{balanced(step)}  "
                f"{rate:,.0f} tokens/s  {minutes(left)} left"
            )

    def evaluation(self, step: int, value: float) -> None:
        self._say(f"step {step}/{self._settings.steps}  {held_out(value, self._bits)}")
        self._pace.pause()

    def note(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        pass

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bar:
    """A moving line in a terminal."""

    def __init__(self, settings: TrainSettings, bits_per_nat: float | None):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bits, self._pace = bits_per_nat, Pace(settings)
        self._steps, self._held_out = settings.steps, ""
        columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(), TextColumn("{task.fields[figures]}"))
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("", total=settings.steps, figures="")
        self._progress.start()

    def step(self, step: Step) -> None:
        rate, left = self._pace.step(step)
        figures = (
            f"{loss_of(step, self._bits)}{self._held_out}{balanced(step)}  {rate:,.0f} tokens/s  {minutes(left)} left"
        )
        self._progress.update(self._task, completed=step.number, figures=figures)

    def evaluation(self, step: int, value: float) -> None:
        self._held_out = f" (held-out {value:.3f})"
        self._progress.console.print(f"step {step}: {held_out(value, self._bits)}", highlight=False)
        self._pace.pause()

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._progress.stop()


class TensorBoard:
    """Curves for `tensorboard --logdir`. Going on from a step, what came after it is hidden."""

    def __init__(self, folder: Path, step: int, bits_per_nat: float | None):
        from torch.utils.tensorboard import SummaryWriter

        self._writer, self._bits = SummaryWriter(str(folder), purge_step=step + 1), bits_per_nat

    def step(self, step: Step) -> None:
        self._writer.add_scalar("train/loss", step.loss, step.number)
        if self._bits is not None:
            self._writer.add_scalar("train/bits_per_byte", step.loss * self._bits, step.number)
        self._writer.add_scalar("train/lr", step.lr, step.number)
        self._writer.add_scalar("train/gradient_norm", step.norm, step.number)
        if step.balance is not None:
            self._writer.add_scalar("train/balance", step.balance, step.number)

    def evaluation(self, step: int, value: float) -> None:
        name = "loss_per_answer_token" if self._bits is None else "bits_per_byte"
        self._writer.add_scalar(f"held_out/{name}", value, step)

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        self._writer.close()


class All:
    """Several at once; closed at the end of a `with`."""

    def __init__(self, watches: Sequence[Any]):
        self._watches = watches

    def step(self, step: Step) -> None:
        for watch in self._watches:
            watch.step(step)

    def evaluation(self, step: int, value: float) -> None:
        for watch in self._watches:
            watch.evaluation(step, value)

    def note(self, text: str) -> None:
        for watch in self._watches:
            watch.note(text)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: Any) -> None:
        for watch in self._watches:
            watch.close()


def progress(settings: TrainSettings, bits_per_nat: float | None) -> Lines | Bar:
    """A bar in a terminal, else lines.

    `bits_per_nat` makes bits per byte of text out of a loss; None where answers are learned.
    """
    return (Bar if sys.stderr.isatty() else Lines)(settings, bits_per_nat)


def loss_of(step: Step, bits_per_nat: float | None) -> str:
    return f"loss {step.loss:.3f}" + ("" if bits_per_nat is None else f"  {step.loss * bits_per_nat:.3f} bits/byte")


def held_out(value: float, bits_per_nat: float | None) -> str:
    if bits_per_nat is None:
        return f"held-out answers: loss {value:.3f} per token"
    return f"held-out text: {value:.3f} bits/byte"


def balanced(step: Step) -> str:
    """How evenly experts are used, where there are some: 1 is evenly."""
    return "" if step.balance is None else f"  balance {step.balance:.2f}"


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
