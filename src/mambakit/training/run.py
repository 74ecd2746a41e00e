"""A run in its folder: it goes on from its last checkpoint, logs, evaluates, saves, and stops when asked."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from mambakit.checkpoints import save_model
from mambakit.text.tokens import Tokens
from mambakit.training.loop import Step, Trainer
from mambakit.training.run_checkpoints import RunCheckpoints

CHECKPOINTS, LOG, MODEL = "checkpoints", "log.jsonl", "model"


class Watch(Protocol):
    """Who is told how a run goes."""

    def step(self, step: Step) -> None: ...

    def evaluation(self, step: int, bits_per_byte: float) -> None: ...

    def note(self, text: str) -> None: ...


class Log:
    """A JSON object per line, those of the steps in order. Going on from a step, what came after it is dropped."""

    def __init__(self, path: Path, step: int):
        kept = [line for line in read_log(path) if line["step"] <= step]
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(fresh, path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # closed by `close`

    def write(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last may have been cut short."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def train(trainer: Trainer, folder: Path, tokens: Tokens, watch: Watch) -> float:
    """Bring the run in `folder` to its last step and save the model; bits per byte of all held-out documents.

    It goes on from the newest whole checkpoint, and starts anew where there is none. Asked to stop (Ctrl-C), it
    finishes the step, saves and raises KeyboardInterrupt. An OSError while saving names the last checkpoint.
    """
    checkpoints = RunCheckpoints(folder / CHECKPOINTS)
    resume(trainer, checkpoints, watch)
    first = trainer.ranks.is_first
    log = Log(folder / LOG, trainer.step) if first else None
    settings = trainer.settings
    final = None
    try:
        with stopping(trainer):
            while trainer.step < settings.steps:
                step = trainer.advance()
                is_last = step.number == settings.steps
                if log and step.skipped is not None:
                    log.write(step=step.number, skipped=step.skipped)
                    watch.note(f"skipped: {step.skipped}")
                elif log:
                    log.write(step=step.number, loss=step.loss, lr=step.lr, norm=step.norm)
                    watch.step(step)
                if is_last or step.number % settings.evaluate_every == 0:
                    final = trainer.evaluate(None if is_last else settings.evaluate_bytes)
                    if log:
                        log.write(step=step.number, bits_per_byte=final)
                        watch.evaluation(step.number, final)
                if is_last or step.stop or step.number % settings.save_every == 0:
                    save(trainer, checkpoints)
                if step.stop and not is_last:
                    export(trainer, folder, tokens)
                    if first:
                        watch.note(f"stopped after step {step.number}; saved, --resume goes on from there")
                    raise KeyboardInterrupt
        export(trainer, folder, tokens)
    finally:
        if log:
            log.close()
    return trainer.evaluate() if final is None else final


def resume(trainer: Trainer, checkpoints: RunCheckpoints, watch: Watch) -> None:
    """Go on from the newest whole checkpoint, if there is one."""
    if trainer.ranks.is_first:
        checkpoints.clear_unfinished()
    saved = checkpoints.newest()
    if trainer.ranks.is_first:
        for note in checkpoints.notes:
            watch.note(note)
    if saved is not None:
        trainer.restore(saved)
        if trainer.ranks.is_first:
            watch.note(f"going on from step {saved.step}")


def save(trainer: Trainer, checkpoints: RunCheckpoints) -> None:
    """A checkpoint by the first rank. If that fails, it fails on every rank."""
    saved = trainer.saved()
    problem = None
    if trainer.ranks.is_first:
        try:
            checkpoints.save(saved)
        except OSError as error:
            problem = error
    problem = trainer.ranks.share(problem)
    if problem is not None:
        known = checkpoints.steps()
        last = f"the last checkpoint is that of step {known[-1]}" if known else "there is no checkpoint yet"
        raise OSError(f"step {saved.step} could not be saved in {checkpoints.folder}: {problem}; {last}") from problem


def export(trainer: Trainer, folder: Path, tokens: Tokens) -> None:
    """The model as an ordinary checkpoint in `folder/model`, with how its text is written in tokens."""
    model = trainer.whole_model()
    if trainer.ranks.is_first:
        save_model(model, folder / MODEL)
        tokens.save(folder / MODEL)


@contextmanager
def stopping(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C and the polite kill ask the trainer to stop after its step; the second time they stop it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if trainer.stop_asked:
            raise KeyboardInterrupt
        trainer.stop_asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
