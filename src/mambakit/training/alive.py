"""Ranks that look after each other: where one dies, the others end within seconds, and one of them says why."""

import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public in its docs

EVERY = 0.2
"""Seconds between two looks at others."""
WATCHED = 4
"""Ranks that each looks at, the ones after it and the first: what it costs does not grow with the number of ranks."""
QUIET = 30.0
"""Seconds without a sign of life after which a rank counts as dead: one that was stopped, or whose machine is gone."""
GRACE = 5.0
"""Seconds after another's failure, which may be everybody's: then each says so itself."""
LEFT, FAILED = "left", "failed"
GONE = (LEFT.encode(), FAILED.encode())
CAUSE, NONE = "cause", "none"
CODE = 1


class Who(NamedTuple):
    """A rank's process. On the same machine, whether it is there is known at once."""

    host: str
    process: int
    began: str
    """When, as the system says; no later process with the same number has that."""
    view: str
    """Processes have the same numbers for all who have this."""


class Awake:
    """Seconds that this process has had to look at others, counted by asking.

    A pause counts as a second at most: where a laptop sleeps or a job is frozen, all of its ranks are.
    """

    def __init__(self) -> None:
        self._seconds, self._asked = 0.0, time.monotonic()

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._asked, 1.0)
        self._asked = now
        return self._seconds


class Alive:
    """Tells the others that this rank is alive, and ends this process if one of them is not. `end` never returns."""

    def __init__(self, rank: int, world: int, end: Callable[[str], Any] | None = None):
        self._rank, self._world = rank, world
        after = [(rank + 1 + i) % world for i in range(min(WATCHED, world - 1))]
        self._others = [other for other in dict.fromkeys((*after, 0)) if other != rank]
        self._end = end or _end
        # A connection of its own: others wait on theirs.
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=QUIET))
        self._store = PrefixStore(f"mambakit/alive/{attempt()}", store)
        self._store.set(f"who/{rank}", json.dumps(_me()))
        self._store.set(f"beat/{rank}", "0")
        self._store.compare_set(CAUSE, "", NONE)
        found = {other: json.loads(self._store.get(f"who/{other}")) for other in self._others}
        self._who = {other: Who(*who) for other, who in found.items()}
        self._store.wait([f"beat/{other}" for other in self._others])
        self._lost = threading.Event()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._look, name="alive", daemon=True)
        self._thread.start()

    def leave(self, *, failed: bool = False) -> None:
        """This rank ends, as it should or not."""
        self._leaving.set()
        self._thread.join()
        try:
            self._store.set(f"beat/{self._rank}", FAILED if failed else LEFT)
            if self._rank == 0 and self._keeps_store_first():
                # The others should have read this before it goes.
                until, beats = time.monotonic() + GRACE, [f"beat/{other}" for other in range(1, self._world)]
                while time.monotonic() < until and not all(b in GONE for b in self._store.multi_get(beats)):
                    time.sleep(EVERY)
        except RuntimeError:  # whoever keeps the store is gone too
            return

    def wait(self) -> None:
        """After an error of the connection to others: until it is known who is lost, which ends this process."""
        self._lost.wait(QUIET + GRACE)

    def first_with(self, told: str) -> bool:
        """Whether no rank has asked this about the same words before."""
        name = f"said/{hashlib.sha256(told.encode()).hexdigest()}"
        try:
            return self._store.compare_set(name, "", str(self._rank)).decode() == str(self._rank)
        except RuntimeError:  # whoever keeps the store is gone
            return True

    def _look(self) -> None:
        awake, beat = Awake(), 0
        seen: dict[int, tuple[str, float]] = dict.fromkeys(self._others, ("", 0.0))
        while not self._leaving.wait(EVERY):
            beat += 1
            told: str | None
            try:
                self._store.set(f"beat/{self._rank}", str(beat))
                *beats, cause = self._store.multi_get([*(f"beat/{other}" for other in self._others), CAUSE])
                told = self._find_lost(dict(zip(self._others, beats, strict=True)), seen, awake.seconds())
                if told is not None:
                    told = self._first_to_say(told)
                elif cause.decode() != NONE:
                    told = ""  # somebody else has said it
            except RuntimeError:
                how = seen[0][0] if self._rank else ""
                if self._leaving.is_set() or how == LEFT:
                    return
                # Whoever keeps the store is gone, and with it the way to agree on who speaks.
                speaks = self._rank == (1 if self._keeps_store_first() else 0)
                told = f"{self._keeper()} has {FAILED if how == FAILED else 'died'}" if speaks else ""
            if told is not None:
                self._lost.set()
                if self._rank == 0 and self._keeps_store_first():
                    # The others should read why before the store goes with this process.
                    time.sleep(5 * EVERY)
                self._end(told)

    def _keeps_store_first(self) -> bool:
        """Whether the first rank keeps the store, and not torchrun."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def _keeper(self) -> str:
        return self._name(0) if self._keeps_store_first() else "torchrun, or the machine it keeps the store on,"

    def _find_lost(self, beats: dict[int, bytes], seen: dict[int, tuple[str, float]], now: float) -> str | None:
        for other, beat in beats.items():
            last, since = seen[other]
            if beat.decode() != last:
                seen[other] = beat.decode(), now
            elif last == FAILED and now - since > GRACE:
                return f"{self._name(other)} has failed"
            elif last not in (LEFT, FAILED) and now - since > QUIET:
                return f"{self._name(other)} has given no sign of life for {QUIET:.0f} seconds"
            if beat.decode() not in (LEFT, FAILED) and _is_dead(self._who[other]):
                # It may have said so in between.
                again = self._store.get(f"beat/{other}").decode()
                if again not in (LEFT, FAILED):
                    return f"{self._name(other)} has died"
        return None

    def _first_to_say(self, told: str) -> str:
        """The message, for the first that found it out; nothing for all others."""
        mine = f"{self._rank}:{told}"
        return told if self._store.compare_set(CAUSE, NONE, mine).decode() == mine else ""

    def _name(self, rank: int) -> str:
        who = self._who[rank]
        return f"rank {rank} (process {who.process} on {who.host})"


def attempt() -> str:
    """Which start of the run this is, under torchrun, whose store keeps what those before have written."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _end(told: str) -> None:
    """The main thread may wait for others for ever, wherever it is. Checkpoints are whole at any moment."""
    if told:
        ways = "--resume goes on from the last checkpoint, and torchrun --max-restarts N does so by itself"
        print(f"mambakit train: {told}; this run ends. {ways}", file=sys.stderr, flush=True)
    os._exit(CODE)


def _me() -> Who:
    view = socket.gethostname()
    if sys.platform == "linux":
        view += os.readlink("/proc/self/ns/pid") + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Who(socket.gethostname(), os.getpid(), _status(os.getpid())[1], view)


def _is_dead(who: Who) -> bool:
    """Known of processes on this machine, where the system tells it."""
    if sys.platform != "linux" or who.view != _me().view:
        return False
    state, began = _status(who.process)
    return state in "ZX" or began != who.began


def _status(process: int) -> tuple[str, str]:
    """What it does and when it began; X if it is no more."""
    if sys.platform != "linux":
        return "", ""
    try:
        # Its name, in brackets, may contain anything.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]
