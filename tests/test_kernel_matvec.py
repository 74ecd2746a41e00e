"""The products in every weight format: against float64 and exact sums, in every instruction set, whatever the batch."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from compare import error
from mambakit.blocks.modules import Linear
from mambakit.kernels.cpu.library import EXTENSIONS, INSTRUCTION_SETS, TILES, library, why_missing
from mambakit.models.quantized_linear import LEVELS, NF4, Bfloat16Linear, Int4Linear, Int8Linear, IntegerInt4Linear
from mambakit.ops import few_rows as matvec
from mambakit.ops.backends import use_backend

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
FORMATS = {
    "float32": Linear.stored,
    "bfloat16": lambda linear: Bfloat16Linear(linear).stored(),
    "int8": lambda linear: Int8Linear(linear).stored(),
    "nf4": lambda linear: Int4Linear(linear, 32).stored(),
    "nf4-64": lambda linear: Int4Linear(linear, 64).stored(),
    "bfloat16-narrow": lambda linear: Bfloat16Linear(linear, "bfloat16").stored(),
    "int8-narrow": lambda linear: Int8Linear(linear, "int8").stored(),
    "int4-narrow": lambda linear: IntegerInt4Linear(linear).stored(),
}
NARROW = [name for name in FORMATS if name.endswith("narrow")]
# Rows and columns that are multiples of nothing, below a vector, a group and a cache line, and as models have them.
SHAPES = [(1, 1), (3, 5), (7, 31), (9, 32), (17, 33), (13, 100), (40, 64), (5, 129), (67, 257), (8, 768)]


def make_linear(rows: int, columns: int, bias: bool = True) -> Linear:
    linear = Linear(columns, rows, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(rows, columns) * torch.logspace(-2, 1, rows)[:, None])
    return linear


def decoded(weights: matvec.Weights) -> Tensor:
    """The weight in float64, from its stored form alone."""
    if weights.scales is None:
        return weights.weight.detach().double()
    if weights.format in (matvec.INT8, matvec.INT8_NARROW):
        return weights.weight.double() * weights.scales.double()[:, None]
    if weights.format == matvec.INT4_NARROW:
        return decoded_int4(weights)
    rows, half = len(weights.weight), weights.group // 2
    codes = weights.weight.view(rows, -1, half)
    values = torch.tensor(NF4).double()[torch.cat([codes & 15, codes >> 4], -1).long()]
    return (values * weights.scales.double()[..., None]).flatten(1)[:, : weights.columns]


def decoded_int4(weights: matvec.Weights) -> Tensor:
    """Weight by weight."""
    assert weights.scales is not None
    groups, found = -(-weights.columns // 64) * 2, []
    for row, scale in zip(weights.weight.tolist(), weights.scales.double().tolist(), strict=True):
        values = []
        for i in range(weights.columns):
            byte = row[i // 32 * 16 + i % 16]
            level, of_group = LEVELS[byte >> 4 if i % 32 >= 16 else byte & 15], row[16 * groups + i // 32]
            values.append(scale * round(level * of_group / 255))
        found.append(values)
    return torch.tensor(found, dtype=torch.float64)


def rounded(x: Tensor, format: int) -> Tensor:
    """What a product reads of float32 rows, in float64."""
    if format == matvec.BFLOAT16_NARROW:
        return x.bfloat16().double()
    if format in matvec.NARROW:
        most = x.abs().amax(-1, keepdim=True)
        return (x * (127 / most)).round().double() * most.double() / 127
    return x.double()


def product(x: Tensor, weights: matvec.Weights) -> Tensor:
    y = rounded(x, weights.format) @ decoded(weights).T
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


@pytest.mark.parametrize("name", NARROW)
def test_products_with_many_rows(name):
    """As many as prompts have. Sums of integers are to the last digit those of each row alone."""
    with torch.no_grad(), use_backend("cpu"):
        for rows, columns in ((39, 100), (18, 257)):
            weights, x = FORMATS[name](make_linear(rows, columns)), torch.randn(1060, columns)
            together = matvec.multiply(x, weights)
            assert error(together, product(x, weights), floor=1e-3) < 1e-6
            counts = (7, 8, 23, 24, 31, 32, 47, 48, 95, 96)  # by few rows, by quads or panels, by tiles
            some = [(100 * place, 100 * place + count) for place, count in enumerate(counts)]
            for first, last in ((0, 1), (255, 258), (17, 90), (1011, 1060), *some):
                alone = matvec.multiply(x[first:last], weights)
                assert error(alone, together[first:last], floor=1e-3) < (1e-6 if name == "bfloat16-narrow" else 1e-30)


@pytest.mark.parametrize("name", ["int8-narrow", "int4-narrow"])
def test_sums_of_integers_are_exact(name):
    """The largest there are, in both directions: nothing saturates."""
    linear = make_linear(6, 700, bias=False)
    with torch.no_grad():
        linear.weight.fill_(1.0)
        linear.weight[1::2] *= -1
        weights, signs = FORMATS[name](linear), torch.tensor([1.0, -1.0]).repeat(350)
        for x, rows in itertools.product((torch.ones(700), -torch.ones(700), signs, -signs), (5, 60, 100)):
            got = matvec.multiply(x.expand(rows, -1), weights)
            assert torch.equal(got, (x.sum() * linear.weight[:, 0]).expand(rows, -1))


@pytest.mark.parametrize("name", NARROW)
def test_rows_that_are_no_numbers(name):
    with torch.no_grad():
        weights, x = FORMATS[name](make_linear(5, 40, bias=False)), torch.randn(5, 40)
        x[0], x[1, 3], x[2, 39], x[4] = 0.0, torch.nan, torch.inf, 1e-38
        y = matvec.multiply(x, weights)
        assert torch.equal(y[0], torch.zeros(5))
        assert y[1].isnan().all()
        assert not y[2].isfinite().any()
        assert torch.equal(y[3:4], matvec.multiply(x[3:4], weights))
        assert y[4].abs().max() < 1e-34


@pytest.mark.parametrize("name", FORMATS)
def test_threads_and_repeats_change_nothing(name):
    with torch.no_grad(), use_backend("cpu"):
        weights = FORMATS[name](make_linear(1031, 300))
        for rows in (3, 40, 100) if name in NARROW else (3,):
            x = torch.randn(rows, 300)
            alone = matvec.multiply(x, weights)
            torch.set_num_threads(2)
            try:
                assert all(torch.equal(matvec.multiply(x, weights), alone) for _ in range(5))
            finally:
                torch.set_num_threads(1)


@pytest.mark.parametrize("extension", dict.fromkeys(EXTENSIONS + TILES))
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_every_instruction_set(isa, extension):
    if isa not in library().usable or extension not in library().extensions_of(isa):
        pytest.skip(f"this machine has no {isa} with {extension}")
    if (library().instruction_set, library().extension) == (isa, extension):
        return
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "products or threads or sums",
    ]
    environment = {**os.environ, "MAMBAKIT_ISA": isa, "MAMBAKIT_EXTENSION": extension, "PYTEST_ADDOPTS": ""}
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
        assert matvec.multiply(torch.randn(129, 40), weights) is None
        assert matvec.multiply(torch.randn(17, 40), Int8Linear(linear).stored()) is None
        assert matvec.multiply(torch.randn(17, 40), Int8Linear(linear, "int8").stored()) is not None
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


def test_more_rows_of_float32_where_torch_has_narrower_vectors(monkeypatch):
    """The same bits as a few rows, wherever the kernel is asked by name."""
    weights, x = make_linear(39, 257).stored(), torch.randn(128, 257)
    with torch.no_grad():
        for narrower in (True, False):
            monkeypatch.setattr("mambakit.kernels.cpu.backend.torch_is_narrower", lambda told=narrower: told)
            assert (matvec.multiply(x, weights) is None) != narrower
            assert matvec.multiply(x[:16], weights) is not None
        with use_backend("cpu"):
            together = matvec.multiply(x, weights)
            assert error(together, product(x, weights), floor=1e-3) < 1e-6
            for first, last in ((0, 1), (3, 20), (20, 53), (53, 117), (28, 128)):
                assert torch.equal(matvec.multiply(x[first:last], weights), together[first:last])


def test_many_rows_of_bfloat16_where_torch_has_wider_vectors(monkeypatch):
    linear = make_linear(6, 40)
    rounded, few, many = Bfloat16Linear(linear, "bfloat16").stored(), torch.randn(16, 40), torch.randn(17, 40)
    monkeypatch.setattr("mambakit.kernels.cpu.backend.torch_is_wider", lambda: True)
    with torch.no_grad():
        assert matvec.multiply(few, rounded) is not None
        assert matvec.multiply(many, rounded) is None
        assert matvec.multiply(many, Int8Linear(linear, "int8").stored()) is not None


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 16, 17, 129])
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
