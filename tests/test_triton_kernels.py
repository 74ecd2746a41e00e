"""What Triton's kernels alone have to show, in its interpreter; started by test_triton_interpreter.py."""

import importlib
import os
import random

import pytest
import torch
from torch import Tensor

import test_kernel_mix as mix
from blocks import make_block, random_cache, tokens
from cases import INTERPRETED, core_heads, core_inputs, random_segments
from compare import check, error, gradients, leaves
from mambakit import SsdPath, ssd
from mambakit.kernels.triton import fused_step, norm, prove
from mambakit.kernels.triton.launch import launch, recording
from mambakit.ops.backends import use_backend
from mambakit.ops.causal_conv import CAUSAL_CONV
from mambakit.ops.fused_step import MAMBA1_STEP, MAMBA1_STEP_CONV, MAMBA2_STEP, MAMBA3_STEP
from mambakit.ops.mamba3_prepare import mamba3_prepare
from mambakit.ops.norm import FINISH, GATE_FIRST, NO_NORM, NORM_FIRST, plain_finish
from mambakit.ops.operation import Kernel, TorchOperation
from mambakit.ops.selective_scan import SELECTIVE_SCAN, selective_scan
from mambakit.ops.ssd import SSD
from oracles.ssd import core
from test_kernel_step import check_restart, walk, wide

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs in the processes of test_triton_interpreter.py")
PARTS = os.environ.get("MAMBAKIT_TRITON_PARTS") == "1"
STEPPED = (
    "mamba1",
    "mamba2",
    "mamba2-groups",
    "mamba2-mlp",
    "mamba3",
    "mamba3-mimo",
    "mamba3-rank1",
    "mamba3-still",
    "mamba3-burn",
)
STEPS = (MAMBA1_STEP_CONV, MAMBA1_STEP, MAMBA2_STEP, MAMBA3_STEP)

# b, s, m, h, p, g, r: together every size of a list of odd ones.
ODD = [
    (1, 65, 1, 1, 1, 1, 256),
    (1, 64, 2, 1, 7, 1, 100),
    (1, 63, 1, 2, 48, 1, 3),
    (1, 9, 3, 1, 80, 1, 16),
    (2, 5, 4, 2, 128, 2, 1),
    (1, 33, 1, 1, 16, 1, 128),
    (1, 1, 4, 2, 7, 1, 3),
    (2, 0, 2, 2, 48, 1, 16),
]


def run(function, inputs: dict[str, Tensor], heads: dict[str, Tensor], **options) -> tuple[dict, dict]:
    y, state = function(**inputs, **options)
    found = {"y": y, "state": state}
    return found, gradients(found, heads, inputs)


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_sizes(shape):
    inputs = core_inputs(*shape, dtype=torch.float32)
    heads, segments = core_heads(inputs), random_segments(*shape[:2], chance=0.03)
    got, d_got = run(ssd, leaves(inputs), heads, path=SsdPath(backend="triton"), segments_bs=segments)
    want, d_want = run(core, leaves(inputs, torch.float64), heads, segments_bs=segments)
    check(1e-5, got, want)
    check(1e-4, d_got, d_want)


@pytest.mark.parametrize("kind", ["conv", "finish", "norm", "prepare"])
def test_random_shapes(kind):
    """The shapes of the CPU kernels' own test, without the large ones."""
    cases = (c for c in mix.random_cases(kind, 3, 100) if 0 < max(t.numel() for t in c[1].values()) < 700)
    for _ in range(6):
        case = next(cases)
        values, grads = mix.results(case, "triton", torch.float32)
        want_values, want_grads = mix.results(case, "torch", torch.float64)
        check(1e-5, values, want_values)
        check(1e-4, grads, want_grads)


