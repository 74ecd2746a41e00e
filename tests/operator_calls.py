"""Right inputs of every torch operator, as operations and steps hand them to its kernel."""

import torch
from torch import Tensor

from blocks import FAMILIES, make_block, random_cache, tokens
from calls import OPERATIONS as CALLS
from calls import tensors_of
from mambakit import quantize
from mambakit.ops.operation import OPERATIONS, Kernel, TorchOperation

OPERATORS = [name for name, made in OPERATIONS.items() if isinstance(made, TorchOperation) and "cpu" in made.kernels]


def operator_calls() -> dict[str, list[tuple]]:
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
