"""The fused SSD kernel beyond the claims it shares: random shapes and layouts, instruction sets, numbers of threads.

`MAMBAKIT_FUZZ=2000` (or `make fuzz`) draws as many random problems instead of 200.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import core_heads, core_inputs, random_segments
from compare import check, gradients, leaves
from mambakit import SsdPath, ssd
from mambakit.kernels.cpu.library import INSTRUCTION_SETS, library
from mambakit.kernels.cpu.ssd import _in_place
from mambakit.ops.ssd import SSD
from oracles.ssd import core

KERNEL = SsdPath(backend="cpu")
VALUE, GRADIENT = 1e-5, 1e-4
FUZZ = int(os.environ.get("MAMBAKIT_FUZZ", "200"))
PART = 20
DATA = ("v_bsmhp", "b_bsmgr", "c_bsmgr")


@pytest.fixture(params=[1, 2])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def outputs_of(function, inputs: dict[str, Tensor], heads: dict[str, Tensor], **kwargs) -> tuple[dict, dict]:
    """Values, and the gradient of every input."""
    # Not clones, which would be contiguous.
    fresh = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    y, state = function(**fresh, **kwargs)
    values = {"y": y, "state": state}
    return {name: t.detach() for name, t in values.items()}, gradients(values, heads, fresh)


def double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() for name, t in tensors.items()}


def into_projection(tensor: Tensor, make: random.Random) -> Tensor:
    """The same numbers as a view of rows that hold more."""
    flat = tensor.flatten(2)
    before, after = make.randrange(5), make.randrange(5)
    wide = torch.full((*flat.shape[:2], before + flat.shape[2] + after), float("nan"))
    view = wide[..., before : before + flat.shape[2]]
    return view.copy_(flat).unflatten(2, tensor.shape[2:])


def draw(seed: int) -> dict:
    make = random.Random(seed)
    groups = make.choice([1, 1, 2, 3])
    size = {
        "b": make.choice([1, 1, 2, 3]),
        "s": int(301 * make.random() ** 2),
        "m": make.choice([1, 1, 2, 3, 4]),
        "h": groups * make.choice([1, 2, 5]),
        "p": make.choice([1, 7, 16, 48, 64, 80, 128]),
        "g": groups,
        "r": make.choice([make.randint(1, 256), make.choice([1, 16, 64, 128])]),
    }
    inputs = core_inputs(**size, dtype=torch.float32, seed=seed)
    inputs["da_bsh"] *= make.choice([0.01, 1.0, 30.0])
    heads = core_heads(inputs, seed + 1)
    if make.random() < 0.3:
        for name in ("v_bsmhp", "b_bsmgr", "c_bsmgr"):
            inputs[name] = into_projection(inputs[name], make)
    if size["s"] and make.random() < 0.3:
        del inputs["state_bhpr"]
    chance = make.choice([0.02, 0.3])
    return {
        "inputs": inputs,
        "heads": heads,
        "path": SsdPath(chunk_len=make.choice([None, None, make.randint(1, 100)]), backend="cpu"),
        "segments_bs": random_segments(size["b"], size["s"], chance, seed) if make.random() < 0.4 else None,
        "threads": make.choice([1, 2]),
        "what": size,
    }


def fuzz(seeds: range) -> None:
    for seed in seeds:
        problem = draw(seed)
        path, options = problem["path"], {"segments_bs": problem["segments_bs"]}
        torch.set_num_threads(problem["threads"])
        try:
            got = outputs_of(ssd, problem["inputs"], problem["heads"], path=path, **options)
            again = outputs_of(ssd, problem["inputs"], problem["heads"], path=path, **options)
        finally:
            torch.set_num_threads(1)
        want = outputs_of(core, double(problem["inputs"]), problem["heads"], **options)
        try:
            check(VALUE, got[0], want[0])
            check(GRADIENT, got[1], want[1])
            for first, second in zip(got, again, strict=True):
                assert all(torch.equal(first[name], second[name]) for name in first), "another run gave other bits"
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {problem['what']}, {path}: {error}") from error


@pytest.mark.parametrize("start", range(0, FUZZ, PART))
def test_random_problems(start):
    fuzz(range(start, start + PART))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_every_instruction_set(isa):
    if isa not in library().usable:
        pytest.skip(f"this machine has no {isa}")
    calls = "t.fuzz(range(10_000, 10_010)); t.test_random_problems_in_bfloat16(0)"
    done = subprocess.run(
        [sys.executable, "-c", f"import torch, conftest, test_kernel_ssd as t; {calls}"],
        env={**os.environ, "MAMBAKIT_ISA": isa},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_more_rows_than_one_stretch(threads):
    """Beyond 2048 rows the backward recomputes states twice."""
    inputs = core_inputs(1, 2300, 2, 3, 3, 1, 4, torch.float32)
    inputs["w_later_bsh"] *= 0.1
    heads = core_heads(inputs)
    segments_bs = random_segments(1, 2300, 0.001)
    for options in ({}, {"segments_bs": segments_bs}):
        for chunk_len in (None, 1, 300):
            path = SsdPath(chunk_len=chunk_len, backend="cpu")
            got = outputs_of(ssd, inputs, heads, path=path, **options)
            want = outputs_of(ssd, double(inputs), heads, path=SsdPath.serial(64), **options)
            check(VALUE, got[0], want[0])
            check(GRADIENT, got[1], want[1])


def test_values_do_not_depend_on_the_number_of_threads():
    inputs = core_inputs(2, 70, 1, 5, 16, 1, 20, torch.float32)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(ssd(**inputs, path=KERNEL))
    torch.set_num_threads(1)
    for y, state in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(state, results[0][1])


@pytest.mark.parametrize("sizes", [(0, 5, 1, 2, 3, 1, 4), (1, 5, 1, 2, 0, 1, 4), (1, 5, 1, 2, 3, 1, 0)], ids=str)
def test_axes_of_size_zero(sizes, threads):
    inputs = core_inputs(*sizes, torch.float32)
    heads = core_heads(inputs)
    got = outputs_of(ssd, inputs, heads, path=KERNEL)
    want = outputs_of(ssd, inputs, heads, path=SsdPath.serial(4))
    for one, other in zip(got, want, strict=True):
        check(VALUE, one, other)


def test_views_of_a_projection_are_not_copied():
    projected = torch.randn(2, 9, 100)
    v_bsmhp = projected[..., 10:34].unflatten(2, (1, 4, 6))
    assert _in_place(v_bsmhp).data_ptr() == v_bsmhp.data_ptr()
    assert _in_place(v_bsmhp.transpose(3, 4)).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_without_instructions_narrow_data_is_widened_and_nothing_else(dtype, without_extension):
    inputs = core_inputs(1, 40, 2, 4, 8, 2, 8, torch.float32)
    for name in ("v_bsmhp", "b_bsmgr", "c_bsmgr"):
        inputs[name] = inputs[name].to(dtype)
    y, state = ssd(**inputs, path=KERNEL)
    wide_y, wide_state = ssd(**{name: t.float() for name, t in inputs.items()}, path=KERNEL)
    assert torch.equal(y, wide_y.to(dtype))
    assert torch.equal(state, wide_state)


def narrow(inputs: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The data in `dtype`, the rest as it is."""
    return {name: t.to(dtype) if name in DATA else t for name, t in inputs.items()}


