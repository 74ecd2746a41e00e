"""Every algorithm equals the oracle: values and final state."""

import pytest
import torch

from cases import ALGORITHMS, core_inputs, dtype_of, random_segments, value_tolerance
from compare import VALUE, check
from mambakit import SsdPath, ssd
from oracles.ssd import core

# b, s, m, h, p, g, r
SHAPES = [
    (2, 13, 1, 4, 3, 1, 5),
    (1, 16, 1, 4, 2, 2, 4),
    (2, 11, 1, 3, 4, 3, 2),
    (2, 10, 2, 4, 3, 2, 5),
    (1, 12, 3, 2, 2, 1, 4),
    (1, 9, 4, 4, 3, 4, 3),
]
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


def run(algorithm: str, chunk_len: int | None, inputs: dict, **kwargs) -> dict:
    path = ALGORITHMS[algorithm]
    y, state = ssd(**inputs, path=SsdPath(path.algorithm, chunk_len, path.backend), **kwargs)
    return {"y": y, "state": state}


def oracle(inputs: dict, **kwargs) -> dict:
    y, state = core(**{name: t.double() for name, t in inputs.items()}, **kwargs)
    return {"y": y, "state": state}


@algorithms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunk_len", [1, 2, 3, 4, 5, 8, 12, 13, 16, 64, None])
def test_equals_the_recurrence(algorithm, shape, chunk_len):
    inputs = core_inputs(*shape, dtype=dtype_of(algorithm))
    check(value_tolerance(algorithm), run(algorithm, chunk_len, inputs), oracle(inputs))


@algorithms
@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("with_state", [True, False])
def test_any_length(algorithm, length, with_state):
    inputs = core_inputs(2, length, 2, 4, 3, 2, 5, dtype_of(algorithm))
    if not with_state:
        del inputs["state_bhpr"]
    check(value_tolerance(algorithm), run(algorithm, 4, inputs), oracle(inputs))


@algorithms
@pytest.mark.parametrize("chunk_len", [1, 3, 5, 17, 40])
@pytest.mark.parametrize("chance", [0.1, 0.5, 1.0])
def test_segments(algorithm, chunk_len, chance):
    inputs = core_inputs(3, 17, 2, 4, 3, 2, 5, dtype_of(algorithm))
    segments_bs = random_segments(3, 17, chance)
    got = run(algorithm, chunk_len, inputs, segments_bs=segments_bs)
    check(value_tolerance(algorithm), got, oracle(inputs, segments_bs=segments_bs))


@algorithms
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 24])
def test_dtypes(algorithm, dtype, length):
    """The data in `dtype`, decays, weights and state in at least float32, as a block gives them."""
    if dtype == torch.float64 and dtype_of(algorithm) != torch.float64:
        pytest.skip("computes in float32")
    inputs = core_inputs(2, length, 1, 4, 8, 2, 8)
    data = ("v_bsmhp", "b_bsmgr", "c_bsmgr")
    wide = torch.promote_types(dtype, torch.float32)
    inputs = {name: t.to(dtype if name in data else wide) for name, t in inputs.items()}
    got = run(algorithm, 8, inputs)
    assert got["y"].dtype == dtype
    assert got["state"].dtype == wide
    want = oracle(inputs)
    check(VALUE[dtype], got, want)
    # The state never passes through the narrow dtype.
    check(VALUE[wide] / 10, {"state": got["state"]}, {"state": want["state"]})


@algorithms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_everything_in_a_narrow_dtype(algorithm, dtype):
    inputs = core_inputs(1, 20, 1, 2, 4, 1, 4, dtype)
    got = run(algorithm, 8, inputs)
    assert got["state"].dtype == torch.float32
    check(VALUE[dtype], got, oracle(inputs))


@algorithms
@pytest.mark.parametrize("length", [1, 24])
def test_autocast_does_not_lower_precision(algorithm, length):
    inputs = core_inputs(2, length, 2, 4, 8, 2, 8, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(algorithm, 8, inputs)
    assert got["y"].dtype == got["state"].dtype == torch.float32
    check(1e-5, got, oracle(inputs))


@algorithms
def test_strided_and_expanded_inputs(algorithm):
    """Views of any layout go in as they are."""
    inputs = core_inputs(2, 11, 2, 4, 3, 2, 5, dtype_of(algorithm))
    odd = {name: t.transpose(0, -1).contiguous().transpose(0, -1) for name, t in inputs.items()}
    odd["w_now_bsh"] = odd["w_later_bsh"] = torch.full((1, 1, 1), 0.5, dtype=dtype_of(algorithm)).expand(2, 11, 4)
    inputs = {name: t.contiguous() for name, t in odd.items()}
    check(value_tolerance(algorithm, 1e-12), run(algorithm, 4, odd), run(algorithm, 4, inputs), floor=1e-6)


@algorithms
def test_bitwise_repeatable(algorithm):
    inputs = core_inputs(2, 50, 2, 4, 8, 2, 16, torch.float32)
    first, second = run(algorithm, 16, inputs), run(algorithm, 16, inputs)
    assert torch.equal(first["y"], second["y"])
    assert torch.equal(first["state"], second["state"])


@algorithms
def test_inputs_stay_untouched(algorithm):
    inputs = core_inputs(1, 9, 1, 2, 3, 1, 4, dtype_of(algorithm))
    before = {name: t.clone() for name, t in inputs.items()}
    for length in (0, 1, 9):
        cut = {name: t if name == "state_bhpr" else t[:, :length] for name, t in inputs.items()}
        y, state = ssd(**cut, path=ALGORITHMS[algorithm])
        y.fill_(7)
        state.fill_(7)
    for name, t in inputs.items():
        assert torch.equal(t, before[name]), name
