"""Checkpoints of a run: written whole or not at all, checked when read, the last two kept.

A checkpoint is a folder `step-N` with what was saved and the checksums of its files, as `sha256sum` writes them. It is
written under another name, brought to the disk and then renamed, so whatever stops a run leaves the ones before intact.
One process writes one file. Of several each writes what it has, and any number of them can read that.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from mambakit.blocks import caches
from mambakit.checkpoints.writing import sync, write_pickle
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.parallel.pieces import Pieces
from mambakit.training.processes import Ranks
from mambakit.training.shares import METADATA, MODEL, Stored, write_shares

STATE, CARRIED, SHARES, SUMS = "state.pt", "carried*.safetensors", "shares", "sha256"
NAME = re.compile(r"step-(\d{9})")
KEPT = 2


class Saved(NamedTuple):
    step: int
    state: dict[str, Any]
    """Tensors, numbers and strings by name."""
    carried: Any
    """The cache of every row of the batch; None if states have not begun."""
    shares: Stored | None = None
    """Where the model and the optimizers are, if not in `state`."""


class Part(NamedTuple):
    """What one of several ranks writes of a checkpoint."""

    step: int
    state: dict[str, Any]
    """Written by the first rank."""
    shares: dict[str, Pieces]
    carried: Any
    """The cache of this rank's rows; None if states have not begun, or if a rank before it writes the same."""
    rows: tuple[int, int]
    """Which of so many parts of the batch these rows are."""


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
        fresh = self._begin(saved.step)
        if fresh is None:
            return
        with _removed_on_failure(fresh):
            write_pickle(saved.state, fresh / STATE)
            if saved.carried is not None:
                caches.save(saved.carried, fresh / CARRIED.replace("*", ""))
            self._finish(saved.step, fresh, {path.name: _sha256(path) for path in fresh.iterdir()})

    def save_part(self, part: Part, ranks: Ranks) -> None:
        """The same by all ranks, each with its part. If that fails on one, it fails on every rank."""
        first = ranks.is_first
        fresh = ranks.agree(lambda: self._begin(part.step) if first else None)[0]
        if fresh is None:
            return
        with _removed_on_failure(fresh) if first else nullcontext():
            found = ranks.agree(lambda: self._write(part, fresh, ranks))
            sums = {name: digest for own in found for name, digest in own.items()}
            ranks.agree(lambda: self._finish(part.step, fresh, sums) if first else None)

    def _write(self, part: Part, fresh: Path, ranks: Ranks) -> dict[str, str]:
        """The checksums of what this rank has written."""
        write_shares(part.shares, fresh / SHARES, ranks.aside())
        written = list((fresh / SHARES).glob(f"__{ranks.rank}_*"))
        if part.carried is not None:
            written.append(fresh / CARRIED.replace("*", f"-{part.rows[0] + 1:05}-of-{part.rows[1]:05}"))
            caches.save(part.carried, written[-1])
        if ranks.is_first:
            written += [fresh / STATE, fresh / SHARES / METADATA]
            write_pickle(part.state, fresh / STATE)
        for path in written:
            sync(path)
        return {path.relative_to(fresh).as_posix(): _sha256(path) for path in written}

    def _begin(self, step: int) -> Path | None:
        """A folder to write into; None if the checkpoint is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self._path(step)
        if target.exists():
            if self._problem(target) is None:
                return None
            shutil.rmtree(target)
        fresh = self.folder / f".{target.name}.{uuid4().hex}.tmp"
        fresh.mkdir()
        return fresh

    def _finish(self, step: int, fresh: Path, sums: dict[str, str]) -> None:
        (fresh / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)), encoding="ascii")
        for path in [*fresh.rglob("*"), fresh]:
            sync(path)
        os.rename(fresh, self._path(step))
        sync(self.folder)
        for old in self.steps()[:-KEPT]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def newest(self, ranks: Ranks | None = None) -> Saved | None:
        """The last whole checkpoint, with `notes` of newer ones that are damaged; None if there is no checkpoint.

        Damaged ones only raise ValueError. Of several ranks, which all have to ask, each checks some of the files.
        """
        self.notes = []
        for step in reversed(self.steps()):
            path = self._path(step)
            problem = self._problem(path, ranks)
            if problem is None:
                return read(path)
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

    def _problem(self, path: Path, ranks: Ranks | None = None) -> str | None:
        """Why a checkpoint cannot be used."""
        rank, world = (0, 1) if ranks is None else (ranks.rank, ranks.world)
        try:
            lines = (path / SUMS).read_text("ascii").splitlines()
            sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
            files = {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}
            if STATE not in sums or sums.keys() != files - {SUMS}:
                found = f"{SUMS} does not name the files that are there"
            else:
                wrong = [name for name in sorted(sums)[rank::world] if _sha256(path / name) != sums[name]]
                found = f"{', '.join(wrong)} is not what was written" if wrong else None
        except (OSError, ValueError) as error:
            found = str(error)
        return found if ranks is None else next(filter(None, ranks.gather(found)), None)


def read(path: Path) -> Saved:
    """A checkpoint that is known to be whole."""
    number = NAME.fullmatch(path.name)
    state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    carried = [caches.load(part) for part in sorted(path.glob(CARRIED))]
    shares = Stored(path / SHARES) if (path / SHARES).is_dir() else None
    return Saved(int(number[1]) if number else 0, state, caches.concat(carried) if carried else None, shares)


def is_checkpoint(path: Path) -> bool:
    """Whether it is a folder that a run saved itself in."""
    return NAME.fullmatch(path.name) is not None and (path / SUMS).is_file() and (path / STATE).is_file()


def model_of(path: Path) -> LanguageModel:
    """The model of a run's checkpoint; ValueError if that is damaged or holds no whole model."""
    if problem := RunCheckpoints(path.parent)._problem(path):
        raise ValueError(f"{path} is damaged ({problem})")
    saved = read(path)
    if "config" not in saved.state:
        raise ValueError(f"{path} does not say what its model is like; a run that is resumed writes ones that do")
    weights = saved.state["model"] if saved.shares is None else saved.shares.whole(MODEL)
    model = LanguageModel(ModelConfig.from_dict(saved.state["config"]))
    parameters = dict(model.named_parameters())
    if weights.keys() != parameters.keys():
        raise ValueError(f"{path} holds an adapter alone; the end of its run saves it, and the model merged with it")
    model.to(next(iter(weights.values())).dtype)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
