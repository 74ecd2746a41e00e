"""For all shapes: causality, linearity in `v`; chunk length, padding, packing and splitting do not matter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import ALGORITHMS, core_inputs, dtype_of, path_of, value_tolerance
from compare import check
from mambakit import SsdPath, ssd
from test_agreement import algorithms

SEQUENCE = ("v_bsmhp", "b_bsmgr", "c_bsmgr", "da_bsh", "w_now_bsh", "w_later_bsh")


@st.composite
def problems(draw, longest: int = 20):
    groups = draw(st.integers(1, 3))
    sizes = {
        "b": draw(st.integers(1, 3)),
        "s": draw(st.integers(1, longest)),
        "m": draw(st.integers(1, 3)),
        "h": groups * draw(st.integers(1, 3)),
        "p": draw(st.integers(1, 5)),
        "g": groups,
        "r": draw(st.integers(1, 6)),
    }
    return core_inputs(**sizes, seed=draw(st.integers(0, 2**31)))


chunk_lens = st.integers(1, 24)


def in_dtype_of(algorithm, inputs):
    return {name: t.to(dtype_of(algorithm)) for name, t in inputs.items()}


def run(inputs, path, **kwargs):
    y, state = ssd(**inputs, path=path, **kwargs)
    return {"y": y, "state": state}


def cut(inputs, start, stop):
    return {name: inputs[name][:, start:stop] for name in SEQUENCE}


@algorithms
@settings(max_examples=25)
@given(inputs=problems(), one=chunk_lens, other=chunk_lens)
def test_chunk_length_does_not_matter(algorithm, inputs, one, other):
    inputs = in_dtype_of(algorithm, inputs)
    check(value_tolerance(algorithm), run(inputs, path_of(algorithm, one)), run(inputs, path_of(algorithm, other)))


@algorithms
@settings(max_examples=25)
@given(inputs=problems(), chunk_len=chunk_lens, data=st.data())
def test_splitting_anywhere_equals_whole(algorithm, inputs, chunk_len, data):
    inputs = in_dtype_of(algorithm, inputs)
    length = inputs["v_bsmhp"].shape[1]
    at = data.draw(st.integers(0, length))
    path = path_of(algorithm, chunk_len)
    first, state = ssd(**cut(inputs, 0, at), state_bhpr=inputs["state_bhpr"], path=path)
    second, state = ssd(**cut(inputs, at, length), state_bhpr=state, path=path)
    check(value_tolerance(algorithm), {"y": torch.cat([first, second], 1), "state": state}, run(inputs, path))


@algorithms
@settings(max_examples=25)
@given(inputs=problems(), chunk_len=chunk_lens, data=st.data())
def test_causality(algorithm, inputs, chunk_len, data):
    """Changing token t leaves everything before it bit for bit as it was."""
    inputs = in_dtype_of(algorithm, inputs)
    t = data.draw(st.integers(0, inputs["v_bsmhp"].shape[1] - 1))
    path = path_of(algorithm, chunk_len)
    changed = {name: x.clone() for name, x in inputs.items()}
    for name in SEQUENCE:
        changed[name][:, t:] = -0.5 * changed[name][:, t:].abs() - 0.25
    before, after = run(inputs, path)["y"], run(changed, path)["y"]
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t], after[:, t])


@algorithms
@settings(max_examples=25)
@given(inputs=problems(), chunk_len=chunk_lens, seed=st.integers(0, 2**31))
def test_linear_in_v_and_the_state(algorithm, inputs, chunk_len, seed):
    inputs = in_dtype_of(algorithm, inputs)
    path = path_of(algorithm, chunk_len)
    torch.manual_seed(seed)
    other = {
        **inputs,
        "v_bsmhp": torch.randn_like(inputs["v_bsmhp"]),
        "state_bhpr": torch.randn_like(inputs["state_bhpr"]),
    }
    mixed = {**inputs, **{name: 2 * inputs[name] - 3 * other[name] for name in ("v_bsmhp", "state_bhpr")}}
    one, two = run(inputs, path), run(other, path)
    check(value_tolerance(algorithm), run(mixed, path), {name: 2 * one[name] - 3 * two[name] for name in one})


@algorithms
@settings(max_examples=25)
@given(inputs=problems(), chunk_len=chunk_lens, extra=st.integers(1, 9))
def test_zero_padding_changes_nothing(algorithm, inputs, chunk_len, extra):
    """Zeros neither decay nor write: real outputs and the final state stay."""
    inputs = in_dtype_of(algorithm, inputs)
    path = path_of(algorithm, chunk_len)
    padded = {
        name: torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, extra)) if name in SEQUENCE else x
        for name, x in inputs.items()
    }
    got, length = run(padded, path), inputs["v_bsmhp"].shape[1]
    assert not got["y"][:, length:].any()
    check(value_tolerance(algorithm), {"y": got["y"][:, :length], "state": got["state"]}, run(inputs, path))


@algorithms
@settings(max_examples=25)
@given(inputs=problems(), chunk_len=chunk_lens, data=st.data())
def test_packed_equals_separate(algorithm, inputs, chunk_len, data):
    inputs = in_dtype_of(algorithm, inputs)
    length = inputs["v_bsmhp"].shape[1]
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4))) if length > 1 else []
    path = path_of(algorithm, chunk_len)
    ids = torch.zeros(inputs["v_bsmhp"].shape[:2], dtype=torch.int64)
    for at in cuts:
        ids[:, at:] += 1
    pieces, state = [], None
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        entering = inputs["state_bhpr"] if start == 0 else None
        y, state = ssd(**cut(inputs, start, stop), state_bhpr=entering, path=path)
        pieces.append(y)
    assert state is not None
    check(value_tolerance(algorithm), run(inputs, path, segments_bs=ids), {"y": torch.cat(pieces, 1), "state": state})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_segment_ids_of_any_integer_type(dtype):
    inputs = core_inputs(1, 8, 1, 2, 2, 1, 2)
    ids = torch.tensor([[0, 0, 1, 1, 1, 5, 5, 200]])
    want = run(inputs, SsdPath.serial(3), segments_bs=ids)
    for name in ALGORITHMS:
        got = run(in_dtype_of(name, inputs), path_of(name, 3), segments_bs=ids.to(dtype))
        check(value_tolerance(name), got, want)
