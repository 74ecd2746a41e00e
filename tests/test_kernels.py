"""The compiled kernels themselves: that they are there, and the vector functions they share."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mambakit.kernels.cpu import structs
from mambakit.kernels.cpu.expand_ranks import ranks
from mambakit.kernels.cpu.library import INSTRUCTION_SETS, library, pointer, run, why_missing
from mambakit.kernels.cpu.structs import (
    ExpandRanks,
    ExpandRanksBackward,
    Finish,
    FinishForward,
    Mamba2Step,
    Ranks,
    VectorFunction,
    difference,
)

CSRC = Path(structs.__file__).with_name("csrc")
# How many units in the last place of float32 an approximation may be off.
FUNCTIONS = {
    "exp": (0, torch.exp, torch.linspace(-87.3, 88.7, 100_001)),
    "log": (1, torch.log, torch.logspace(-37, 38, 100_001)),
    "sigmoid": (2, torch.sigmoid, torch.linspace(-80, 80, 100_001)),
    "softplus": (3, torch.nn.functional.softplus, torch.linspace(-80, 80, 100_001)),
}


COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler on this machine")


@needs_compiler
def test_kernels_are_built_where_a_compiler_exists():
    assert why_missing() is None


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_vector_functions(isa, name):
    if isa not in library().usable:
        pytest.skip(f"this machine has no {isa}")
    which, plain, x = FUNCTIONS[name]
    y = torch.empty_like(x)
    call = VectorFunction(which=which, x=pointer(x), y=pointer(y), n=x.numel())
    assert getattr(library().native, f"mk_vector_function_{isa}")(ctypes.byref(call)) == 0
    expected = plain(x.double())
    error = ((y - expected) / expected.abs().clamp(min=1e-30)).abs().max()
    assert error < 4e-7, f"{name}: off by {error:.1e}, relative"


def test_vector_functions_at_the_ends():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -200.0, 200.0])
    for which, plain in ((0, torch.exp), (2, torch.sigmoid), (3, torch.nn.functional.softplus)):
        y = torch.empty_like(x)
        run(VectorFunction(which=which, x=pointer(x), y=pointer(y), n=x.numel()))
        torch.testing.assert_close(y, plain(x), equal_nan=True)


def test_sine_and_cosine():
    x = torch.linspace(-1000, 1000, 100_001)
    for which, plain in ((4, torch.sin), (5, torch.cos)):
        y = torch.empty_like(x)
        run(VectorFunction(which=which, x=pointer(x), y=pointer(y), n=x.numel()))
        assert (y - plain(x.double())).abs().max() < 2e-7


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"MAMBAKIT_KERNELS": "none"}, "asks for none"),
        ({"MAMBAKIT_KERNELS": "nowhere.so"}, "is no file"),
        ({"MAMBAKIT_ISA": "sve"}, "can run"),
        ({"MAMBAKIT_EXTENSION": "avx"}, "MAMBAKIT_EXTENSION is 'avx', but this machine has "),
        ({"MAMBAKIT_ISA": "plain", "MAMBAKIT_EXTENSION": "amx"}, "AMX: it is used with avx512, not with plain"),
    ],
)
def test_missing_kernels_say_why(setting, reason):
    assert reason in output_of("from mambakit.kernels.cpu.library import why_missing; print(why_missing())", setting)


def amx_answer(question):
    if "avx512" not in library().usable:
        pytest.skip("this machine has no avx512")
    return library()._ask(question, "avx512", answer=ctypes.c_char_p).decode()


def test_amx_by_name_where_there_is_none():
    refused = amx_answer("amx_refused")
    if not refused:
        pytest.skip("this machine has AMX")
    setting = {"MAMBAKIT_ISA": "avx512", "MAMBAKIT_EXTENSION": "amx"}
    said = output_of("from mambakit.kernels.cpu.library import why_missing; print(why_missing())", setting)
    assert "MAMBAKIT_EXTENSION is 'amx', but this machine has amx-emulated, none" in said
    assert f"AMX: {refused}" in said


def test_a_trial_of_amx_that_fails_harms_nothing():
    """Its instructions are illegal where they are not granted: the process that tries them dies, not this one."""
    if not amx_answer("amx_refused"):
        pytest.skip("this machine has AMX")
    assert amx_answer("amx_differs") == "a process that tried it died"


def output_of(code, setting):
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **setting}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


STALE = """
import torch, mambakit as mk
from mambakit.tools.checks import kernels
print(kernels())
x, w = torch.randn(1, 5, 4), torch.randn(4, 3)
mk.causal_conv(x, w)
v, da = torch.randn(1, 5, 1, 2, 3), -torch.rand(1, 5, 2)
b = torch.randn(1, 5, 1, 1, 3)
try:
    mk.ssd(v, b, b, da, da, da, path=mk.SsdPath(backend="cpu"))
