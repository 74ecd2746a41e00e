"""The SSD core on the fused CPU kernels: `serial_recalculated` as two torch operators, forward and backward.

Same contract as the plain twin, `ops/ssd_recalculated.py`; float32 inside, whatever floats come in.
"""

import ctypes

import torch
from torch import Tensor

from mambakit.kernels.cpu.library import kernel, pointer
from mambakit.kernels.cpu.pages import empty

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

    def __init__(self, sequence: tuple[Tensor, ...], state_bhpr: Tensor, segments_bs: Tensor | None, chunk_len: int):
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
    chunk_len = chunk_len or tokens_of(FORWARD_ROWS, v_bsmhp)
    call = _Call((v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, w_now_bsh, w_later_bsh), state_bhpr, segments_bs, chunk_len)
    y_bsmhp = empty(*v_bsmhp.shape)
    last_bhpr = torch.empty(state_bhpr.shape, dtype=torch.float32)
    kernel("ssd_forward", "ppp")(call.address, pointer(y_bsmhp), pointer(last_bhpr))
    return y_bsmhp.to(v_bsmhp.dtype), last_bhpr


@torch.library.custom_op("mambakit::ssd_cpu_backward", mutates_args=(), device_types="cpu")
def ssd_cpu_backward(
    d_y_bsmhp: Tensor,
    d_last_bhpr: Tensor,
    v_bsmhp: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    da_bsh: Tensor,
    w_now_bsh: Tensor,
    w_later_bsh: Tensor,
    state_bhpr: Tensor,
    segments_bs: Tensor | None,
    chunk_len: int,
) -> list[Tensor]:
    """Gradients of the seven tensors of `ssd_cpu`, in its order."""
    inputs = (v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, w_now_bsh, w_later_bsh, state_bhpr)
    call = _Call(inputs[:6], state_bhpr, segments_bs, chunk_len or tokens_of(BACKWARD_ROWS, v_bsmhp))
    grads = [empty(*tensor.shape) for tensor in inputs]
    d_y_bsmhp, d_last_bhpr = _in_place(d_y_bsmhp), d_last_bhpr.to(torch.float32).contiguous()
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


@ssd_cpu.register_fake
def _(v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, w_now_bsh, w_later_bsh, state_bhpr, segments_bs, chunk_len):
    return v_bsmhp.new_empty(v_bsmhp.shape), state_bhpr.new_empty(state_bhpr.shape, dtype=torch.float32)


@ssd_cpu_backward.register_fake
def _(d_y_bsmhp, d_last_bhpr, *inputs_and_options):
    return [tensor.new_empty(tensor.shape) for tensor in inputs_and_options[:7]]


def _keep_inputs(ctx, inputs, output):
    *tensors, segments_bs, chunk_len = inputs
    ctx.save_for_backward(*tensors, segments_bs)
    ctx.chunk_len = chunk_len


def _backward(ctx, d_y_bsmhp, d_last_bhpr):
    grads = ssd_cpu_backward(d_y_bsmhp, d_last_bhpr, *ctx.saved_tensors, ctx.chunk_len)
    wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None


ssd_cpu.register_autograd(_backward, setup_context=_keep_inputs)