@pytest.mark.parametrize("order", [NO_NORM, GATE_FIRST, NORM_FIRST])
def test_a_wide_group_in_parts(order, monkeypatch):
    """As 20 channels in parts of 8: values and gradients, and of large numbers the norm."""
    monkeypatch.setattr(norm, "BLOCK", 8)
    make = torch.Generator().manual_seed(4)
    for m, most in ((1, 1.0), (2, 1.0), (1, 1e30)):
        shapes = ((5, m, 40), (5, 40), (40,), (5, 40), *[(m, 40)] * 3, (40,))
        wide = [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]
        wide[0] *= most
        if m == 1:
            wide[4:7] = [None] * 3
        if order == NO_NORM:
            wide[7] = None
        results = []
        for dtype, run_it in ((torch.float64, plain_finish), (torch.float32, FINISH.kernels["triton"])):
            inputs = [None if x is None else x.to(dtype).requires_grad_() for x in wide]
            (y_Ni,) = run_it(*inputs, 20, order, 1e-5)
            d_y_Ni = torch.randn(y_Ni.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
            grads = torch.autograd.grad(y_Ni, [x for x in inputs if x is not None], d_y_Ni)
            results.append([{"y": y_Ni}, dict(enumerate(grads))])
        check(1e-5, results[1][0], results[0][0])
        if most == 1.0 or order != NO_NORM:
            check(1e-4, results[1][1], results[0][1])


@pytest.mark.parametrize("block", [8, 2048])
def test_an_infinity_leaves_its_group_zero(block, monkeypatch):
    """Of numbers beside it; it is NaN itself, as is a group with a NaN. In one part and in three."""
    monkeypatch.setattr(norm, "BLOCK", block)
    y = torch.randn(4, 1, 20)
    for row, found in enumerate((torch.inf, -torch.inf, torch.nan)):
        y[row, 0, 12] = found
    inputs = (y, None, None, None, None, None, None, None, 20, GATE_FIRST, 1e-5)
    (got,), (want,) = norm.finish(*inputs), plain_finish(*inputs)
    assert want[0].isnan().sum() == want[1].isnan().sum() == 1
    torch.testing.assert_close(got, want, equal_nan=True)


def test_an_infinity_in_b_and_c():
    """What the norm of Mamba-3's vectors makes of it, turned with its partner."""
    b, weight, bias = torch.randn(1, 3, 1, 1, 8), torch.randn(8), torch.randn(2, 1, 8)
    b[0, 1, 0, 0, 3], b[0, 2, 0, 0, 3] = torch.inf, torch.nan
    given = (b, b, weight, weight, bias, bias, torch.randn(1, 3, 2), torch.rand(1, 3, 2))
    got, want = (mamba3_prepare(*given, backend=backend) for backend in ("triton", "torch"))
    assert 0 < want[0][:, 1].isnan().sum() < want[0][:, 2].isnan().sum()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_what_is_no_number_is_not_clamped():
    """A NaN among step sizes or rates reaches the state: on a GPU the smaller of a number and a NaN is the number."""
    h, p, r, m = 4, 48, 20, 2
    x = {name: prove.step_inputs(name) for name in prove.STEPS}
    x["mamba1_step"][2][1, 3] = torch.nan
    _, state = fused_step.mamba1_step(*x["mamba1_step"])
    assert state.isnan().sum() == state[1, 3].isnan().sum() == 16
    x["mamba2_step"][0][1, 2 * h * p + 2 * r + 3] = torch.nan
    _, _, state = fused_step.mamba2_step(*x["mamba2_step"])
    assert state.isnan().sum() == state[1, 3].isnan().sum() == p * r
    numbers = 2 * h * p + 2 * m * r
    x["mamba3_step"][0][0, numbers + 1] = x["mamba3_step"][0][1, numbers + h + 2] = torch.nan
    for heavy in (False, True):
        x["mamba3_step"][19] = heavy
        _, state, *_ = fused_step.mamba3_step(*x["mamba3_step"])
        assert state.isnan().sum() == state[0, 1].isnan().sum() + state[1, 2].isnan().sum() == 2 * p * r
    dt = torch.randn(1, 3, 2)
    dt[0, 1, 1] = torch.nan
    y, last = selective_scan(
        torch.ones(1, 3, 2),
        dt,
        -torch.ones(2, 2),
        *[torch.ones(1, 3, 1, 2)] * 2,
        dt_softplus=True,
        backend="triton",
    )
    assert y.isnan().tolist() == [[[False, False], [False, True], [False, True]]]
    assert last.isnan().tolist() == [[[False, False], [True, True]]]


def test_tensors_on_two_devices():
    with pytest.raises(ValueError, match=r"norm\.finish got tensors on cpu and meta: move them to one device"):
        launch("norm.finish", 1, torch.zeros(1), 3, torch.zeros(1, device="meta"))


def test_more_groups_than_a_launch_takes(monkeypatch):
    rows = torch.randn(5, 12)
    inputs = (
        torch.randn(5, 2, 12),
        rows,
        torch.randn(12),
        rows,
        None,
        None,
        None,
        torch.randn(12),
        4,
        GATE_FIRST,
        1e-5,
    )
    (want,) = norm.finish(*inputs)
    monkeypatch.setattr(norm, "most_programs", lambda warps: 7)
    with recording() as log:
        norm.finish(*inputs)
    assert [call.programs for call in log] == [6, 6, 3]
    assert torch.equal(norm.finish(*inputs)[0], want)
    with pytest.raises(ValueError, match=r"finish would be 4294967296 programs, at most \d+ fit: use smaller parts"):
        launch("norm.finish", 2**32)


def test_decays_of_any_strength():
    """What float32 calls zero is zero, however strong, minus infinity too; the weak ones after it keep their digits."""
    for strong in (1e3, 1e10, 1e30, float("inf")):
        inputs = core_inputs(1, 40, 1, 2, 4, 1, 4, torch.float32)
        inputs["da_bsh"][:, 5::7] = inputs["da_bsh"][:, 6::7] = -strong
        heads = core_heads(inputs)
        got, d_got = run(ssd, leaves(inputs), heads, path=SsdPath(backend="triton"))
        want, d_want = run(core, leaves(inputs, torch.float64), heads)
        check(1e-5, got, want)
        check(1e-4, d_got, {name: torch.nan_to_num(d) for name, d in d_want.items()})


def test_convolution_of_no_tokens_in_segments():
    kernel, window = CAUSAL_CONV.kernels["triton"], torch.randn(2, 3, 4)
    inputs = (
        torch.zeros(2, 0, 3),
        torch.randn(3, 4),
        None,
        window,
        torch.zeros(2, 0, dtype=torch.int64),
        None,
        [3],
        True,
    )
    assert kernel.backward is not None
    _, _, _, d_window = kernel.backward([torch.zeros(2, 0, 3), torch.ones(2, 3, 4)], *inputs, [True] * 4)
    assert torch.equal(d_window, torch.ones(2, 3, 4))


@pytest.mark.parametrize("name", STEPPED)
def test_steps(name, monkeypatch):
    ran, call = set(), Kernel.__call__
    monkeypatch.setattr(
        Kernel, "__call__", lambda self, *x: ran.add((self.operation.name, self.backend.name)) or call(self, *x)
    )
    block = make_block(name, torch.float32)
    x_bsd, cache = tokens(block, 2, 2), random_cache(block, 2)
    with use_backend("triton"):
        got = walk(block, x_bsd, cache)
    assert (f"{name.split('-')[0]}_step", "triton") in ran
    check(1e-5, got, walk(wide(block), x_bsd.double(), wide(cache)), floor=1e-3)


def test_a_state_in_tiles(monkeypatch):
    """Mamba-3's step goes through a large state in parts: here one of 20 entries in two."""
    monkeypatch.setattr(fused_step, "TILE", 16)
    with recording() as log:
        fused_step.mamba3_step(*prove.step_inputs("mamba3_step"))
    assert [(call.sizes["R"], call.sizes["BR"]) for call in log] == [(20, 16)]
    found = prove.measure_step("mamba3_step", torch.device("cpu"))
    assert found.passed, found


@pytest.mark.parametrize("name", ["mamba1", "mamba2-learned", "mamba3-mimo"])
def test_rows_that_start_afresh(name):
    block = make_block(name, torch.float32)
    check_restart(block, tokens(block, 3, 1), random_cache(block, 3), torch.tensor([True, False, True]), "triton")


def step_inputs(name: str) -> tuple[TorchOperation, list]:
    """What a block hands to its fused step."""
    found = []
    block = make_block(name, torch.float32)

    def note(kernel: Kernel, *inputs):
        if kernel.operation in STEPS:
            found.append((kernel.operation, [x.detach() if isinstance(x, Tensor) else x for x in inputs]))
        return call(kernel, *inputs)

    call, Kernel.__call__ = Kernel.__call__, note
    try:
        walk(block, tokens(block, 2, 1), random_cache(block, 2))
    finally:
        Kernel.__call__ = call
    return found[-1]


def every_call() -> dict[str, tuple[TorchOperation, list]]:
    """A call of every operation, with all that it may be given; quaternions have no kernel here."""
    torch.manual_seed(0)
    without = ("ranks", "quaternions")
    found = {name: (operation, list(x)) for name, (operation, x) in mix.op_inputs().items() if name not in without}
    core_ones = [t.requires_grad_() for t in core_inputs(2, 11, 2, 4, 3, 2, 5, torch.float32).values()]
    found["ssd"] = (SSD, [*core_ones, random_segments(2, 11), 4])
    shapes = ((2, 5, 6), (2, 5, 6), (6, 3), (2, 5, 2, 3), (2, 5, 2, 3), (2, 6, 3), (6,), (2, 5, 6), (6,))
    scan = [torch.randn(shape).requires_grad_() for shape in shapes]
    found["scan"] = (SELECTIVE_SCAN, [*scan, torch.rand(2, 5) < 0.3, True])
    return found | {name: step_inputs(name) for name in ("mamba1", "mamba2", "mamba3-mimo")}


def outcome(operation: TorchOperation, inputs: list) -> list[Tensor]:
    """Outputs and gradients, straight from the kernels."""
    kernel = operation.kernels["triton"]
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
    outputs = kernel.forward(*inputs)
    if kernel.backward is None:
        return outputs
    make = torch.Generator().manual_seed(3)
    heads = [torch.randn(y.shape, generator=make) for y in outputs]
    return [*outputs, *(d for d in kernel.backward(heads, *inputs, [True] * operation.floats) if d is not None)]


def guarded(x):
    """The same tensor in one piece between what must not be read: NaN, or ids of no segment."""
    if not isinstance(x, Tensor):
        return x
    wrong = float("nan") if x.is_floating_point() else True if x.dtype == torch.bool else -7
    room = torch.full((x.numel() + 200,), wrong, dtype=x.dtype)
    inside = room[100 : 100 + x.numel()].view(x.shape)
    return inside.copy_(x.detach())


CALLS = every_call() if INTERPRETED else {}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_outside_is_read_and_everything_written(name):
    """NaN around every input; `torch.empty` is NaN in tests, so what is not written shows."""
    operation, inputs = CALLS[name]
    want, got = outcome(operation, inputs), outcome(operation, [guarded(x) for x in inputs])
    assert all(torch.isfinite(y).all() for y in got)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_programs_in_any_order(name, monkeypatch):
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    operation, inputs = CALLS[name]
    want = outcome(operation, inputs)
    set_dim, set_idx, orders = builder.set_grid_dim, builder.set_grid_idx, []

    def shuffle(x, y, z):
        orders.append(random.sample(range(x), x) if x > 2 else list(range(x))[::-1])
        set_dim(x, y, z)

    monkeypatch.setattr(builder, "set_grid_dim", shuffle)
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_idx(orders[-1][x], y, z))
    random.seed(1)
    got = outcome(operation, inputs)
    assert any(order != sorted(order) for order in orders)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("name", ["conv", "ssd", "mamba2"])
