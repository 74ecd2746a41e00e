"""A run in its folder: it goes on from its last checkpoint, logs, evaluates, saves, and stops when asked."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from mambakit.checkpoints.adapters import save_lora
from mambakit.checkpoints.files import ADAPTER, MODEL
from mambakit.checkpoints.models import write_model
from mambakit.models.lora import adapters, merge_lora
from mambakit.text.tokens import Tokens, copy_description
from mambakit.training.lock import alone_in
from mambakit.training.loop import Step, Trainer
from mambakit.training.run_checkpoints import RunCheckpoints, Saved
from mambakit.training.saving import Saving, on_failure
from mambakit.training.schedules import share_of_peak
from mambakit.training.settings import TrainSettings

CHECKPOINTS, LOG = "checkpoints", "log.jsonl"


class Keep(NamedTuple):
    """What a run leaves behind."""

    tokens: Tokens
    description: Path | None = None
    """The folder of the tokenizer, which may say more: names, chat template."""
    base: str = ""
    """The model that an adapter is for."""
    merged: bool = True
    """With an adapter, the model that has it in its weights too."""
    aside: bool = False
    """Checkpoints are written while the run goes on."""


class Watch(Protocol):
    """Who is told how a run goes."""

    def step(self, step: Step) -> None: ...

    def evaluation(self, step: int, value: float) -> None:
        """Bits per byte, or what else the held-out data is measured by."""
        ...

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


def train(trainer: Trainer, folder: Path, keep: Tokens | Keep, watch: Watch) -> float:
    """Bring the run in `folder` to its last step and save the model; what `evaluate` says of all that is held out.

    It goes on from the newest whole checkpoint, and starts anew where there is none. Asked to stop (Ctrl-C), it
    finishes the step, saves and raises KeyboardInterrupt. An OSError while saving names the last checkpoint. Another
    run in the folder raises ValueError.
    """
    with alone_in(folder, trainer.ranks):
        return go_on(trainer, folder, keep, watch)


def go_on(trainer: Trainer, folder: Path, keep: Tokens | Keep, watch: Watch) -> float:
    """`train` for who is alone in the folder already."""
    keep = keep if isinstance(keep, Keep) else Keep(keep)
    checkpoints = RunCheckpoints(folder / CHECKPOINTS)
    resume(trainer, checkpoints, watch)
    saving = Saving(trainer, checkpoints, keep.aside)
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
                        write(log, step=step.number, **{trainer.held_out.measure: final})
                        watch.evaluation(step.number, final)
                if is_last or step.stop or step.number % settings.save_every == 0:
                    saving.save()
                if step.stop and not is_last:
                    saving.wait()
                    export(trainer, folder, keep, checkpoints)
                    if first:
                        watch.note(f"stopped after step {step.number}; saved, --resume goes on from there")
                    raise KeyboardInterrupt
        saving.wait()
        export(trainer, folder, keep, checkpoints)
    finally:
        if log:
            log.close()
    return trainer.evaluate() if final is None else final


def resume(trainer: Trainer, checkpoints: RunCheckpoints, watch: Watch) -> None:
    """Go on from the newest whole checkpoint, if there is one."""
    if trainer.ranks.is_first:
        checkpoints.clear_unfinished()
    saved = checkpoints.newest(trainer.ranks)
    if trainer.ranks.is_first:
        for note in checkpoints.notes:
            watch.note(note)
    if saved is not None:
        trainer.restore(saved)
        if trainer.ranks.is_first:
            watch.note(f"going on from step {saved.step}")
            if other := changed_schedule(saved, trainer.settings):
                watch.note(other)


def changed_schedule(saved: Saved, settings: TrainSettings) -> str | None:
    """A line on what another number of steps makes of the learning rate, if the steps so far would have had others."""
    made = replace(settings, steps=saved.state["settings"]["steps"])
    if made == settings or all(share_of_peak(i, made) == share_of_peak(i, settings) for i in range(saved.step)):
        return None
    before, after = (
        settings.lr * share_of_peak(i, one) for i, one in ((max(saved.step - 1, 0), made), (saved.step, settings))
    )
    return (
        f"the {settings.schedule} schedule is now that of {settings.steps} steps: the learning rate goes from "
        f"{before:.3g} to {after:.3g}. The {saved.step} steps before followed that of {made.steps}, so the end is not "
        f"that of a run of {settings.steps} from its start, which --schedule constant would give"
    )


def export(trainer: Trainer, folder: Path, keep: Keep, checkpoints: RunCheckpoints) -> None:
    """What was trained: `folder/adapter` if that is adapters, `folder/model` as an ordinary checkpoint.

    Both say how text is written in tokens.
    """
    model = trainer.whole_model()
    if not trainer.ranks.is_first:
        return

    def describe(place: Path) -> None:
        keep.tokens.save(place)
        if keep.description is not None:
            copy_description(keep.description, place)
        # What runs left that were killed here.
        for kind in ("tmp", "old"):
            for path in folder.glob(f".{place.name}.*.{kind}"):
                shutil.rmtree(path, ignore_errors=True)

    has_adapters = next(adapters(model), None) is not None
    if has_adapters:
        with on_failure(f"the adapter could not be saved in {folder / ADAPTER}", checkpoints):
            save_lora(model, folder / ADAPTER, base=keep.base)
            describe(folder / ADAPTER)
    if not has_adapters or keep.merged:
        with on_failure(f"the model could not be saved in {folder / MODEL}", checkpoints):
            # The run's own folder, whatever has become of the model in it.
            write_model(merge_lora(model) if has_adapters else model, folder / MODEL, "mambakit", None, lambda _: True)
            describe(folder / MODEL)


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
