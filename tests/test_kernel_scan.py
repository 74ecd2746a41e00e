"""The fused selective scan under random shapes: equal to the loop, from run to run, on every instruction set.

`MAMBAKIT_FUZZ=2000` tries that many shapes instead of 200.
"""

import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compare import check, gradients, leaves
from mambakit.kernels.cpu.library import library, why_missing
from mambakit.ops.selective_scan import selective_scan
from oracles.selective_scan import selective_scan_loop

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=f"no kernels: {why_missing()}")

SHAPES = int(os.environ.get("MAMBAKIT_FUZZ", "200"))
BATCHES = 20
AROUND = ("skip_i", "z_bsi", "dt_bias_i")


def draw(seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Inputs of a random shape, some of them slices of wider tensors, and the options beside them."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    b, r = pick.randint(1, 3), pick.choice([1, 2, 7, 16, 16, 17, 33, pick.randint(1, 256)])
    # Fewer tokens where the loop has to carry much.
    s = pick.choice([0, 1, 2, 31, 32, 33, 64, 65, pick.randint(0, 300)])
    s = s if r < 40 else min(s, 70)
    g = pick.choice([1, 1, 1, 2, 3])
    i = g * max(1, pick.randint(1, 100) // g)
    if pick.random() < 0.1:
        i = g * 150  # more than one part in a group
    wide_bsX, of_x_proj_bsX = torch.randn(b, s, 2 * i), torch.randn(b, s, 2 * g * r + 3)
    x_bsi, z_bsi = wide_bsX.chunk(2, dim=-1)
    _, b_bsX, c_bsX = of_x_proj_bsX.split((3, g * r, g * r), dim=-1)
    dt_softplus = pick.random() < 0.5
    dt_bsi = torch.randn(b, s, i) if dt_softplus else torch.rand(b, s, i)
    tensors = {"x_bsi": x_bsi, "dt_bsi": dt_bsi, "a_ir": -3 * torch.rand(i, r), "b_bsgr": b_bsX.unflatten(-1, (g, r))}
    tensors["c_bsgr"] = c_bsX.unflatten(-1, (g, r))
    optional = {"state_bir": torch.randn(b, i, r), "skip_i": torch.randn(i), "z_bsi": z_bsi}
    optional["dt_bias_i"] = torch.randn(i) if dt_softplus else torch.rand(i)
    tensors |= {name: t for name, t in optional.items() if pick.random() < 0.5}
    segments_bs = (torch.rand(b, s) < 0.1).long().cumsum(1) if pick.random() < 0.4 else None
    return tensors, {"dt_softplus": dt_softplus, "segments_bs": segments_bs}


def loop(tensors: dict[str, Tensor], dt_softplus: bool, segments_bs: Tensor | None) -> dict[str, Tensor]:
    """The plain recurrence, with what is around it."""
    inner = {name: t for name, t in tensors.items() if name not in AROUND}
    dt_bsi = inner["dt_bsi"] + tensors.get("dt_bias_i", 0)
    inner["dt_bsi"] = torch.logaddexp(dt_bsi, torch.zeros_like(dt_bsi)) if dt_softplus else dt_bsi
    y_bsi, state_bir = selective_scan_loop(**inner, segments_bs=segments_bs)
    y_bsi = y_bsi + tensors.get("skip_i", 0) * tensors["x_bsi"]
    return {"y": y_bsi * F.silu(tensors["z_bsi"]) if "z_bsi" in tensors else y_bsi, "state": state_bir}


def run_kernel(tensors: dict[str, Tensor], **options) -> dict[str, Tensor]:
    return dict(zip(("y", "state"), selective_scan(**tensors, **options, backend="cpu"), strict=True))


def attach(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leaves that keep their strides."""
    return {name: t.detach().requires_grad_() for name, t in tensors.items()}


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_shapes(batch):
    for seed in range(batch * SHAPES // BATCHES, (batch + 1) * SHAPES // BATCHES):
        torch.set_num_threads(1 + seed % 2)
        try:
            tensors, options = draw(seed)
            given, exact = attach(tensors), leaves(tensors, torch.float64)
            got, want = run_kernel(given, **options), loop(exact, **options)
            check(1e-5, got, want)
            heads = {name: torch.randn_like(t) for name, t in want.items()}
            check(1e-4, gradients(got, heads, given), gradients(want, heads, exact))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: { ({n: tuple(t.shape) for n, t in tensors.items()}) }") from error
        finally:
            torch.set_num_threads(1)


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_in_bfloat16(seed):
    """Data in bfloat16 is rounded once, when it is written; states and sums are float32."""
    tensors, options = draw(seed)
    data = [name for name in tensors if name in ("x_bsi", "dt_bsi", "b_bsgr", "c_bsgr", "z_bsi")]
    tensors = {name: t.bfloat16() if name in data else t for name, t in tensors.items()}
    given, exact = attach(tensors), leaves(tensors, torch.float64)
    got, want = run_kernel(given, **options), loop(exact, **options)
    heads = {name: torch.randn_like(t).bfloat16() for name, t in want.items()}
    got |= gradients(got, heads, given)
    want |= gradients(want, heads, exact)
    check(2**-8, got, {name: t for name, t in want.items() if name in ("y", *data)})
    check(1e-4, got, {name: t for name, t in want.items() if name not in ("y", *data)})


@pytest.mark.parametrize("seed", range(12))
def test_bitwise_equal_from_run_to_run_and_for_any_number_of_threads(seed):
    tensors, options = draw(seed)
    results = []
    for threads in (1, 2, 2, 1, 5):
        torch.set_num_threads(threads)
        given = attach(tensors)
        got = run_kernel(given, **options)
        results.append(got | gradients(got, {name: torch.ones_like(t) for name, t in got.items()}, given))
    torch.set_num_threads(1)
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in results[0])


def test_projections_are_read_where_they_lie():
    """Slices along channels are not copied: no allocation but those of the results."""
    wide_bsX = torch.randn(2, 40, 96)
    x_bsi, z_bsi = wide_bsX.chunk(2, dim=-1)
    tensors = {"x_bsi": x_bsi, "z_bsi": z_bsi, "dt_bsi": torch.rand(2, 40, 48), "a_ir": -torch.rand(48, 4)}
    b_bsr, c_bsr = torch.randn(2, 40, 8).chunk(2, dim=-1)
    tensors |= {"b_bsgr": b_bsr[:, :, None], "c_bsgr": c_bsr[:, :, None]}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        selective_scan(**tensors, backend="cpu")
    called = {event.key for event in profiler.key_averages()}
    assert "mambakit::selective_scan" in called
    assert not called & {"aten::copy_", "aten::clone", "aten::contiguous"}


def test_any_decay_is_right():
    """Growing states, decays to nothing, infinite and missing numbers."""
    exponents = torch.tensor([-1e30, -200.0, -88.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 80.0, 89.0, 1e30, float("nan")])
    i = len(exponents)
    x_bsi, b_bsgr = torch.zeros(1, 1, i), torch.ones(1, 1, 1, 1)
    _, got = selective_scan(
        x_bsi, torch.ones(1, 1, i), exponents[:, None], b_bsgr, b_bsgr, torch.ones(1, i, 1), backend="cpu"
    )
    torch.testing.assert_close(got[0, :, 0], exponents.exp(), rtol=1e-5, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("isa", library().usable if why_missing() is None else [])
def test_every_instruction_set(isa):
    if os.environ.get("MAMBAKIT_ISA"):
        pytest.skip("this is the run on one of them")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    chosen = "random_shapes or bitwise or decay"
    done = subprocess.run(
        [*command, "-k", chosen], env={**os.environ, "MAMBAKIT_ISA": isa, "MAMBAKIT_FUZZ": "40"}, capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()[-2000:]
