"""Checkpoints of a run: written whole or not at all, checked when read, the last two kept.

A checkpoint is a folder `step-N` with what was saved and the checksums of its files, as `sha256sum` writes them. It is
written under another name, brought to the disk and then renamed, so whatever stops a run leaves the ones before intact.
"""

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from mambakit.blocks import caches
from mambakit.checkpoints.writing import sync, write_pickle

STATE, CARRIED, SUMS = "state.pt", "carried.safetensors", "sha256"
NAME = re.compile(r"step-(\d{9})")
KEPT = 2


class Saved(NamedTuple):
    step: int
    state: dict[str, Any]
    """Tensors, numbers and strings by name."""
    carried: Any
    """The cache of every row of the batch; None if states have not begun."""


class RunCheckpoints:
    def __init__(self, folder: Path):
        self.folder = folder
        self.notes: list[str] = []
        """What was found damaged, a line each."""

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, whole or not, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(found[1]) for path in self.folder.iterdir() if (found := NAME.fullmatch(path.name)))

    def save(self, saved: Saved) -> None:
        """OSError, as when the disk is full, leaves the folder as it was."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self._path(saved.step)
        if target.exists():
            if self._problem(target) is None:
                return
            shutil.rmtree(target)
        fresh = self.folder / f".{target.name}.{uuid4().hex}.tmp"
        fresh.mkdir()
        try:
            write_pickle(saved.state, fresh / STATE)
            if saved.carried is not None:
                caches.save(saved.carried, fresh / CARRIED)
            sums = [f"{_sha256(path)}  {path.name}\n" for path in sorted(fresh.iterdir())]
            (fresh / SUMS).write_text("".join(sums), encoding="ascii")
            for path in [*fresh.iterdir(), fresh]:
                sync(path)
            os.rename(fresh, target)
            sync(self.folder)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        for old in self.steps()[:-KEPT]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def newest(self) -> Saved | None:
        """The last whole checkpoint, with `notes` of newer ones that are damaged; None if there is no checkpoint.

        Damaged ones only raise ValueError.
        """
        self.notes = []
        for step in reversed(self.steps()):
            path = self._path(step)
            problem = self._problem(path)
            if problem is None:
                state = torch.load(path / STATE, map_location="cpu", weights_only=True)
                carried = caches.load(path / CARRIED) if (path / CARRIED).exists() else None
                return Saved(step, state, carried)
            self.notes.append(f"{path} is damaged ({problem}); using the one before")
        if self.notes:
            raise ValueError(f"no whole checkpoint in {self.folder}: {'; '.join(self.notes)}")
        return None

    def clear_unfinished(self) -> None:
        """Remove what a run left that was killed while it wrote."""
        for path in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09}"

    def _problem(self, path: Path) -> str | None:
        """Why a checkpoint cannot be used."""
        try:
            lines = (path / SUMS).read_text("ascii").splitlines()
            sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
            if STATE not in sums or sums.keys() != {file.name for file in path.iterdir()} - {SUMS}:
                return f"{SUMS} does not name the files that are there"
            wrong = [name for name, digest in sums.items() if _sha256(path / name) != digest]
        except (OSError, ValueError) as error:
            return str(error)
        return f"{', '.join(wrong)} is not what was written" if wrong else None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
