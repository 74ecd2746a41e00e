"""A run in its folder: it goes on from its last checkpoint, logs, evaluates, saves, and stops when asked."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from mambakit.checkpoints import save_model
from mambakit.text.tokens import Tokens
from mambakit.training.lock import alone_in
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
        lines, whole = _read_lines(path)
        self.note = (
            None if whole else f"{path} is damaged in line {len(lines) + 1}; it and the lines after it are dropped"
        )
        """What was found damaged."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".tmp")
        kept = [line for line in lines if line["step"] <= step]
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(fresh, path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by `close`

    def write(self, **values: Any) -> None:
        line = memoryview((json.dumps(values) + "\n").encode())
        # A disk that is full takes a part, and says so when asked again.
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines up to the first that is damaged; the last may have been cut short."""
    return _read_lines(path)[0]


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """What the lines say, up to the first that is damaged, and whether none is."""
    if not path.exists():
        return [], True
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            values = json.loads(line)
            if type(values["step"]) is not int:
                return found, False
        except (ValueError, LookupError, TypeError, RecursionError):
            return found, False
        found.append(values)
    return found, True


def train(trainer: Trainer, folder: Path, tokens: Tokens, watch: Watch) -> float:
    """Bring the run in `folder` to its last step and save the model; bits per byte of all held-out documents.

    It goes on from the newest whole checkpoint, and starts anew where there is none. Asked to stop (Ctrl-C), it
    finishes the step, saves and raises KeyboardInterrupt. An OSError while saving names the last checkpoint. Another
    run in the folder raises ValueError.
    """
    with alone_in(folder, trainer.ranks):
        return go_on(trainer, folder, tokens, watch)


def go_on(trainer: Trainer, folder: Path, tokens: Tokens, watch: Watch) -> float:
    """`train` for who is alone in the folder already."""
    checkpoints = RunCheckpoints(folder / CHECKPOINTS)
    resume(trainer, checkpoints, watch)
    first = trainer.ranks.is_first
    with on_failure(f"{folder / LOG} could not be written", checkpoints):
        log = Log(folder / LOG, trainer.step) if first else None
    if log and log.note:
        watch.note(log.note)
    settings = trainer.settings
    final = None

    def write(log: Log, **values: Any) -> None:
        with on_failure(f"{folder / LOG} could not be written", checkpoints):
            log.write(**values)

    try:
        with stopping(trainer):
            while trainer.step < settings.steps:
                step = trainer.advance()
                is_last = step.number == settings.steps
                if log and step.skipped is not None:
                    write(log, step=step.number, skipped=step.skipped)
                    watch.note(f"skipped: {step.skipped}")
                elif log:
                    experts = {} if step.balance is None else {"balance": step.balance}
                    write(log, step=step.number, loss=step.loss, lr=step.lr, norm=step.norm, **experts)
                    watch.step(step)
                if is_last or step.number % settings.evaluate_every == 0:
                    final = trainer.evaluate(None if is_last else settings.evaluate_bytes)
                    if log:
                        write(log, step=step.number, bits_per_byte=final)
                        watch.evaluation(step.number, final)
                if is_last or step.stop or step.number % settings.save_every == 0:
                    save(trainer, checkpoints)
                if step.stop and not is_last:
                    export(trainer, folder, tokens, checkpoints)
                    if first:
                        watch.note(f"stopped after step {step.number}; saved, --resume goes on from there")
                    raise KeyboardInterrupt
        export(trainer, folder, tokens, checkpoints)
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
    with on_failure(f"step {saved.step} could not be saved in {checkpoints.folder}", checkpoints):
        if problem is not None:
            raise problem


@contextmanager
def on_failure(told: str, checkpoints: RunCheckpoints) -> Iterator[None]:
    """Make an OSError say what could not be done and which checkpoint is there."""
    try:
        yield
    except OSError as error:
        known = checkpoints.steps()
        last = f"the last checkpoint is that of step {known[-1]}" if known else "there is no checkpoint yet"
        raise OSError(f"{told}: {error}; {last}") from error


def export(trainer: Trainer, folder: Path, tokens: Tokens, checkpoints: RunCheckpoints) -> None:
    """The model as an ordinary checkpoint in `folder/model`, with how its text is written in tokens."""
    model = trainer.whole_model()
    if not trainer.ranks.is_first:
        return
    with on_failure(f"the model could not be saved in {folder / MODEL}", checkpoints):
        save_model(model, folder / MODEL)
        tokens.save(folder / MODEL)
        # What runs left that were killed here.
        for kind in ("tmp", "old"):
            for path in folder.glob(f".{MODEL}.*.{kind}"):
                shutil.rmtree(path, ignore_errors=True)


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