except ValueError as error:
    print(error)
"""


def compiled(folder, layouts):
    """A library that declares these, and has nothing else but threads."""
    text = ", ".join(f'"{layout}"' for layout in layouts)
    source, library = folder / "stale.cpp", folder / "stale.so"
    source.write_text(
        f'extern "C" int mk_can_run_plain() {{ return 1; }}\nstatic const char* all[] = {{{text}}};\n'
        'extern "C" void mk_set_threads(void*, void*) {}\n'
        f'extern "C" const char* mk_layout_plain(long n) {{ return n < {len(layouts)} ? all[n] : nullptr; }}\n'
    )
    subprocess.run([str(COMPILER), "-shared", "-fPIC", source, "-o", library], check=True)
    return library


@needs_compiler
def test_a_library_of_other_sources_is_refused(tmp_path):
    """One whose Mamba2Step lacks a field, as an older one would."""
    layouts = [text.replace("int64_t heads, p, r,", "int64_t heads, p,") for text in library()._layouts()]
    stale = compiled(tmp_path, layouts)
    doctor, error = output_of(STALE, {"MAMBAKIT_KERNELS": str(stale)}).splitlines()
    for line in (doctor, error):
        assert "stale.so was built from other sources" in line
        assert "Mamba2Step has int64_t groups there where int64_t r is expected" in line
        assert "make kernels" in line
    assert "'built': False" in doctor


@needs_compiler
def test_a_library_without_a_function_is_refused(tmp_path):
    """One with the same structs from before processors were asked for more than vectors."""
    stale = compiled(tmp_path, list(library()._layouts()))
    for line in output_of(STALE, {"MAMBAKIT_KERNELS": str(stale)}).splitlines():
        assert "stale.so was built from other sources" in line
        assert "mk_set_extension() is missing there" in line


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("float norm_eps", "double norm_eps", "Mamba2Step has double norm_eps there where float norm_eps is expected"),
        ("Sequence{const void* data", "Sequence{int64_t data", "Sequence has int64_t data there"),
        ("Matrix{", "Matrices{", "Matrix is missing there"),
        ("matvec(Matvec)", "matvec(Matrix)", "matvec() has Matrix there where Matvec is expected"),
        ("decode(Decode)", "decoded(Decode)", "decode() is missing there"),
        ("norm_before_gate;", "norm_before_gate; float more;", "Mamba2Step has float more there where nothing is"),
        ("", "", None),
    ],
)
def test_every_difference_is_seen(old, new, reason):
    layouts = list(library()._layouts())
    assert any(old in text for text in layouts)
    found = difference(text.replace(old, new) for text in layouts)
    assert found is reason is None or reason in found


def test_a_misspelt_field_is_an_error():
    with pytest.raises(AttributeError, match="head"):
        Mamba2Step(head=3)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_a_machine_is_asked_for_all_that_a_source_is_compiled_for(isa):
    text = (CSRC / f"{isa}.cpp").read_text()
    target = re.findall(r'#pragma GCC target\("(.*)"\)', text)[0].split(",")
    body = re.findall(r"MK_CAN_RUN\(\w+\) \{(.*?)\n\}", text, re.DOTALL)[0]
    asked = re.findall(r'__builtin_cpu_supports\("(\w+)"\)', body)
    assert sorted(asked) == sorted(name for name in target if not name.startswith("prefer-"))
    assert not [name for name in asked if "vnni" in name or "bf16" in name]


PARALLEL_FOR = ctypes.CFUNCTYPE(*[ctypes.c_int32, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2])
HUGE = 1 << 56


def test_a_refusing_thread_pool_is_an_error():
    refuse = PARALLEL_FOR(lambda *arguments: 1)
    x, weight, v = torch.randn(64, 8), torch.randn(2, 8), torch.empty(64, 2, 8)
    call = ExpandRanks(inputs=ranks(x, weight), v=pointer(v))
    library().native.mk_set_threads(ctypes.cast(refuse, ctypes.c_void_p), None)
    try:
        with pytest.raises(RuntimeError, match=r"expand_ranks.* refused by torch's thread pool"):
            run(call)
    finally:
        library()._hand_in_threads()
    run(call)
    torch.testing.assert_close(v, x[:, None] * weight)


def test_no_memory_is_an_error():
    with pytest.raises(MemoryError, match=r"expand_ranks_backward.* no memory"):
        run(ExpandRanksBackward(inputs=Ranks(rows=0, ranks=HUGE, width=1)))
    # In all threads at once.
    with pytest.raises(MemoryError, match=r"finish.* no memory"):
        run(FinishForward(inputs=Finish(rows=64, ranks=1, width=8, group=HUGE)))
