"""Conversations on disk: parked, resumed, branched and rolled back without reading their past again."""

import hashlib
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from mambakit.arguments import find_path, shown
from mambakit.blocks import caches
from mambakit.checkpoints.writing import sync
from mambakit.inference.fingerprint import checksum
from mambakit.inference.requests import State

KEY = "key"
"""The file in a session's folder that holds its key, and by its time says when the session was last used."""
STATES = ".safetensors"
NAMED = re.compile(r"\d{8,}\.[0-9a-f]{8}" + re.escape(STATES))
UNFINISHED = "unfinished"
"""The folder for what is being written; what lies there for longer than this belongs to nobody any more:"""
UNFINISHED_SECONDS = 600
PIECE = 1 << 20


class Sessions:
    """States in a folder, each under a key of its own, which may be any string.

    A session is a folder with its last `versions` states, a safetensors file each, named by its number and the checksum
    of its content. Files appear whole or not at all and are never written to again, so a crash at any moment leaves the
    last state that was parked. Nothing is held in memory, and processes may share a folder.

    With `model`, states that another model made are refused; "another" is one with other weights or another config.
    With `max_bytes`, parking removes whole sessions, those not used for longest first, once all are larger than that,
    until an eighth of it is free.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module | None = None,
        *,
        versions: int = 4,
        max_bytes: int | None = None,
    ):
        for name, value in (("versions", versions), ("max_bytes", 1 if max_bytes is None else max_bytes)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {shown(value)}, expected a positive whole number")
        self.directory, self.versions, self.max_bytes = find_path("directory", directory), versions, max_bytes
        self._model = None if model is None else identity(model)
        # One thread at a time changes what is there; states are written and read without it.
        self._lock = threading.Lock()
        (self.directory / UNFINISHED).mkdir(parents=True, exist_ok=True)
        for path in (self.directory / UNFINISHED).iterdir():
            if time.time() - path.stat().st_mtime > UNFINISHED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        self._nbytes = 0 if max_bytes is None else sum(self._sizes().values())

    def park(self, key: str, state: State) -> None:
        """Store the state as the newest of its session; it is on the disk when this returns."""
        if not isinstance(state, State) or not all(type(one) is int and 0 <= one < 2**63 for one in state.ids):
            raise ValueError(f"state is a {type(state).__name__}, expected the State of a request, with token ids")
        ids_s = torch.tensor(list(state.ids), dtype=torch.int64)
        folder = self._folder(key)
        with self._unfinished() as fresh:
            caches.save([self._model, ids_s, state.x_1d, state.cache], fresh / "state")
            size = (fresh / "state").stat().st_size
            if self.max_bytes is not None and size > self.max_bytes:
                raise ValueError(f"a state of {size} bytes does not fit into max_bytes of {self.max_bytes}")
            name = f"{_checksum(fresh / 'state'):08x}{STATES}"
            with self._lock:
                if not folder.exists():
                    self._publish(fresh, key)
                kept = _states(folder)
                number = 1 + (_number(kept[-1]) if kept else 0)
                os.replace(fresh / "state", folder / f"{number:08}.{name}")
                sync(folder)
                for old in kept[: max(len(kept) + 1 - self.versions, 0)]:
                    old.unlink(missing_ok=True)
                os.utime(folder / KEY)
                self._nbytes += size
                if self.max_bytes is not None and self._nbytes > self.max_bytes:
                    self._make_room(folder)

    def resume(self, key: str) -> State:
        """The state that was parked last, on the CPU; ValueError if there is none, or not all of it, or not ours."""
        return self._read(key, 0)[0]

    def rollback(self, key: str, n: int = 1) -> State:
        """The state parked `n` times before the newest, which is the newest from now on."""
        if type(n) is not int or n < 0:
            raise ValueError(f"cannot go back {shown(n)} states, expected a whole number of at least 0")
        state, path = self._read(key, n)
        with self._lock:
            for newer in reversed(_states(path.parent)):
                if _number(newer) <= _number(path):
                    break
                newer.unlink(missing_ok=True)
            sync(path.parent)
        return state

    def branch(self, key: str, new_key: str) -> None:
        """A second session with the same states, which are not copied where the file system has hard links."""
        folder, target = self._folder(key), self._folder(new_key)
        with self._unfinished() as fresh, self._lock:
            if _states(target):
                raise ValueError(f"session {new_key!r} exists; delete it first, or choose another key")
            kept = _states(folder)
            if not kept:
                raise ValueError(f"there is no session {key!r} to branch from")
            self._discard(target)  # of one whose first state never came
            self._publish(fresh, new_key, kept)

    def delete(self, key: str) -> None:
        """Forget a session; nothing happens where there is none."""
        with self._lock:
            self._discard(self._folder(key))

    def keys(self) -> list[str]:
        """Of all sessions, in no particular order."""
        found = []
        for folder in self._folders():
            content = (folder / KEY).read_bytes()
            if hashlib.sha256(content).hexdigest() != folder.name:
                raise ValueError(f"{folder / KEY} is damaged: it holds another key than its folder is named after")
            found.append(content.decode("utf-8", "surrogatepass"))
        return found

    def __len__(self) -> int:
        return len(self._folders())

    def __contains__(self, key: str) -> bool:
        return bool(_states(self._folder(key)))

    def _folder(self, key: str) -> Path:
        if not isinstance(key, str):
            raise ValueError(f"key is {shown(key)}, expected a string")
        # Any string, and one that nobody can make to name another file.
        return self.directory / hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

    def _folders(self) -> list[Path]:
        with os.scandir(self.directory) as entries:
            return [Path(one) for one in entries if (Path(one) / KEY).is_file() and _states(Path(one))]

    @contextmanager
    def _unfinished(self) -> Iterator[Path]:
        """A folder that only we know of."""
        fresh = self.directory / UNFINISHED / uuid4().hex
        fresh.mkdir()
        try:
            yield fresh
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _publish(self, fresh: Path, key: str, states: list[Path] | None = None) -> None:
        """Make a session's folder appear, with what is in it from the start."""
        whole = fresh / "session"
        whole.mkdir()
        for path in states or []:
            try:
                os.link(path, whole / path.name)
            except OSError:
                shutil.copyfile(path, whole / path.name)
                sync(whole / path.name)
        (whole / KEY).write_bytes(key.encode("utf-8", "surrogatepass"))
        sync(whole / KEY)
        sync(whole)
        try:
            os.rename(whole, self._folder(key))
        except OSError:
            # Another process was faster. Its folder is as good to park in, but not what a branch would have made.
            if states or not self._folder(key).is_dir():
                raise
        sync(self.directory)

    def _discard(self, folder: Path) -> None:
        """Removed at once, however long it takes to delete its files."""
        with self._unfinished() as fresh, suppress(FileNotFoundError):
            os.rename(folder, fresh / "session")
            sync(self.directory)

    def _read(self, key: str, back: int) -> tuple[State, Path]:
        while True:
            kept = _states(self._folder(key))
            if not kept:
                raise ValueError(f"there is no session {key!r}")
            if back >= len(kept):
                told = f"cannot go back {shown(back)} states in session {key!r}"
                raise ValueError(f"{told}, at most {len(kept) - 1} of {len(kept)} kept ones")
            path = kept[-1 - back]
            try:
                if f"{_checksum(path):08x}" != path.name.split(".")[1]:
                    raise ValueError(f"{path} is damaged: its content does not have the checksum that its name says")
                model, ids_s, x_1d, cache = _parts(caches.load(path), path)
                os.utime(path.parent / KEY)
            except FileNotFoundError:
                continue  # newer ones took its place meanwhile
            if self._model is not None and model != self._model:
                raise ValueError(f"{path} was parked by another model; use a folder for each")
            return State(tuple(ids_s.tolist()), x_1d, cache), path

    def _sizes(self) -> dict[int, int]:
        """By file: branches share theirs."""
        stats = [path.stat() for folder in self._folders() for path in _states(folder)]
        return {stat.st_ino: stat.st_size for stat in stats}

    def _make_room(self, latest: Path) -> None:
        """Remove what was not used for longest, but not what has just been parked."""
        assert self.max_bytes is not None
        self._nbytes = sum(self._sizes().values())
        if self._nbytes <= self.max_bytes:
            return
        folders = sorted(self._folders(), key=lambda folder: (folder / KEY).stat().st_mtime_ns)
        for folder in folders:
            if self._nbytes <= self.max_bytes - self.max_bytes // 8:
                break
            if folder != latest:
                stats = [path.stat() for path in _states(folder)]
                self._nbytes -= sum(stat.st_size for stat in stats if stat.st_nlink == 1)
                self._discard(folder)
        for old in _states(latest)[:-1]:
            if self._nbytes <= self.max_bytes:
                break
            self._nbytes -= old.stat().st_size if old.stat().st_nlink == 1 else 0
            old.unlink()


