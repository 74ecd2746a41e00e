"""The examples for other people's trainers: two processes on the CPU, with the losses of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples" / "trainers"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")


def run(*command: object) -> str:
    path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [(), ("--tensor-parallel", "2")], ids=["fsdp", "tensor"])
def test_lightning_fabric(options):
    pytest.importorskip("lightning_fabric")
    assert "as on one process" in run(EXAMPLES / "fabric.py", *options)


def test_trainer_of_transformers():
    pytest.importorskip("accelerate")
    assert "as on one process" in run(*TORCHRUN, EXAMPLES / "hf_trainer.py")


def test_ray_train():
    pytest.importorskip("ray.train")
    assert "as on one process" in run(EXAMPLES / "ray_train.py")


def test_torchtitan():
    """It needs Python 3.11 and pins older versions of packages that are tested here, so no extra brings it along."""
    pytest.importorskip("torchtitan", reason="pip install torchtitan")
    assert "logits of shape (2, 5, 32)" in run(EXAMPLES / "torchtitan_spec.py")
