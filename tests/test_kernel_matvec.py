"""The decoding products in every weight format: against float64, in every instruction set, whatever the batch."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from compare import error
from mambakit.blocks.modules import Linear
from mambakit.kernels.cpu.library import library, why_missing
from mambakit.models.quantized_linear import Bfloat16Linear, Int4Linear, Int8Linear
from mambakit.ops import few_rows as matvec
from mambakit.ops.backends import use_backend

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
FORMATS = {
    "float32": Linear.stored,
    "bfloat16": lambda linear: Bfloat16Linear(linear).stored(),
    "int8": lambda linear: Int8Linear(linear).stored(),
    "nf4": lambda linear: Int4Linear(linear, 32).stored(),
    "nf4-64": lambda linear: Int4Linear(linear, 64).stored(),
}
# Rows and columns that are multiples of nothing, below a vector, a group and a cache line, and as models have them.
SHAPES = [(1, 1), (3, 5), (7, 31), (9, 32), (17, 33), (13, 100), (40, 64), (5, 129), (67, 257), (8, 768)]


def make_linear(rows: int, columns: int, bias: bool = True) -> Linear:
    linear = Linear(columns, rows, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(rows, columns) * torch.logspace(-2, 1, rows)[:, None])
    return linear


def decoded(weights: matvec.Weights) -> Tensor:
    """The weight in float64, from its stored form alone."""
    if weights.format in (matvec.FLOAT32, matvec.BFLOAT16):
        return weights.weight.detach().double()
    assert weights.scales is not None
    if weights.format == matvec.INT8:
        return weights.weight.double() * weights.scales.double()[:, None]
    from mambakit.models.quantized_linear import NF4

    rows, half = len(weights.weight), weights.group // 2
    codes = weights.weight.view(rows, -1, half)
    values = torch.tensor(NF4).double()[torch.cat([codes & 15, codes >> 4], -1).long()]
    return (values * weights.scales.double()[..., None]).flatten(1)[:, : weights.columns]


def product(x: Tensor, weights: matvec.Weights) -> Tensor:
    y = x.double() @ decoded(weights).T
    return y if weights.bias is None else y + weights.bias.detach().double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_products(name, shape):
    with torch.no_grad():
        for bias in (True, False):
            weights = FORMATS[name](make_linear(*shape, bias=bias))
            x = torch.randn(16, shape[1])
            want, together = product(x, weights), matvec.multiply(x, weights)
            assert error(together, want, floor=1e-3) < 1e-6
            for batch in range(1, 16):
                # To the last digit: each result is summed alone.
                assert torch.equal(matvec.multiply(x[:batch], weights), together[:batch]), batch


@pytest.mark.parametrize("name", FORMATS)
def test_threads_and_repeats_change_nothing(name):
    with torch.no_grad():
        weights, x = FORMATS[name](make_linear(1031, 300)), torch.randn(3, 300)
        alone = matvec.multiply(x, weights)
        torch.set_num_threads(2)
        try:
            assert all(torch.equal(matvec.multiply(x, weights), alone) for _ in range(5))
        finally:
            torch.set_num_threads(1)


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512"])
def test_every_instruction_set(isa):
    if isa not in library().usable:
        pytest.skip(f"this machine has no {isa}")
    if library().instruction_set == isa:
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "products or threads"]
    environment = {**os.environ, "MAMBAKIT_ISA": isa, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("name", FORMATS)
def test_operators(name):
    weights, x = FORMATS[name](make_linear(5, 64)), torch.randn(2, 3, 64)
    weight, bias = weights.weight.detach(), None if weights.bias is None else weights.bias.detach()
    scales = None if weights.scales is None else weights.scales.detach()
    options = (weights.format, weights.group, "cpu")
    torch.library.opcheck(matvec.FEW_ROWS.operator, (x, weight, scales, bias, *options))
    with FakeTensorMode() as mode:
        faked = (None if t is None else mode.from_tensor(t) for t in (x, weight, scales))
        (y,) = matvec.FEW_ROWS.operator(*faked, None, *options)
    assert (y.shape, y.dtype) == ((2, 3, 5), torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_compile(name):
    weights, x = FORMATS[name](make_linear(5, 64)), torch.randn(2, 64)
    with torch.no_grad():
        compiled = torch.compile(lambda x: matvec.multiply(x, weights), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), matvec.multiply(x, weights))


def test_what_the_kernels_leave_to_torch():
    linear = make_linear(6, 40)
    weights, x = linear.stored(), torch.randn(2, 40)
    assert matvec.multiply(x, weights) is None, "with gradients"
    with torch.no_grad():
        assert matvec.multiply(x, weights) is not None
        assert matvec.multiply(torch.randn(17, 40), weights) is None
        assert matvec.multiply(x[:0], weights) is None
        assert matvec.multiply(x.double(), weights) is None
        assert matvec.multiply(x, weights._replace(weight=linear.weight.T.contiguous().T)) is None
        assert matvec.multiply(x, Int4Linear(linear, 8).stored()) is None
        assert matvec.multiply(x, Int8Linear(linear).half().stored()) is None
        with use_backend("torch"):
            assert matvec.multiply(x, weights) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert matvec.multiply(x, weights) is None
        assert error(torch.vmap(linear)(x), nn.Linear.forward(linear, x)) < 1e-6


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 16, 17])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_linear(rows, backend):
    for shape in ((7, 33), (8, 64)):
        linear, x = make_linear(*shape), torch.randn(rows, shape[1])
        want = nn.Linear.forward(linear, x)
        with torch.no_grad(), use_backend(backend):
            assert error(linear(x), want) < 1e-6
            assert linear(x[None]).shape == (1, *want.shape)
            assert error(linear(x.mT.contiguous().mT), want) < 1e-6


def test_inputs_that_do_not_fit():
    weights = make_linear(4, 8).stored()
    with torch.no_grad(), pytest.raises(ValueError, match="7 wide, expected float32 and 8"):
        matvec.multiply(torch.randn(1, 7), weights)
