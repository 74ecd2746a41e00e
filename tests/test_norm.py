"""Norms and activations equal plain loops and the published numbers: values, every gradient, any dtype."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import DTYPE
from compare import CLOSE_GRADIENT, CLOSE_VALUE, check, check_only_inputs_are_kept, gradients, leaves, load_golden
from mambakit.ops.activations import heavy_tail, softplus
from mambakit.ops.norm import gated_rms_norm, rms_norm
from oracles.elementwise import heavy_tail_loop, norm_loop, softplus_loop

backends = pytest.mark.parametrize("backend", DTYPE)
BOTH_ORDERS = pytest.mark.parametrize("norm_before_gate", [False, True])


def make_inputs(shape: tuple[int, ...] = (2, 5, 12), dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    shapes = {"x": shape, "z": shape, "weight": shape[-1:]}
    return {name: torch.randn(size, dtype=torch.float64).to(dtype) for name, size in shapes.items()}


def run(norm: Any, tensors: dict[str, Tensor], **options: Any) -> Tensor:
    return norm(tensors["x"], tensors.get("z"), tensors.get("weight"), **options)


@backends
@BOTH_ORDERS
@pytest.mark.parametrize("without", [(), ("z",), ("weight",), ("z", "weight")])
@pytest.mark.parametrize("group_size", [None, 12, 4, 1])
@pytest.mark.parametrize("shape", [(12,), (0, 12), (2, 5, 12), (2, 1, 3, 12)])
def test_equals_the_loop(
    shape: tuple[int, ...], group_size: int | None, without: tuple[str, ...], norm_before_gate: bool, backend: str
):
    tensors = {name: t for name, t in make_inputs(shape).items() if name not in without}
    options = {"group_size": group_size, "norm_before_gate": norm_before_gate, "eps": 0.03}
    mine, loop = leaves(tensors, DTYPE[backend]), leaves(tensors)
    got, want = {"y": run(gated_rms_norm, mine, **options, backend=backend)}, {"y": run(norm_loop, loop, **options)}
    heads = {"y": torch.randn_like(want["y"])}
    check(CLOSE_VALUE[DTYPE[backend]], got, want)
    check(CLOSE_GRADIENT[DTYPE[backend]], gradients(got, heads, mine), gradients(want, heads, loop))


@pytest.mark.parametrize("group_size", [None, 4])
def test_without_a_gate(group_size: int | None):
    tensors = make_inputs()
    got = rms_norm(tensors["x"], tensors["weight"], group_size=group_size)
    want = norm_loop(tensors["x"], None, tensors["weight"], group_size=group_size)
    check(CLOSE_VALUE[torch.float64], {"y": got}, {"y": want})


@backends
@pytest.mark.golden("rmsnorm_gated")
def test_golden(case: dict[str, Any], backend: str):
    stored, config = load_golden(case), case["config"]
    inputs = {name.split(".")[1]: t for name, t in stored.items() if name.startswith(("in.", "param."))}
    tensors = leaves(inputs, DTYPE[backend])
    options = {name: config.get(name) for name in ("eps", "group_size", "norm_before_gate")}
    got = {"y": run(gated_rms_norm, tensors, **options, backend=backend)}
    grads = gradients(got, {"y": stored["head.y"]}, tensors)
    want = {name.split(".")[-1]: t for name, t in stored.items() if name.startswith("grad.")}
    assert want.keys() == tensors.keys()
    check(max(1e-9, CLOSE_VALUE[DTYPE[backend]]), got, {"y": stored["out.y"]}, floor=1e-6)
    check(CLOSE_GRADIENT[DTYPE[backend]], grads, want, floor=1e-6)


@BOTH_ORDERS
@pytest.mark.parametrize("group_size", [None, 2])
def test_first_and_second_derivatives(group_size: int | None, norm_before_gate: bool):
    inputs = tuple(leaves(make_inputs((2, 4))).values())

    def norm(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return gated_rms_norm(x, z, weight, group_size=group_size, norm_before_gate=norm_before_gate)

    assert torch.autograd.gradcheck(norm, inputs)
    assert torch.autograd.gradgradcheck(norm, inputs)


def test_zero_input_has_finite_derivatives():
    x = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    (d_x,) = torch.autograd.grad(rms_norm(x, eps=0.25).sum(), x, create_graph=True)
    (dd_x,) = torch.autograd.grad(d_x.sum(), x)
    assert torch.equal(d_x.detach(), torch.full_like(x, 2.0))
    assert torch.equal(dd_x, torch.zeros_like(x))


@BOTH_ORDERS
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_in_float32(dtype: torch.dtype, scale: float, norm_before_gate: bool):
    tensors = make_inputs(dtype=dtype)
    tensors |= {"x": tensors["x"].clamp(-4, 4) * scale, "weight": tensors["weight"].float()}
    mine, loop = leaves(tensors), leaves(tensors, torch.float64)
    got = {"y": run(gated_rms_norm, mine, norm_before_gate=norm_before_gate)}
    want = {"y": run(norm_loop, loop, norm_before_gate=norm_before_gate)}
    heads = {"y": torch.randn_like(want["y"]).to(dtype)}
    grads = gradients(got, heads, mine)
    assert got["y"].dtype == dtype
    assert {name: grad.dtype for name, grad in grads.items()} == {name: t.dtype for name, t in tensors.items()}
    check(torch.finfo(dtype).eps, got, want)
    check(torch.finfo(dtype).eps, grads, gradients(want, heads, loop))


def far_out(scale: float, group_size: int, backend: str, dtype: torch.dtype, **options: Any) -> None:
    """Values and gradients of inputs far from 1, each relative to its own largest."""
    x, z, head = (torch.randn(3, 12, dtype=torch.float64).clamp(-3, 3) for _ in range(3))
    tensors = {name: t.to(dtype) for name, t in {"x": (x + x.sign()) * scale, "z": z, "weight": z[0] + 1}.items()}
    options |= {"group_size": group_size}
    mine, loop = leaves(tensors), leaves(tensors, torch.float64)
    got, want = run(gated_rms_norm, mine, **options, backend=backend), run(norm_loop, loop, **options)
    with torch.no_grad():
        check(CLOSE_VALUE[dtype], {"y": run(gated_rms_norm, mine, **options, backend=backend)}, {"y": want})
    grads = gradients({"y": got}, {"y": head}, mine), gradients({"y": want}, {"y": head}, loop)
    check(CLOSE_GRADIENT[dtype], {"y": got, **grads[0]}, {"y": want, **grads[1]}, floor=torch.finfo(dtype).tiny)


@backends
@BOTH_ORDERS
@pytest.mark.parametrize("group_size", [1, 2, 12])
@pytest.mark.parametrize("scale", [1e-6, 1e3, 1e4])
def test_digits_of_large_inputs(scale: float, group_size: int, norm_before_gate: bool, backend: str):
    """A group of one has the gradient `eps / (x^2 + eps)^1.5`: next to nothing, and not what two large terms leave."""
    # A larger eps than usual: the loop subtracts, if in float64.
    far_out(scale, group_size, backend, torch.float32, eps=0.03, norm_before_gate=norm_before_gate)
    if scale == 1e3 and group_size > 1:
        far_out(scale, group_size, backend, torch.float16, norm_before_gate=norm_before_gate)


@BOTH_ORDERS
@pytest.mark.parametrize("group_size", [2, 12])
@pytest.mark.parametrize(("scale", "eps"), [(1e18, 1e-5), (1e20, 1e-5), (1e30, 1e-5), (2e37, 1e-5), (1e-25, 0.0)])
def test_squares_beyond_float32(scale: float, eps: float, group_size: int, norm_before_gate: bool):
    """Where squares overflow or vanish, the kernel scales before it squares."""
    options = {"eps": eps, "norm_before_gate": norm_before_gate}
    far_out(scale, group_size, "cpu", torch.float32, **options)


@backends
def test_what_is_no_number_stays_in_its_group(backend: str):
    x = torch.tensor([[1.0, 2.0, torch.inf, 3.0, torch.nan, 4.0, 0.0, 0.0]])
    got = rms_norm(x, group_size=2, backend=backend)
    want = norm_loop(x.double(), None, None, group_size=2)
    torch.testing.assert_close(got.double(), want, equal_nan=True)


def test_half_precision_weight_under_float32_input():
    tensors = make_inputs(dtype=torch.float32)
    rounded = tensors["weight"].bfloat16()
    got = rms_norm(tensors["x"], rounded)
    assert got.dtype == torch.float32
    assert torch.equal(got, rms_norm(tensors["x"], rounded.float()))


@BOTH_ORDERS
def test_autocast_changes_nothing(norm_before_gate: bool):
    tensors = make_inputs(dtype=torch.float32)
    want = run(gated_rms_norm, tensors, norm_before_gate=norm_before_gate)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(gated_rms_norm, tensors, norm_before_gate=norm_before_gate)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


def test_only_inputs_are_kept_for_the_backward():
    inputs = leaves(make_inputs())
    check_only_inputs_are_kept(rms_norm, inputs["x"], inputs["weight"])


@given(groups=st.integers(1, 4), group_size=st.integers(1, 5), factor=st.floats(1e-3, 1e3))
def test_each_group_has_unit_size_at_any_scale(groups: int, group_size: int, factor: float):
    x = torch.randn(3, groups * group_size, dtype=torch.float64) + 2
    y = rms_norm(factor * x, eps=0.0, group_size=group_size)
    size = y.unflatten(-1, (groups, group_size)).square().mean(-1)
    check(1e-12, {"size": size}, {"size": torch.ones_like(size)})


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"group_size": 5}, "group_size = 5 does not divide the 12 channels of x"),
        ({}, {"group_size": 0}, "group_size = 0 does not divide"),
        ({"z": torch.zeros(2, 5, 11)}, {}, r"z has shape \(2, 5, 11\) but x has \(2, 5, 12\)"),
        ({"weight": torch.zeros(4)}, {"group_size": 4}, r"weight has shape \(4,\), expected \(12,\)"),
        ({"weight": torch.zeros(12).double()}, {}, "weight is torch.float64 but x is torch.float32"),
        ({"z": torch.zeros(2, 5, 12, device="meta")}, {}, "z is on meta but x on cpu; move them to one device"),
        ({"x": torch.zeros(2, 0)}, {}, "x needs a last axis of at least one channel"),
        ({"x": torch.zeros(2, 12, dtype=torch.int)}, {}, "x is torch.int32"),
    ],
)
def test_bad_input_is_named(change: dict[str, Tensor], options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        run(gated_rms_norm, make_inputs(dtype=torch.float32) | change, **options)


@pytest.mark.parametrize(("activation", "loop"), [(softplus, softplus_loop), (heavy_tail, heavy_tail_loop)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_activations_are_exact_in_every_dtype(activation: Any, loop: Any, dtype: torch.dtype):
    x = torch.cat((torch.linspace(-50, 50, 1001, dtype=torch.float64), torch.tensor([-1e-8, 0.0, 1e-8]))).to(dtype)
    got = activation(x)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    relative = ((got - loop(x)) / loop(x)).abs().max().item()
    assert relative < 4 * torch.finfo(got.dtype).eps


@pytest.mark.parametrize("activation", [softplus, heavy_tail])
def test_derivatives_of_activations(activation: Any):
    x = torch.tensor([-30.0, -2.0, -0.1, 0.3, 5.0, 25.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(activation, x)
    assert torch.autograd.gradgradcheck(activation, x)


def test_heavy_tail_has_slope_one_at_zero():
    x = torch.tensor([-1e-9, 0.0, 1e-9], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(heavy_tail(x).sum(), x)
    check(1e-8, {"slope": slope}, {"slope": torch.ones(3)})
