"""The torch operators are open to everyone: what does not fit is named, and never reaches a kernel."""

import pytest
import torch
from torch import Tensor

from blocks import FAMILIES, make_block, random_cache, tokens
from calls import OPERATIONS as CALLS
from calls import Wrapped, tensors_of
from compare import check
from mambakit import quantize
from mambakit.kernels.cpu.library import why_missing
from mambakit.ops.operation import OPERATIONS, Kernel, TorchOperation

pytestmark = pytest.mark.skipif(why_missing() is not None, reason="the kernels are not built")

OPERATORS = [name for name, made in OPERATIONS.items() if isinstance(made, TorchOperation) and "cpu" in made.kernels]


@pytest.fixture(scope="module")
def calls() -> dict[str, list[tuple]]:
    """Right inputs of every operator, as operations and steps hand them to its kernel."""
    found: dict[str, list[tuple]] = {name: [] for name in OPERATORS}

    def recorded(kernel: Kernel, *inputs):
        if kernel.operation.name in found:
            inputs = tuple(
                t.float() if isinstance(t, Tensor) and kernel.casts and t.is_floating_point() else t for t in inputs
            )
            found[kernel.operation.name].append(inputs)
        return call(kernel, *inputs)

    call, Kernel.__call__ = Kernel.__call__, recorded
    try:
        with torch.no_grad():
            for name, operation in CALLS.items():
                operation(**tensors_of(name))
            for name in FAMILIES:
                block = make_block(name, torch.float32)
                for made in (block, *(quantize(block, bits) for bits in (16, 8, 4))):
                    made.step(tokens(block, 2, 1)[:, 0], random_cache(block, 2))
            for name in ("mamba1", "mamba2-learned", "mamba3-burn"):
                block, reset_b = make_block(name, torch.float32), torch.tensor([True, False])
                block.step(tokens(block, 2, 1)[:, 0], random_cache(block, 2), reset_b=reset_b)
    finally:
        Kernel.__call__ = call
    return found


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
