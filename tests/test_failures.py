"""A rank that dies or stops ends the others, which say so once."""

import signal
import sys

import pytest

from test_trainer_runs import forked_runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


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
