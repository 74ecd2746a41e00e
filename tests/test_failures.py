"""A rank that dies or stops ends the others, which say so once; torchrun's restarts go on with the same losses."""

import os
import signal
import sys

import pytest

from mambakit.training import alive
from test_trainer_runs import forked_runs, started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
KILLS = os.environ.get("KILLS")
"""How often to kill, where it is more than a few times."""


def test_killed_under_torchrun(tmp_path):
    """Each time takes as long as starting its processes."""
    kills = KILLS or "1"
    told = started("killed_ranks.py", tmp_path / "runs", kills).splitlines()[-1]
    assert told.startswith(f"{kills} kills, ")


def test_killed_ranks(tmp_path):
    """Without torchrun: the ranks end by themselves, and are started again."""
    assert forked_runs("rank_kills", tmp_path).startswith(f"{KILLS or 4} kills of a rank in ")
    for folder in tmp_path.glob("killed-*"):
        assert not list((folder / "checkpoints").glob(".*")), "something unfinished was left"


def test_the_others_end(tmp_path):
    """Without torchrun: killed, stopped, failed, and left as it should."""
    told = forked_runs("deaths", tmp_path).splitlines()
    results = [line for line in told if line.startswith("codes ")]
    one = -signal.SIGKILL
    assert results == [f"codes 1 {one} 1", f"codes {one} 1 1", f"codes 1 1 {one}", "codes 1 1 1", "codes 0 0 0"]
    messages = [line for line in told if line.startswith("mambakit train: rank ")]
    assert len(messages) == 4
    for message, rank, why in zip(messages, (1, 0, 2, 1), ("died", "died", "given no sign", "failed"), strict=True):
        assert message.startswith(f"mambakit train: rank {rank} (process ")
        assert f"has {why}" in message
        assert "--resume goes on from the last checkpoint" in message


def test_a_pause_of_all_is_no_death(monkeypatch):
    """A machine that slept for an hour: the others are asked again before any of them counts as dead."""
    now = 100.0
    monkeypatch.setattr(alive.time, "monotonic", lambda: now)
    awake = alive.Awake()
    for _ in range(10):
        now += alive.EVERY
        before = awake.seconds()
    assert before == pytest.approx(10 * alive.EVERY)
    now += 3600.0
    assert awake.seconds() - before <= 1.0 < alive.QUIET
