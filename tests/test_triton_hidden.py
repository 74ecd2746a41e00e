"""Without Triton everything else works, and its tests say that they were left out and why."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
USE = """
import triton_hidden
import pytest, torch
import mambakit as mk
for family in (mk.Mamba1, mk.Mamba2, mk.Mamba3):
    block = family(d_model=16, **({} if family is mk.Mamba1 else {"per_head_dim": 8}))
    y, cache = block(torch.randn(1, 5, block.config.d_model))
    y.sum().backward()
    block.step(y[:, 0].detach(), cache)
with pytest.raises(ValueError, match=r"Triton is not installed: pip install 'mambakit\\[gpu\\]'"):
    mk.causal_conv(torch.randn(1, 5, 3), torch.randn(3, 4), backend="triton")
"""


def start(*command: str) -> str:
    path = os.pathsep.join((str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_everything_else_works():
    start("-c", USE)


def test_what_is_left_out_is_said():
    files = [str(HERE / f"test_triton_{name}.py") for name in ("interpreter", "gate", "kernels", "blocks", "proof")]
    options = ["-n", "0", "-rs", "-p", "triton_hidden", "-p", "no:cacheprovider", "-k", "not table"]
    said = start("-m", "pytest", *options, *files)
    assert "Triton is not installed: mambakit[gpu]" in said
    assert "Triton is not installed (mambakit[gpu])" in said
    assert "runs in the processes of test_triton_interpreter.py" in said
