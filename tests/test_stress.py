"""Long streams, extreme decays, large shapes."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from cases import ALGORITHMS, core_inputs, dtype_of, path_of, value_tolerance
from compare import check
from mambakit import SsdPath, ssd, trapezoid
from oracles.ssd import core, mamba3
from test_agreement import algorithms


def test_a_million_tokens_streamed_in_pieces():
    """Pieces of uneven lengths carrying the float32 state, against one recurrence in plain Python floats."""
    length, heads = 1_000_000, 2
    v = torch.randn(1, length, 1, heads, 1)
    b, c = torch.randn(1, length, 1, 1, 1), torch.randn(1, length, 1, 1, 1)
    dt = torch.rand(1, length, heads) * 0.1
    # One head forgets within tens of tokens, the other remembers about a hundred thousand.
    da = -dt * torch.tensor([2.0, 2e-4])
    state, outputs, start = None, [], 0
    pieces = [1, 7, 4096, 100_000, 33_333]
    while start < length:
        stop = min(start + pieces[len(outputs) % len(pieces)], length)
        part = slice(start, stop)
        y, state = ssd(v[:, part], b[:, part], c[:, part], da[:, part], dt[:, part], dt[:, part], state)
        outputs.append(y)
        start = stop
    assert state is not None
    got = {"y": torch.cat(outputs, 1)[0, :, 0, :, 0], "state": state[0, :, 0, 0]}

    want_y, want_state = torch.empty(length, heads, dtype=torch.float64), torch.empty(heads, dtype=torch.float64)
    b_list, c_list = b.flatten().tolist(), c.flatten().tolist()
    for head in range(heads):
        h, ys = 0.0, []
        columns = (v[0, :, 0, head, 0].tolist(), da[0, :, head].tolist(), dt[0, :, head].tolist(), b_list, c_list)
        for v_t, da_t, dt_t, b_t, c_t in zip(*columns, strict=True):
            h = math.exp(da_t) * h + dt_t * v_t * b_t
            ys.append(h * c_t)
        want_y[:, head], want_state[head] = torch.tensor(ys, dtype=torch.float64), h
    for head in range(heads):
        check(
            1e-5,
            {name: t[..., head] for name, t in got.items()},
            {"y": want_y[:, head], "state": want_state[head]},
            floor=1e-6,
        )


@algorithms
@pytest.mark.parametrize("dt", [1e-6, 1e-3, 1.0, 100.0, "each token its own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_decays_from_none_to_total(algorithm, dt, dtype):
    """`dt` from 1e-6 to 100 with `a` to -16, values and gradients, also mixed within a chunk."""
    if dtype == torch.float64 and dtype_of(algorithm) != torch.float64:
        pytest.skip("computes in float32")
    inputs = core_inputs(1, 160, 1, 4, 4, 1, 4)
    if isinstance(dt, str):
        dt_bsh = 10 ** (torch.rand(1, 160, 4, dtype=torch.float64) * 8 - 6)
    else:
        dt_bsh = torch.full((1, 160, 4), dt, dtype=torch.float64)
    inputs["da_bsh"] = dt_bsh * torch.tensor([-1e-3, -1.0, -4.0, -16.0], dtype=torch.float64)
    inputs = {name: t.to(dtype) for name, t in inputs.items()}
    got = with_gradients(ssd, inputs, path=path_of(algorithm, 64))
    want = with_gradients(core, {name: t.double() for name, t in inputs.items()})
    assert all(t.isfinite().all() for t in got.values())
    check(2e-5 if dtype == torch.float32 else 1e-11, got, want, floor=1e-3)


def with_gradients(function, inputs, **options):
    inputs = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    y, state = function(**inputs, **options)
    grads = torch.autograd.grad(y.square().sum() + state.square().sum(), list(inputs.values()))
    return {"y": y, "state": state, **dict(zip(inputs, grads, strict=True))}


ANY = torch.tensor([-math.inf, -3e38, -1e12, -2e3, -90.0, -1.0, -1e-3])


@algorithms
@pytest.mark.parametrize("scanned", ["ssd", "single", "double"])
def test_a_decay_that_forgets_everything(algorithm, scanned):
    """Log-decays down to -inf, some in every chunk: the tokens after one are as accurate as after any other."""
    dtype, tolerance = dtype_of(algorithm), value_tolerance(algorithm)
    inputs = core_inputs(1, 40, 1, 4, 4, 1, 4)
    inputs["da_bsh"] = ANY[torch.randint(len(ANY), (1, 40, 4), generator=torch.Generator().manual_seed(0))].double()
    path: dict[str, Any] = {"path": path_of(algorithm, 8)}
    if scanned == "ssd":
        function, oracle, names = ssd, core, list(inputs)
    else:
        function, oracle = partial(trapezoid, pathway=scanned), recurrence
        names = ["v_bsmhp", "b_bsmgr", "c_bsmgr", "da_bsh", "dt_bsh", "lambda_bsh", "state_bhpr"]
        inputs |= {"dt_bsh": inputs["w_now_bsh"], "lambda_bsh": torch.rand(1, 40, 4, dtype=torch.float64)}
    got = with_gradients(function, {name: inputs[name].to(dtype) for name in names}, **path)
    want = with_gradients(oracle, {name: inputs[name] for name in names})
    check(10 * tolerance, got, want, floor=1e-3)


def recurrence(v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, dt_bsh, lambda_bsh, state_bhpr):
    before = torch.zeros_like(v_bsmhp[:, 0]), torch.zeros_like(b_bsmgr[:, 0])
    return mamba3(v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, dt_bsh, lambda_bsh, state_bhpr, *before)


@pytest.fixture
def lazy_memory():
    """Let `empty` leave its pages untouched, so that a tensor of gigabytes costs what is written into it."""
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


@algorithms
def test_offsets_beyond_int32(algorithm, lazy_memory):
    """Two rows that lie 2**31 elements apart: values and gradients as from two rows side by side."""
    inputs = core_inputs(2, 9, 1, 2, 3, 1, 4, torch.float16)
    far = {}
    for name, near in inputs.items():
        row = near[0].numel()
        base = torch.empty(2**31 + row, dtype=torch.float16)
        far[name] = base.as_strided(near.shape, (2**31, *near.stride()[1:])).copy_(near)

    def results(tensors):
        fresh = [t.detach().requires_grad_() for t in tensors.values()]
        y, state = ssd(*fresh, path=SsdPath(ALGORITHMS[algorithm].algorithm, 4, ALGORITHMS[algorithm].backend))
        return [y, state, *torch.autograd.grad(y.sum() + state.sum(), fresh)]

    for got, want in zip(results(far), results(inputs), strict=True):
        assert torch.equal(got, want)
