"""Damaged and hostile checkpoints: one ValueError or a model, exit code 2 and one line, no code run, 1 GB and 5 s."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COUNT = int(os.environ.get("MAMBAKIT_MUTATIONS", 400))
FIRST = int(os.environ.get("MAMBAKIT_MUTATIONS_FROM", 0))
"""The number a message names repeats its checkpoint."""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured and limited there")
def test_mutated_checkpoints(tmp_path):
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, HERE / "mutations.py", tmp_path, str(FIRST), str(COUNT)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{COUNT} checkpoints, 0 problems" in done.stdout
