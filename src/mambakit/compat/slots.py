"""Rows of a batch whose states are some rows of a larger one, as a server for many requests keeps them."""

import torch
from torch import Tensor

from mambakit.compat.arguments import COMPLEX
from mambakit.ops.shapes import FLOATS, INTEGERS, check_readable


def check_writable(name: str, tensor: Tensor) -> None:
    """That every entry has memory of its own."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{name} of strides {tensor.stride()} has entries in the same memory; clone() it first")


class Slots:
    """The row of the state that each row of the batch continues; None: the same one.

    A negative one is padding, which has no state: it reads any, writes none, and its output is zero.
    """

    def __init__(self, name: str, slot_b: Tensor | None, state: Tensor, x: Tensor):
        self.slot_b = None
        if not x.dim() or not state.dim():
            raise ValueError(f"x has shape {tuple(x.shape)} and the state {tuple(state.shape)}, expected rows in both")
        if state.dtype not in (*FLOATS, *COMPLEX):
            raise ValueError(f"the state is {state.dtype}, expected floating-point numbers")
        batch = len(x)
        check_writable("a state", state)
        if slot_b is None:
            return
        check_readable(name, slot_b)
        if tuple(slot_b.shape) != (batch,) or slot_b.dtype not in INTEGERS:
            given = f"{slot_b.dtype} of shape {tuple(slot_b.shape)}"
            raise ValueError(f"{name} is {given}, expected {batch} integers: a row of the state for each row of x")
        if not torch.compiler.is_compiling() and batch and int(slot_b.max()) >= len(state):
            raise ValueError(f"{name} goes up to {int(slot_b.max())}, but the state has {len(state)} rows")
        self.slot_b, self.is_there_b = slot_b.long(), slot_b >= 0

    def read(self, state: Tensor) -> Tensor:
        if self.slot_b is not None and not len(state):  # all of the batch is padding
            return state.new_zeros(len(self.slot_b), *state.shape[1:])
        if self.slot_b is not None:
            return state[self.slot_b.clamp(min=0)]
        # It is written to afterwards, and what autograd keeps of it has to stay.
        return state.clone() if torch.is_grad_enabled() else state

    def write(self, state: Tensor, rows: Tensor) -> None:
        if self.slot_b is None:
            state.copy_(rows)
        else:
            state[self.slot_b[self.is_there_b]] = rows[self.is_there_b].to(state.dtype)

    def hide(self, out: Tensor) -> Tensor:
        """The outputs without those of padding."""
        if self.slot_b is None:
            return out
        return out.masked_fill(~self.is_there_b.view(-1, *[1] * (out.dim() - 1)), 0)
