"""Responses that later ones go on from: what was said, and the state the model was in."""

import json
import os
import re
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from mambakit.checkpoints.writing import sync
from mambakit.text.chat import Message

NAME = re.compile(r"resp_[0-9a-f]{32}")
KEPT, KEPT_STATES = 1000, 16
"""Without a folder, so many of the latest are remembered, and the states of so many."""


class Record(NamedTuple):
    answer: dict[str, Any]
    """The response as it was sent."""
    messages: list[Message]
    """The conversation with it."""
    text: str
    """What was read and said, as text and as ids."""
    ids: list[int]


class States(Protocol):
    """Of `mambakit.inference.sessions.Sessions`, what is used here."""

    def park(self, key: str, state: Any) -> None: ...

    def resume(self, key: str) -> Any:
        """ValueError if there is none that can be used."""
        ...

    def delete(self, key: str) -> None: ...


class Store:
    """Records and states by the id of their response, the latest in memory."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._states: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, id: str, record: Record, state: Any) -> None:
        with self._lock:
            self._records[id], self._states[id] = record, state
            for kept, most in ((self._records, KEPT), (self._states, KEPT_STATES)):
                while len(kept) > most:
                    kept.popitem(last=False)

    def get(self, id: str) -> Record | None:
        with self._lock:
            return self._records.get(id)

    def state(self, id: str) -> Any:
        """None if there is none: the conversation is then read again."""
        with self._lock:
            return self._states.get(id)

    def delete(self, id: str) -> None:
        with self._lock:
            self._records.pop(id, None)
            self._states.pop(id, None)


class StoreOnDisk(Store):
    """In a folder: all of a response is on the disk when `put` returns, and is found again by another process.

    A record appears whole or not at all, and after its state.
    """

    def __init__(self, directory: Path, states: States):
        self._directory, self._parked = directory / "responses", states
        self._directory.mkdir(parents=True, exist_ok=True)

    def put(self, id: str, record: Record, state: Any) -> None:
        if state is not None:
            self._parked.park(id, state)
        fresh = self._directory / f"{uuid4().hex}.unfinished"
        fresh.write_text(json.dumps(record._asdict()), encoding="utf-8")
        sync(fresh)
        os.replace(fresh, self._path(id))
        sync(self._directory)

    def get(self, id: str) -> Record | None:
        if not NAME.fullmatch(id):
            return None
        try:
            return Record(**json.loads(self._path(id).read_bytes()))
        except (FileNotFoundError, ValueError, TypeError, RecursionError):  # gone, or damaged
            return None

    def state(self, id: str) -> Any:
        try:
            return self._parked.resume(id)
        except ValueError:  # of another model, or removed to make room
            return None

    def delete(self, id: str) -> None:
        self._path(id).unlink(missing_ok=True)
        self._parked.delete(id)

    def _path(self, id: str) -> Path:
        return self._directory / f"{id}.json"