def test_opcheck(name):
    operation, inputs = CALLS[name]
    torch.library.opcheck(operation.operator, (*inputs, "triton"))


def test_compiles_in_one_graph():
    """One graph for three lengths, forward and backward."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def scan(v, b, c, da, w):
        return ssd(v, b, c, da, w, w, path=SsdPath(backend="triton"))[0]

    compiled = torch.compile(scan, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 7, 9):
        x = core_inputs(1, length, 1, 2, 3, 1, 4, torch.float32)
        inputs = [x[name].requires_grad_() for name in ("v_bsmhp", "b_bsmgr", "c_bsmgr", "da_bsh", "w_now_bsh")]
        y = compiled(*inputs)
        assert torch.equal(y, scan(*inputs))
        y.sum().backward()
    assert len(graphs) == 1


def test_every_dtype_sums_in_float32():
    """bfloat16 and float16 within twice the error of torch's operators, which compute in float32; "triton_fast" not."""
    for dtype in (torch.bfloat16, torch.float16):
        data = ("v_bsmhp", "b_bsmgr", "c_bsmgr")
        inputs = {
            n: t.to(dtype) if n in data else t for n, t in core_inputs(1, 90, 1, 2, 16, 1, 32, torch.float32).items()
        }
        want = dict(zip(("y", "state"), core(**{n: t.double() for n, t in inputs.items()}), strict=True))
        errors = {}
        for backend in ("torch", "triton", "triton_fast"):
            got = dict(zip(("y", "state"), ssd(**inputs, path=SsdPath(backend=backend)), strict=True))
            errors[backend] = {name: error(got[name], want[name]) for name in want}
        for name in want:
            assert errors["triton"][name] <= 2 * errors["torch"][name] + 2e-7, errors
        assert 1e-4 < errors["triton_fast"]["state"] < 2e-2, errors


@pytest.mark.skipif(not PARTS, reason="in a process that takes products in parts")
@pytest.mark.parametrize(("parts", "bound"), [(3, 3e-7), (2, 3e-5), (1, 1e-2)])
def test_products_in_parts(parts, bound):
    """Each part adds eight bits; three make a float32."""
    x, y, out = torch.randn(32, 32), torch.randn(32, 32), torch.empty(32, 32)
    importlib.import_module("triton_product").multiply[(1,)](x, y, out, N=32, PARTS=parts)
    found = error(out, x.double() @ y.double())
    assert bound / 300 < found < bound
