"""What a search has done so far, kept in a file, so that it can be killed at any time and continued."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from mambakit.checkpoints.writing import write_pickle

EVERY = 30.0
"""Seconds between two writings."""


class Interrupted:
    """Without a path nothing is written. The file is gone when the search is done: its row is the result then."""

    def __init__(self, path: Path | None = None, *, resume: bool = True):
        self.path = path
        self.tried: list[tuple[str, float]] = []
        self.best: dict[str, Any] | None = None
        """The fields of its `Fit` that are not the search's own, and its weights."""
        self.training: dict[str, Any] | None = None
        """Of the trial under way: `train` knows its fields."""
        self.before = (0.0, 0.0)
        if path is not None and path.exists():
            found = self.read(path)
            if not resume:
                told = f"{path} is a training that was stopped after {len(found['tried'])} trials"
                raise ValueError(f"{told}; --resume goes on with it, removing the file starts again")
            self.tried = [(name, score) for name, score in found["tried"]]
            self.best, self.training, self.before = found["best"], found["training"], tuple(found["clocks"])
        self.started = (time.perf_counter(), time.process_time())
        self.written = time.perf_counter()

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        try:
            return torch.load(path, weights_only=True)
        except Exception as error:  # torch has no one kind of it
            raise ValueError(f"{path} is damaged ({error}); remove it to start again") from error

    def clocks(self) -> tuple[float, float]:
        """Seconds by the clock and of this process, those before an interruption included."""
        now = (time.perf_counter(), time.process_time())
        wall, cpu = (b + n - s for b, n, s in zip(self.before, now, self.started, strict=True))
        return wall, cpu

    def due(self) -> bool:
        return self.path is not None and time.perf_counter() - self.written > EVERY

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        state = {"tried": self.tried, "best": self.best, "training": self.training, "clocks": self.clocks()}
        write_pickle(state, part)
        os.replace(part, self.path)
        self.written = time.perf_counter()

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def path_of(folder: Path, task: str, variant: str, recipe: dict[str, Any]) -> Path:
    """Other recipes have other files."""
    mark = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]
    return folder / f"{task}-{variant}-{mark}.pt"