def identity(model: nn.Module) -> str:
    """The same for the same config and weights, in any process; every weight is read for that."""
    tensors = sorted(model.state_dict().items())
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        sums = pool.map(lambda item: checksum([item[1].detach().reshape(-1).view(torch.uint8)]), tensors)
        parts = [(name, str(t.dtype), tuple(t.shape), *sums) for (name, t), sums in zip(tensors, sums, strict=True)]
    return hashlib.sha256(repr((getattr(model, "config", None), parts)).encode()).hexdigest()


def _parts(content: Any, path: Path) -> tuple[Any, ...]:
    """What `park` stores; ValueError for a cache that something else stored."""
    if isinstance(content, list) and len(content) == 4:
        _, ids_s, x_1d, _ = content
        if isinstance(ids_s, Tensor) and ids_s.dim() == 1 and ids_s.dtype == torch.int64 and isinstance(x_1d, Tensor):
            return tuple(content)
    raise ValueError(f"{path} holds no state of a session")


def _states(folder: Path) -> list[Path]:
    """The states of a session, oldest first."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if NAMED.fullmatch(name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _number(path: Path) -> int:
    return int(path.name.split(".")[0])


def _checksum(path: Path) -> int:
    total, piece = 0, bytearray(PIECE)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            total = zlib.crc32(memoryview(piece)[:count], total)
    return total
