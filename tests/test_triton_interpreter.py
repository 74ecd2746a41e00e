"""Triton's kernels under the claims of every backend, in its interpreter: no GPU is needed, and none was ever used.

Triton decides when a kernel is defined whether it will be compiled or interpreted, so each claim has a process of its
own, with `TRITON_INTERPRET=1`: there the lists of backends have one more entry.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: mambakit[gpu]"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="it starts processes such as this one"),
]
ALL = os.environ.get("MAMBAKIT_TRITON_ALL") == "1"
LISTS = (
    "agreement",
    "causal_conv",
    "golden",
    "gradients",
    "norm",
    "properties",
    "reductions",
    "selective_scan",
    "stress",
)
# File and what of it: the interpreter is slow, so of long lists some; MAMBAKIT_TRITON_ALL=1 for all of them.
SOME = {
    "test_agreement.py": "triton and (recurrence[5- or segments[0.5-3)",
    "test_causal_conv.py": "triton and silu",
    "test_gradients.py": "triton and not all_seven and not segments and not one_input",
    "test_norm.py": "triton and (golden or loop[shape2-4 or no_number)",
    "test_selective_scan.py": "triton and (starts_from_zero or keeps_the_inputs)",
}
OWN = {
    "test_triton_addresses.py": "test",
    "test_triton_blocks.py": "mamba" if ALL else "mamba1-split or mamba2-groups-whole or mamba3-mimo-whole",
    "test_triton_kernels.py": "test",
    "test_triton_proof.py": "test",
}
PARTS = {"test_triton_kernels.py": "products or every_dtype"}
LISTED = {f"all of {name}": {f"test_{name}.py": "triton"} for name in LISTS}
# A process each: to import torch takes as long as a dozen cases.
CLAIMS = {"own": OWN, "parts": PARTS, **(LISTED if ALL else {"lists": SOME})}
# Products in parts, as on a GPU, take the interpreter several times as long.
IN_PARTS = {"parts": {"MAMBAKIT_TRITON_PARTS": "1"}}


@pytest.mark.parametrize("claim", CLAIMS)
def test_in_the_interpreter(claim):
    files = CLAIMS[claim]
    which = " or ".join(f"({file} and ({cases}))" for file, cases in files.items())
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "triton_plugin", "-p", "no:cacheprovider"]
    command += [*(str(HERE / file) for file in files), "-k", which]
    path = os.pathsep.join((str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, **IN_PARTS.get(claim, {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