def narrow_results(seed: int) -> tuple[dict, dict, dict, dict]:
    """Values and gradients of a random problem in bfloat16, from the kernel and from the oracle in float64."""
    problem = draw(seed)
    inputs, options = narrow(problem["inputs"]), {"segments_bs": problem["segments_bs"]}
    heads = {name: t.bfloat16().double() for name, t in problem["heads"].items()}
    torch.set_num_threads(problem["threads"])
    try:
        got = outputs_of(ssd, inputs, heads, path=problem["path"], **options)
        again = outputs_of(ssd, inputs, heads, path=problem["path"], **options)
    finally:
        torch.set_num_threads(1)
    for first, second in zip(got, again, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first), "another run gave other bits"
    return *got, *outputs_of(core, double(inputs), heads, **options)


@pytest.mark.parametrize("start", range(0, FUZZ // 5, PART))
def test_random_problems_in_bfloat16(start):
    """Products of bfloat16 round what meets the data; the state that is handed on stays what it was."""
    for seed in range(start, start + PART):
        values, grads, want_values, want_grads = narrow_results(seed)
        assert {name: t.dtype for name, t in grads.items()} == {n: t.dtype for n, t in narrow(want_grads).items()} | {
            name: torch.float32 for name in grads if name not in DATA
        }
        try:
            check(2**-6, {"y": values["y"]}, {"y": want_values["y"]})
            check(VALUE, {"state": values["state"]}, {"state": want_values["state"]})
            check(2**-6, grads, want_grads)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_random_problems_in_bfloat16_without_instructions(without_extension):
    for seed in range(PART):
        values, grads, want_values, want_grads = narrow_results(seed)
        check(2**-8, {"y": values["y"]}, {"y": want_values["y"]})
        check(VALUE, {"state": values["state"]}, {"state": want_values["state"]})
        check(2**-8, {n: t for n, t in grads.items() if n in DATA}, {n: t for n, t in want_grads.items() if n in DATA})
        others = {name: t for name, t in want_grads.items() if name not in DATA}
        check(GRADIENT, {name: grads[name] for name in others}, others)


def test_opcheck():
    inputs = core_inputs(2, 11, 2, 4, 3, 2, 5, torch.float32)
    d_y, d_state = core_heads(inputs).values()
    torch.library.opcheck(SSD.operator, (*leaves(narrow(inputs)).values(), None, 0, "cpu"))
    given = ([d_y.bfloat16(), d_state.float()], *narrow(inputs).values(), None, 0, [True] * 7, "cpu")
    torch.library.opcheck(SSD.operator_backward, given)
    for segments_bs in (None, random_segments(2, 11)):
        for chunk_len in (0, 4):
            options = (segments_bs, chunk_len)
            torch.library.opcheck(SSD.operator, (*leaves(inputs).values(), *options, "cpu"))
            given = ([d_y.float(), d_state.float()], *inputs.values(), *options, [True] * 7, "cpu")
            torch.library.opcheck(SSD.operator_backward, given)


def test_asked_for_by_name_it_runs_or_says_why_not():
    with pytest.raises(ValueError, match='"serial_recalculated" only, not for "serial"'):
        ssd(**core_inputs(1, 5, 1, 2, 3, 1, 4, torch.float32), path=SsdPath("serial", backend="cpu"))
    with pytest.raises(ValueError, match=r"torch.float64"):
        ssd(**core_inputs(1, 5, 1, 2, 3, 1, 4), path=KERNEL)
    single = core_inputs(1, 1, 1, 2, 3, 1, 4, torch.float32)
    check(VALUE, dict(enumerate(ssd(**single, path=KERNEL))), dict(enumerate(ssd(**single))))
