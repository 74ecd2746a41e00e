"""The SSD core on the fused CPU kernels: `serial_recalculated` as two torch operators, forward and backward.

Same contract as the plain twin, `ops/ssd_recalculated.py`; float32 inside, whatever floats come in.
"""

import ctypes

import torch
from torch import Tensor

from mambakit.ops.kernels.cpu.library import kernel, pointer
from mambakit.ops.ssd_recalculated import ssd_recalculated_backward

# Rows (tokens times ranks) of a chunk when the caller gives no length; see docs/algorithms.md, "The cpu backend".
CHUNK_ROWS = 64


def default_chunk_len(rank: int) -> int:
    """Tokens per chunk: the ranks of a token are rows of the same products, so several take as many fewer tokens."""
    return max(CHUNK_ROWS // max(rank, 1), 1)


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


def _in_place(tensor: Tensor) -> Tensor:
    """In float32 with contiguous inner axes: as it is if it may be, so that views of a projection are not copied."""
    tensor = tensor.to(torch.float32)
    return tensor if tensor[0, 0].is_contiguous() else tensor.contiguous()


class _Call:
    """The arguments of one call, and the tensors they point into."""

    def __init__(self, sequence: tuple[Tensor, ...], state_bhpr: Tensor, segments_bs: Tensor | None, chunk_len: int):
        self.sequence = [_in_place(tensor) for tensor in sequence]
        self.state_bhpr = state_bhpr.to(torch.float32).contiguous()
        self.segments_bs = None if segments_bs is None else segments_bs.to(torch.int64).contiguous()
        b, s, m, h, p = sequence[0].shape
        g, r = sequence[1].shape[3:]
        self.arguments = _Arguments(
            *(b, s, m, h, p, g, r, min(chunk_len or default_chunk_len(m), s)),
            *map(_Sequence.of, self.sequence),
            pointer(self.segments_bs),
            pointer(self.state_bhpr),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.arguments)


@torch.library.custom_op("mambakit::ssd_cpu", mutates_args=(), device_types="cpu")
def ssd_cpu(
    v_bsmhp: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    da_bsh: Tensor,
    w_now_bsh: Tensor,
    w_later_bsh: Tensor,
    state_bhpr: Tensor,
    segments_bs: Tensor | None,
    chunk_len: int,
) -> tuple[Tensor, Tensor]:
    """`ssd` for a non-empty sequence. `chunk_len` 0 leaves the choice to the kernel."""
    call = _Call((v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, w_now_bsh, w_later_bsh), state_bhpr, segments_bs, chunk_len)
    y_bsmhp = torch.empty(v_bsmhp.shape, dtype=torch.float32)
    last_bhpr = torch.empty(state_bhpr.shape, dtype=torch.float32)
    kernel("ssd_forward", "ppp")(call.address, pointer(y_bsmhp), pointer(last_bhpr))
    return y_bsmhp.to(v_bsmhp.dtype), last_bhpr


@ssd_cpu.register_fake
def _(v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, w_now_bsh, w_later_bsh, state_bhpr, segments_bs, chunk_len):
    return v_bsmhp.new_empty(v_bsmhp.shape), state_bhpr.new_empty(state_bhpr.shape, dtype=torch.float32)


def _keep_inputs(ctx, inputs, output):
    *tensors, segments_bs, chunk_len = inputs
    ctx.save_for_backward(*tensors, segments_bs)
    ctx.chunk_len = chunk_len


def _backward(ctx, d_y_bsmhp, d_last_bhpr):
    chunk_len = min(ctx.chunk_len or default_chunk_len(d_y_bsmhp.shape[2]), d_y_bsmhp.shape[1])
    grads = ssd_recalculated_backward(d_y_bsmhp, d_last_bhpr, *ctx.saved_tensors, chunk_len)
    wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None


ssd_cpu.register_autograd(_backward, setup_context=_keep_inputs)
