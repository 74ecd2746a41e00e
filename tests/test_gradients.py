"""Every input's gradient equals autograd through the oracle, with independent heads on `y` and on the state."""

import pytest
import torch

from cases import (
    ALGORITHMS,
    IN_FLOAT32,
    TWICE_DIFFERENTIABLE,
    core_heads,
    core_inputs,
    dtype_of,
    gradient_tolerance,
    random_segments,
)
from compare import GRADIENT, check, gradients, leaves
from mambakit import SsdPath, ssd
from mambakit.ops.ssd import SSD
from mambakit.ops.ssd_recalculated import recalculated, recalculated_backward
from oracles.ssd import core
from test_agreement import SHAPES, algorithms


def grads_of(function, inputs, heads, **kwargs):
    y, state = function(**inputs, **kwargs)
    return gradients({"y": y, "state": state}, heads, inputs)


def path_of(algorithm: str, chunk_len: int | None) -> SsdPath:
    return SsdPath(ALGORITHMS[algorithm].algorithm, chunk_len, ALGORITHMS[algorithm].backend)


@algorithms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunk_len", [1, 2, 3, 5, 8, 16, 64])
def test_all_seven_gradients(algorithm, shape, chunk_len):
    inputs = core_inputs(*shape, dtype=dtype_of(algorithm))
    heads = core_heads(inputs)
    got = grads_of(ssd, leaves(inputs), heads, path=path_of(algorithm, chunk_len))
    check(gradient_tolerance(algorithm), got, grads_of(core, leaves(inputs, torch.float64), heads))


@algorithms
@pytest.mark.parametrize("length", [1, 2, 9])
def test_short_lengths(algorithm, length):
    inputs = core_inputs(2, length, 2, 4, 3, 2, 5, dtype=dtype_of(algorithm))
    heads = core_heads(inputs)
    got = grads_of(ssd, leaves(inputs), heads, path=path_of(algorithm, 4))
    check(gradient_tolerance(algorithm), got, grads_of(core, leaves(inputs, torch.float64), heads))


@algorithms
def test_no_token_passes_the_state_gradient_through(algorithm):
    inputs = leaves(core_inputs(2, 0, 1, 2, 3, 1, 4, dtype=dtype_of(algorithm)))
    heads = core_heads(inputs)
    got = grads_of(ssd, inputs, heads, path=path_of(algorithm, 4))
    assert torch.equal(got["state_bhpr"], heads["state"].to(dtype_of(algorithm)))


@algorithms
@pytest.mark.parametrize("chunk_len", [1, 4, 17, 40])
@pytest.mark.parametrize("chance", [0.15, 0.6])
def test_segments(algorithm, chunk_len, chance):
    inputs = core_inputs(3, 17, 2, 4, 3, 2, 5, dtype=dtype_of(algorithm))
    heads, segments_bs = core_heads(inputs), random_segments(3, 17, chance)
    got = grads_of(ssd, leaves(inputs), heads, path=path_of(algorithm, chunk_len), segments_bs=segments_bs)
    check(
        gradient_tolerance(algorithm),
        got,
        grads_of(core, leaves(inputs, torch.float64), heads, segments_bs=segments_bs),
    )


@algorithms
@pytest.mark.parametrize("head", ["y", "state"])
def test_only_one_output_is_used(algorithm, head):
    inputs = core_inputs(2, 11, 2, 4, 3, 2, 5, dtype=dtype_of(algorithm))
    heads = {head: core_heads(inputs)[head]}
    got = grads_of(ssd, leaves(inputs), heads, path=path_of(algorithm, 4))
    check(gradient_tolerance(algorithm), got, grads_of(core, leaves(inputs, torch.float64), heads))


@algorithms
@pytest.mark.parametrize("name", list(core_inputs(1, 1, 1, 1, 1, 1, 1)))
def test_only_one_input_needs_a_gradient(algorithm, name):
    inputs = core_inputs(1, 11, 2, 4, 3, 2, 5, dtype=dtype_of(algorithm))
    heads = core_heads(inputs)
    want = grads_of(core, leaves(inputs, torch.float64), heads)
    leaf = inputs[name].clone().requires_grad_()
    y, state = ssd(**{**inputs, name: leaf}, path=path_of(algorithm, 4))
    got = gradients({"y": y, "state": state}, heads, {name: leaf})
    check(gradient_tolerance(algorithm), got, {name: want[name]})


@algorithms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(algorithm, dtype):
    data = ("v_bsmhp", "b_bsmgr", "c_bsmgr")
    inputs = core_inputs(2, 24, 1, 4, 8, 2, 8)
    inputs = {name: t.to(dtype if name in data else torch.float32) for name, t in inputs.items()}
    heads = {name: head.to(dtype).double() for name, head in core_heads(inputs).items()}
    got = grads_of(ssd, leaves(inputs), heads, path=path_of(algorithm, 8))
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in inputs.items()}
    check(GRADIENT[dtype], got, grads_of(core, leaves(inputs, torch.float64), heads))


