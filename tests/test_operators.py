"""The torch operators are open to everyone: what does not fit is named, and never reaches a kernel."""

import pytest
import torch
from torch import Tensor

from calls import Wrapped
from compare import check
from mambakit.kernels.cpu.library import why_missing
from mambakit.ops.operation import OPERATIONS, TorchOperation
from operator_calls import OPERATORS, operator_calls

pytestmark = pytest.mark.skipif(why_missing() is not None, reason="the kernels are not built")


@pytest.fixture(scope="module")
def calls() -> dict[str, list[tuple]]:
    return operator_calls()


def mutations(tensor: Tensor):
    for axis in range(tensor.dim()):
        yield tensor.narrow(axis, 0, tensor.shape[axis] - 1)
        yield torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
        yield tensor.narrow(axis, 0, 0)
        yield tensor.narrow(axis, 0, 1).expand(tensor.shape)
        yield tensor.transpose(0, axis)
        yield tensor.unsqueeze(axis)
        yield tensor.select(axis, 0)


@pytest.mark.parametrize("name", OPERATORS)
def test_sizes(name, calls):
    """Another size is refused, or it fits the others as well and the outputs are as the operator says."""
    operation = OPERATIONS[name]
    assert isinstance(operation, TorchOperation)
    assert calls[name]
    refused = 0
    for inputs in calls[name]:
        for i, tensor in enumerate(inputs[: operation.tensors]):
            for wrong in mutations(tensor) if tensor is not None else ():
                given = (*inputs[:i], wrong, *inputs[i + 1 :])
                try:
                    got = operation.operator(*given, "cpu")
                except ValueError:
                    refused += 1
                else:
                    assert [t.shape for t in got] == [torch.Size(shape) for _, shape in operation.outputs(*given)]
    assert refused > 3 * operation.tensors


@pytest.mark.parametrize("name", OPERATORS)
def test_kinds(name, calls):
    operation = OPERATIONS[name]
    assert isinstance(operation, TorchOperation)
    for inputs in calls[name]:
        for i, tensor in enumerate(inputs[: operation.tensors]):
            if tensor is None:
                continue
            own = operation.names[i]
            wrong = {tensor.double(): "float64", tensor.to(torch.complex64): "complex64"}
            if tensor.is_floating_point() and name != "ssd":
                wrong |= {tensor.long(): f"{own} is", tensor.half(): f"{own} is"}
            elif tensor.is_floating_point():
                wrong |= {tensor.long(): f"{own} is"}
            for other, told in wrong.items():
                with pytest.raises(ValueError, match=told):
                    operation.operator(*inputs[:i], other, *inputs[i + 1 :], "cpu")
            # A subclass with numbers is asked for them.
            got = operation.operator(*inputs[:i], Wrapped(tensor), *inputs[i + 1 :], "cpu")
            check(0, dict(enumerate(got)), dict(enumerate(operation.operator(*inputs, "cpu"))))


@pytest.mark.parametrize("name", [n for n in OPERATORS if OPERATIONS[n].floats])  # type: ignore[attr-defined]
def test_gradients(name, calls):
    operation = OPERATIONS[name]
    assert isinstance(operation, TorchOperation)
    needs = [True] * operation.floats
    for inputs in calls[name]:
        grads = [torch.randn(shape) for _, shape in operation.outputs(*inputs)]
        operation.operator_backward(grads, *inputs, needs, "cpu")
        for i, grad in enumerate(grads):
            for wrong in (grad[:-1], torch.cat([grad, grad]), grad.double(), grad[None], None):
                with pytest.raises(ValueError, match=rf"grads\[{i}\]|float64|gradient of every output"):
                    operation.operator_backward([*grads[:i], wrong, *grads[i + 1 :]], *inputs, needs, "cpu")
        with pytest.raises(ValueError, match="entries in needs"):
            operation.operator_backward(grads, *inputs, needs[1:], "cpu")
        with pytest.raises(ValueError, match="gradient of every output"):
            operation.operator_backward(grads[1:], *inputs, needs, "cpu")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", OPERATORS)
def test_absent_tensors(name, device, calls):
    """torch hands on None for any tensor; what is optional has an empty gradient."""
    operation = OPERATIONS[name]
    assert isinstance(operation, TorchOperation)
    for inputs in calls[name]:
        given = [t.to(device) if isinstance(t, Tensor) else t for t in inputs]
        for i in operation.required:
            without = (*given[:i], None, *given[i + 1 :])
            with pytest.raises(ValueError, match=rf"{operation.names[i]} of {name} has to be a tensor, got None"):
                operation.operator(*without, "cpu")
            if operation.floats:
                with pytest.raises(ValueError, match=r"has to be a tensor, got None"):
                    operation.operator_backward([], *without, [True] * operation.floats, "cpu")
        if operation.floats:
            grads = [torch.randn(shape, device=device) for _, shape in operation.outputs(*inputs)]
            found = operation.operator_backward(grads, *given, [True] * operation.floats, "cpu")
            want = [(0,) if t is None else t.shape for t in inputs[: operation.floats]]
            assert [tuple(d.shape) for d in found] == list(map(tuple, want))


@pytest.mark.parametrize(
    "name", ["causal_conv", "expand_ranks", "finish", "mamba2_step", "mamba3_prepare", "quaternion_prepare"]
)
def test_axes_of_tensors_without_numbers(name, calls):
    operation = OPERATIONS[name]
    assert isinstance(operation, TorchOperation)
    inputs = [t.to("meta") if isinstance(t, Tensor) else t for t in calls[name][0]]
    first = inputs[0]
    assert first is not None
    with pytest.raises(ValueError, match=f"{name} needs other axes than these"):
        operation.operator(first[(0,) * first.dim()], *inputs[1:], "cpu")


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("causal_conv", "widths", [3], r"widths \[3\] are not parts of the 6 channels"),
        ("causal_conv", "widths", [9, -3], r"widths \[9, -3\] are not parts"),
        ("finish", "group", 5, "group_size = 5 does not divide"),
        ("finish", "group", 0, "group_size = 0 does not divide"),
        ("finish", "order", 7, "order is 7, expected 0"),
        ("ssd", "chunk_len", -1, "chunk_len is -1"),
        ("mamba2_step", "norm_group", 0, "norm over 0 channels"),
        ("mamba3_step", "angles", -2, "-2 angles"),
        ("few_rows", "format", 9, "format is 9, expected one of"),
        ("few_rows", "group", 48, "in groups of 48"),
    ],
)
def test_options(name, option, value, message, calls):
    operation = OPERATIONS[name]
    assert isinstance(operation, TorchOperation)
    at = operation.names.index(option)
    inputs = calls[name][0]
    with pytest.raises(ValueError, match=message):
        operation.operator(*inputs[:at], value, *inputs[at + 1 :], "cpu")
