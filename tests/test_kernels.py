"""The compiled kernels themselves: that they are there, and the vector functions they share."""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
import torch

from mambakit.kernels.cpu.library import INSTRUCTION_SETS, kernel, library, pointer, why_missing

# How many units in the last place of float32 an approximation may be off.
FUNCTIONS = {
    "exp": (0, torch.exp, torch.linspace(-87.3, 88.7, 100_001)),
    "log": (1, torch.log, torch.logspace(-37, 38, 100_001)),
    "sigmoid": (2, torch.sigmoid, torch.linspace(-80, 80, 100_001)),
    "softplus": (3, torch.nn.functional.softplus, torch.linspace(-80, 80, 100_001)),
}


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine")
def test_kernels_are_built_where_a_compiler_exists():
    assert why_missing() is None


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_vector_functions(isa, name):
    if isa not in library().usable:
        pytest.skip(f"this machine has no {isa}")
    which, plain, x = FUNCTIONS[name]
    y = torch.empty_like(x)
    call = getattr(library().native, f"mk_vector_function_{isa}")
    call.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    call(which, pointer(x), pointer(y), x.numel())
    expected = plain(x.double())
    error = ((y - expected) / expected.abs().clamp(min=1e-30)).abs().max()
    assert error < 4e-7, f"{name}: off by {error:.1e}, relative"


def test_vector_functions_at_the_ends():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -200.0, 200.0])
    for which, plain in ((0, torch.exp), (2, torch.sigmoid), (3, torch.nn.functional.softplus)):
        y = torch.empty_like(x)
        kernel("vector_function", "ippi")(which, pointer(x), pointer(y), x.numel())
        torch.testing.assert_close(y, plain(x), equal_nan=True)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"MAMBAKIT_KERNELS": "none"}, "asks for none"),
        ({"MAMBAKIT_KERNELS": "nowhere.so"}, "is no file"),
        ({"MAMBAKIT_ISA": "sve"}, "can run"),
    ],
)
def test_missing_kernels_say_why(setting, reason):
    code = "from mambakit.kernels.cpu.library import why_missing; print(why_missing())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **setting}, capture_output=True, text=True, check=True
    )
    assert reason in done.stdout