@algorithms
def test_autocast_around_forward_and_backward(algorithm):
    inputs = core_inputs(1, 24, 1, 4, 8, 2, 8, torch.float32)
    heads = core_heads(inputs)
    fresh = leaves(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = ssd(**fresh, path=path_of(algorithm, 8))
        if algorithm not in TWICE_DIFFERENTIABLE:  # its backward is our own, and so are its dtypes
            got = gradients({"y": y, "state": state}, heads, fresh)
    if algorithm in TWICE_DIFFERENTIABLE:
        got = gradients({"y": y, "state": state}, heads, fresh)
    check(1e-5, got, grads_of(core, leaves(inputs, torch.float64), heads))


def small(segments: bool):
    inputs = core_inputs(1, 5, 2, 2, 2, 1, 2)
    segments_bs = torch.tensor([[0, 0, 3, 3, 3]]) if segments else None
    return list(leaves(inputs).values()), segments_bs


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in IN_FLOAT32])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("chunk_len", [2, 5])
def test_gradcheck(algorithm, segments, chunk_len):
    inputs, segments_bs = small(segments)
    path = path_of(algorithm, chunk_len)
    assert torch.autograd.gradcheck(lambda *x: ssd(*x, path=path, segments_bs=segments_bs), inputs)


@pytest.mark.parametrize("algorithm", TWICE_DIFFERENTIABLE)
@pytest.mark.parametrize("segments", [False, True])
def test_gradgradcheck(algorithm, segments):
    inputs, segments_bs = small(segments)
    path = path_of(algorithm, 2)
    assert torch.autograd.gradgradcheck(lambda *x: ssd(*x, path=path, segments_bs=segments_bs), inputs)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in TWICE_DIFFERENTIABLE])
def test_the_recalculated_backward_refuses_a_second_derivative(algorithm):
    inputs = [leaf.detach().to(dtype_of(algorithm)).requires_grad_() for leaf in small(False)[0]]
    y, _ = ssd(*inputs, path=path_of(algorithm, 2))
    (grad,) = torch.autograd.grad(y.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="ssd has no second derivative here"):
        torch.autograd.grad(grad.pow(2).sum(), inputs[1])


@pytest.mark.parametrize("algorithm", ["serial_recalculated", "cpu"])
def test_the_log_decay_gradient_does_not_subtract(algorithm):
    """Almost nothing passes token 40, and its gradient says so: differences of sums would leave noise around 1e-7."""
    inputs = core_inputs(1, 64, 1, 2, 8, 1, 8)
    inputs["da_bsh"][:, 40] = -60.0
    inputs = {name: t.float() for name, t in inputs.items()}
    heads = core_heads(inputs)
    got = grads_of(ssd, leaves(inputs), heads, path=path_of(algorithm, 64))["da_bsh"][0, 40]
    want = grads_of(core, leaves(inputs, torch.float64), heads)["da_bsh"][0, 40]
    assert 0 < want.abs().max() < 1e-20
    check(1e-4, {"da": got}, {"da": want}, floor=1e-30)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements any operation inside returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_the_recalculated_algorithm_holds_pairs_of_one_chunk_only():
    """8 chunks of 32 tokens: nothing is larger than the pairs of one chunk, the inputs themselves being smaller."""
    inputs = core_inputs(1, 256, 1, 2, 2, 1, 2)
    heads = core_heads(inputs)
    with LargestTensor() as forward:
        recalculated(*inputs.values(), None, 32)
    with LargestTensor() as backward:
        recalculated_backward([heads["y"], heads["state"]], *inputs.values(), None, 32, [True] * 7)
    one_chunk = 2 * 32 * 32
    assert forward.numel == backward.numel == one_chunk


@pytest.mark.parametrize("algorithm", ["serial_recalculated", "cpu"])
def test_the_recalculated_algorithm_saves_its_inputs_only(algorithm):
    inputs = leaves(core_inputs(1, 64, 1, 2, 4, 1, 8, dtype_of(algorithm)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ssd(**inputs, path=path_of(algorithm, 8))
    given = {t.untyped_storage().data_ptr() for t in inputs.values()}
    assert len(saved) == 7
    assert {t.untyped_storage().data_ptr() for t in saved} == given


def test_opcheck():
    inputs = leaves(core_inputs(2, 11, 2, 4, 3, 2, 5))
    for segments_bs in (None, random_segments(2, 11)):
        torch.library.opcheck(SSD.operator, (*inputs.values(), segments_bs, 4, "torch"))
