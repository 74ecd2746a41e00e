"""The SSD core, `serial_recalculated`: float32 inside, whatever floats come in."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import kernel, pointer
from mambakit.kernels.cpu.pages import empty
from mambakit.ops.ssd import SSD

# Rows (tokens times ranks) of a chunk when the caller gives no length; see docs/algorithms.md, "The cpu backend". The
# backward keeps a state per chunk for a while, so it takes longer ones.
FORWARD_ROWS = 32
BACKWARD_ROWS = 64


class _Sequence(ctypes.Structure):
    """`Sequence` of csrc/ssd.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("data", "batch_stride", "token_stride")]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Sequence":
        return cls(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


class _Arguments(ctypes.Structure):
    """`Arguments` of csrc/ssd.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("b", "s", "m", "h", "p", "g", "r", "chunk_len")),
        *((name, _Sequence) for name in ("v_bsmhp", "b_bsmgr", "c_bsmgr", "da_bsh", "w_now_bsh", "w_later_bsh")),
        ("segments_bs", ctypes.c_void_p),
        ("state_bhpr", ctypes.c_void_p),
    ]


class _Gradients(ctypes.Structure):
    """`Gradients` of csrc/ssd_backward.h."""

    _fields_ = [
        ("d_y_bsmhp", _Sequence),
        ("d_last_bhpr", ctypes.c_void_p),
        *((f"d_{name}", ctypes.c_void_p) for name in ("v", "b", "c", "da", "w_now", "w_later", "state")),
        ("ranges", ctypes.c_int64),
        ("shares", ctypes.c_void_p),
    ]


def tokens_of(rows: int, v_bsmhp: Tensor) -> int:
    """The ranks of a token are rows of the same products, so with several of them a chunk has as many fewer tokens."""
    return max(rows // max(v_bsmhp.shape[2], 1), 1)


def _in_place(tensor: Tensor) -> Tensor:
    """In float32 with contiguous inner axes: as it is if it may be, so that views of a projection are not copied."""
    tensor = tensor.to(torch.float32)
    return tensor if tensor.numel() == 0 or tensor[0, 0].is_contiguous() else tensor.contiguous()


class _Call:
    """The arguments of one call, and the tensors they point into."""

    def __init__(self, sequence: list[Tensor], state_bhpr: Tensor, segments_bs: Tensor | None, chunk_len: int):
        self.sequence = [_in_place(tensor) for tensor in sequence]
        self.state_bhpr = state_bhpr.to(torch.float32).contiguous()
        self.segments_bs = None if segments_bs is None else segments_bs.to(torch.int64).contiguous()
        b, s, m, h, p = sequence[0].shape
        g, r = sequence[1].shape[3:]
        self.arguments = _Arguments(
            *(b, s, m, h, p, g, r, min(chunk_len, s)),
            *map(_Sequence.of, self.sequence),
            pointer(self.segments_bs),
            pointer(self.state_bhpr),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.arguments)


def forward(*inputs: Any) -> list[Tensor]:
    *sequence, state_bhpr, segments_bs, chunk_len = inputs
    v_bsmhp = sequence[0]
    call = _Call(sequence, state_bhpr, segments_bs, chunk_len or tokens_of(FORWARD_ROWS, v_bsmhp))
    y_bsmhp, last_bhpr = empty(*v_bsmhp.shape), torch.empty(state_bhpr.shape)
    kernel("ssd_forward", "ppp")(call.address, pointer(y_bsmhp), pointer(last_bhpr))
    return [y_bsmhp.to(v_bsmhp.dtype), last_bhpr]


def backward(output_grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor]:
    *sequence, state_bhpr, segments_bs, chunk_len, _ = inputs_and_needs
    v_bsmhp, b_bsmgr, _, da_bsh, *_ = sequence
    call = _Call(sequence, state_bhpr, segments_bs, chunk_len or tokens_of(BACKWARD_ROWS, v_bsmhp))
    inputs = (*sequence, state_bhpr)
    grads = [empty(*tensor.shape) for tensor in inputs]
    d_y_bsmhp, d_last_bhpr = _in_place(output_grads[0]), output_grads[1].to(torch.float32).contiguous()
    shares = _shares(b_bsmgr, da_bsh)
    arguments = _Gradients(
        _Sequence.of(d_y_bsmhp),
        pointer(d_last_bhpr),
        *map(pointer, grads),
        len(shares) + 1,
        pointer(shares),
    )
    kernel("ssd_backward", "pp")(call.address, ctypes.addressof(arguments))
    return [grad.to(tensor.dtype) for grad, tensor in zip(grads, inputs, strict=True)]


def _shares(b_bsmgr: Tensor, da_bsh: Tensor) -> Tensor:
    """Room for the gradients of B and C that a range of heads after the first finds for a group begun by another.

    Heads are split into one range per thread; without room needed the tensor only has their number less one.
    """
    b, s, m, g, r = b_bsmgr.shape
    heads, per_group = b * da_bsh.shape[2], da_bsh.shape[2] // g
    ranges = max(min(torch.get_num_threads(), heads), 1)
    split = any((heads * i // ranges) % per_group for i in range(1, ranges))
    return torch.empty(ranges - 1, 2, s * m * r if split else 0)


SSD.implement(CPU, forward, backward)
