"""Responses that later ones go on from: what was said, and the state the model was in."""

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from mambakit.text.chat import Message

KEPT = 1000
"""Without a folder, so many of the latest are remembered."""


class Record(NamedTuple):
    answer: dict[str, Any]
    """The response as it was sent."""
    messages: list[Message]
    """The conversation with it."""
    text: str
    """What was read and said, as text and as ids."""
    ids: list[int]


class Store:
    """Records by the id of their response, in memory."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Record, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, id: str, record: Record, state: Any) -> None:
        with self._lock:
            self._kept[id] = (record, state)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def get(self, id: str) -> Record | None:
        with self._lock:
            found = self._kept.get(id)
        return None if found is None else found[0]

    def state(self, id: str) -> Any:
        with self._lock:
            found = self._kept.get(id)
        return None if found is None else found[1]

    def delete(self, id: str) -> None:
        with self._lock:
            self._kept.pop(id, None)
