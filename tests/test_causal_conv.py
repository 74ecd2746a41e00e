"""The short convolution equals a plain loop: values, window, every gradient, any split, segments, any dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import DTYPE
from compare import CLOSE_GRADIENT, CLOSE_VALUE, check, check_only_inputs_are_kept, gradients, leaves
from mambakit.ops.causal_conv import causal_conv, convolve_in_parts
from oracles.elementwise import conv_loop

LENGTHS = [0, 1, 2, 3, 4, 17]
backends = pytest.mark.parametrize("backend", DTYPE)


def make_inputs(b: int = 2, s: int = 17, v: int = 3, k: int = 4, dtype: torch.dtype = torch.float64):
    shapes = {"x_bsv": (b, s, v), "weight_vk": (v, k), "bias_v": (v,), "window_bvk": (b, v, k)}
    return {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def named(y_bsv: Tensor, window_bvk: Tensor) -> dict[str, Tensor]:
    return {"y": y_bsv, "window": window_bvk}


def agree(got: dict[str, Tensor], want: dict[str, Tensor], got_in: dict[str, Tensor], want_in: dict[str, Tensor]):
    """Values and all gradients under independent heads on both outputs."""
    heads = {name: torch.randn_like(tensor) for name, tensor in want.items()}
    dtype = got["y"].dtype
    check(CLOSE_VALUE[dtype], got, want)
    check(CLOSE_GRADIENT[dtype], gradients(got, heads, got_in), gradients(want, heads, want_in))


@backends
@pytest.mark.parametrize("without", [(), ("bias_v",), ("window_bvk",), ("bias_v", "window_bvk")])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("s", LENGTHS)
def test_equals_the_loop(s: int, k: int, without: tuple[str, ...], backend: str):
    tensors = {name: t for name, t in make_inputs(s=s, k=k).items() if name not in without}
    mine, loop = leaves(tensors, DTYPE[backend]), leaves(tensors)
    agree(named(*causal_conv(**mine, backend=backend)), named(*conv_loop(**loop)), mine, loop)


@backends
def test_silu_is_that_of_the_sums(backend: str):
    mine = make_inputs(dtype=DTYPE[backend])
    y_bsv, _ = causal_conv(**mine, silu=True, backend=backend)
    want_bsv, _ = conv_loop(**{name: t.double() for name, t in mine.items()})
    check(CLOSE_VALUE[y_bsv.dtype], {"y": y_bsv}, {"y": torch.nn.functional.silu(want_bsv)})


@backends
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 8, 16, 17])
def test_split_with_the_window_equals_the_whole(cut: int, k: int, backend: str):
    tensors = make_inputs(k=k)
    parts, whole = leaves(tensors, DTYPE[backend]), leaves(tensors)
    x_bsv, weight_vk, bias_v, window_bvk = parts.values()
    first_bsv, window_bvk = causal_conv(x_bsv[:, :cut], weight_vk, bias_v, window_bvk, backend=backend)
    rest_bsv, window_bvk = causal_conv(x_bsv[:, cut:], weight_vk, bias_v, window_bvk, backend=backend)
    got = named(torch.cat((first_bsv, rest_bsv), dim=1), window_bvk)
    agree(got, named(*causal_conv(**whole)), parts, whole)


@backends
@pytest.mark.parametrize("with_window", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("s", "cuts"),
    [(17, [5]), (17, [1, 2, 3]), (17, [3, 16]), (17, [9, 10, 14]), (17, []), (3, [1]), (3, [1, 2]), (2, [])],
)
def test_segments_equal_separate_runs(s: int, cuts: list[int], k: int, with_window: bool, backend: str):
    tensors = make_inputs(s=s, k=k)
    if not with_window:
        del tensors["window_bvk"]
    packed, apart = leaves(tensors, DTYPE[backend]), leaves(tensors)
    ids = torch.bucketize(torch.arange(s), torch.tensor(cuts, dtype=torch.long), right=True)
    got = causal_conv(**packed, segments_bs=(3 * ids - 1).expand(2, -1), backend=backend)

    pieces, last_bvk = [], apart.get("window_bvk")
    for start, end in zip([0, *cuts], [*cuts, s], strict=True):
        entering = last_bvk if start == 0 else None
        y_bsv, last_bvk = conv_loop(apart["x_bsv"][:, start:end], apart["weight_vk"], apart["bias_v"], entering)
        pieces.append(y_bsv)
    assert last_bvk is not None
    agree(named(*got), named(torch.cat(pieces, dim=1), last_bvk), packed, apart)


def test_segments_differ_between_rows():
    tensors = make_inputs(b=2, s=6)
    segments_bs = torch.tensor([[0, 0, 1, 1, 1, 1], [4, 4, 4, 4, 4, 7]])
    y_bsv, window_bvk = causal_conv(**tensors, segments_bs=segments_bs)
    for row in range(2):
        alone = {name: t if name in ("weight_vk", "bias_v") else t[row : row + 1] for name, t in tensors.items()}
        want = named(*causal_conv(**alone, segments_bs=segments_bs[row : row + 1]))
        check(1e-14, named(y_bsv[row : row + 1], window_bvk[row : row + 1]), want)


@backends
def test_another_segment_cannot_leak_even_infinities(backend: str):
    tensors = make_inputs(s=6, dtype=DTYPE[backend])
    tensors["x_bsv"][:, :3] = torch.inf
    y_bsv, window_bvk = causal_conv(
        **tensors, segments_bs=torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(2, -1), backend=backend
    )
    assert y_bsv[:, 3:].isfinite().all()
    assert window_bvk.isfinite().all()


@pytest.mark.parametrize("s", [0, 1, 2, 5])
@pytest.mark.parametrize("k", [1, 3])
def test_first_and_second_derivatives(s: int, k: int):
    inputs = tuple(leaves(make_inputs(s=s, k=k, v=2)).values())
    assert torch.autograd.gradcheck(causal_conv, inputs)
    assert torch.autograd.gradgradcheck(causal_conv, inputs)


def test_derivatives_with_segments():
    inputs = tuple(leaves(make_inputs(b=1, s=5, k=3, v=2)).values())
    segments_bs = torch.tensor([[0, 0, 1, 1, 2]])

    def run(*tensors: Tensor):
        return causal_conv(*tensors, segments_bs=segments_bs)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("s", [1, 17])
def test_half_precision_sums_in_float32(dtype: torch.dtype, s: int):
    tensors = make_inputs(s=s, v=200, dtype=dtype)
    mine, loop = leaves(tensors), leaves(tensors, torch.float64)
    got, want = named(*causal_conv(**mine)), named(*conv_loop(**loop))
    heads = {"y": torch.randn_like(want["y"]).to(dtype)}
    assert all(tensor.dtype == dtype for tensor in got.values())
    # The exact result rounded once, but for rare ties; sums in `dtype` would round at every tap.
    assert (got["y"] == want["y"].to(dtype)).double().mean() > 0.99
    assert torch.equal(got["window"].double(), want["window"])
    got_grads, want_grads = gradients(got, heads, mine), gradients(want, heads, loop)
    for name, want_grad in want_grads.items():
        assert (got_grads[name] == want_grad.to(dtype)).double().mean() > 0.99, name


def test_float32_weights_and_window_under_half_precision_inputs():
    tensors = make_inputs(dtype=torch.float32) | {"x_bsv": torch.randn(2, 17, 3, dtype=torch.bfloat16)}
    y_bsv, window_bvk = causal_conv(**tensors)
    one_bsv, window_one_bvk = causal_conv(**(tensors | {"x_bsv": tensors["x_bsv"][:, :1]}))
    assert y_bsv.dtype == one_bsv.dtype == torch.bfloat16
    assert window_bvk.dtype == window_one_bvk.dtype == torch.float32
    assert torch.equal(y_bsv[:, :1], one_bsv)


@pytest.mark.parametrize("s", [1, 17])
def test_autocast_changes_nothing(s: int):
    tensors = make_inputs(s=s, dtype=torch.float32)
    plain, cast = leaves(tensors), leaves(tensors)
    want = named(*causal_conv(**plain))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = named(*causal_conv(**cast))
        heads = {name: torch.randn_like(tensor) for name, tensor in want.items()}
        got_grads = gradients(got, heads, cast)
    want_grads = gradients(want, heads, plain)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert all(torch.equal(got_grads[name], want_grads[name]) for name in want_grads)


@pytest.mark.parametrize("s", [1, 2, 17])
def test_window_owns_its_memory(s: int):
    """A cache that is a view would keep the whole sequence alive, or change with it."""
    tensors = make_inputs(s=s, k=1 if s == 1 else 2)
    _, window_bvk = causal_conv(**tensors)
    before = window_bvk.clone()
    tensors["x_bsv"].zero_()
    tensors["window_bvk"].zero_()
    assert window_bvk.is_contiguous()
    assert torch.equal(window_bvk, before)


def test_only_inputs_are_kept_for_the_backward():
    inputs = leaves(make_inputs(s=64))
    check_only_inputs_are_kept(causal_conv, inputs["x_bsv"], inputs["weight_vk"], inputs["bias_v"])


@given(k=st.integers(1, 5), s=st.integers(1, 12), data=st.data())
def test_causal_and_no_wider_than_the_kernel(k: int, s: int, data: st.DataObject):
    t = data.draw(st.integers(0, s - 1))
    tensors = make_inputs(b=1, s=s, k=k)
    moved = tensors | {"x_bsv": tensors["x_bsv"].index_fill(1, torch.tensor([t]), 7.0)}
    changed_s = (causal_conv(**moved)[0] != causal_conv(**tensors)[0]).any(dim=2)[0]
    assert changed_s.tolist() == [t <= i < t + k for i in range(s)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_vk": torch.zeros(5, 4)}, "axis 'v' is 5 in weight_vk but 3 in x_bsv"),
        ({"window_bvk": torch.zeros(2, 3, 3)}, "axis 'k' is 3 in window_bvk but 4 in weight_vk"),
        ({"x_bsv": torch.zeros(17, 3)}, "x_bsv needs 3 axes"),
        ({"x_bsv": torch.zeros(2, 17, 3, dtype=torch.long)}, "x_bsv is torch.int64"),
        ({"bias_v": torch.zeros(3, dtype=torch.float64)}, "bias_v is torch.float64 but x_bsv is torch.float32"),
        ({"weight_vk": torch.zeros(3, 0), "window_bvk": None}, "weight_vk needs at least one tap"),
        ({"segments_bs": torch.tensor([[1] * 16 + [0]] * 2)}, "segments_bs falls from 1 to 0"),
    ],
)
def test_bad_input_is_named(change: dict[str, Tensor], message: str):
    with pytest.raises(ValueError, match=message):
        causal_conv(**(make_inputs(dtype=torch.float32) | change))


@backends
@pytest.mark.parametrize(
    ("lengths_b", "message"),
    [
        (torch.tensor([3, 60]), "lengths_b is 60 for row 1, expected 0 to 17 tokens"),
        (torch.tensor([-1, 3]), "lengths_b is -1 for row 0, expected 0 to 17 tokens"),
        (torch.tensor([3, 10**12]), "lengths_b is 1000000000000 for row 1"),
        (torch.tensor([3.0, 4.0]), "lengths_b has to hold integers, got torch.float32"),
        (torch.tensor([True, False]), "lengths_b has to hold integers, got torch.bool"),
        (torch.tensor([3]), "axis 'b' is 1 in lengths_b but 2 in x_bsv"),
    ],
)
def test_lengths_lie_in_the_sequence(lengths_b: Tensor, message: str, backend: str):
    with pytest.raises(ValueError, match=message):
        causal_conv(**make_inputs(dtype=DTYPE[backend]), lengths_b=lengths_b, backend=backend)


@pytest.mark.parametrize("length", [60, -60])
def test_lengths_are_bounded_where_memory_is_read(length: int):
    """What blocks call trusts its lengths; the kernel reads no memory but its own for all that."""
    x_bsv, weight_vk, bias_v, window_bvk = leaves(make_inputs(dtype=torch.float32)).values()
    results = []
    for lengths_b in (torch.tensor([length, 5]), torch.tensor([min(max(length, 0), 17), 5])):
        tensors = (x_bsv, weight_vk, bias_v, window_bvk, None, lengths_b)
        (y_bsv,), after_bvk = convolve_in_parts(*tensors, [3], backend="cpu")
        d_x_bsv, d_window_bvk = torch.autograd.grad(after_bvk.square().sum(), (x_bsv, window_bvk))
        results.append({"y": y_bsv, "window": after_bvk, "d x": d_x_bsv, "d window": d_window_bvk})
    check(0, *results)
