"""The SSD core, `serial_recalculated`: states, decays and sums in float32, whatever floats come in.

Values, B and C in bfloat16 are read and written as such; where the processor multiplies bfloat16, they and what meets
them in a product are its factors. See `ssd_factors.h`.
"""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.pages import empty
from mambakit.kernels.cpu.structs import Sequence, Ssd, SsdBackward, SsdForward
from mambakit.ops.ssd import SSD

# Rows (tokens times ranks) of a chunk when the caller gives no length; see docs/algorithms.md, "The cpu backend". The
# backward keeps a state per chunk for a while, so it takes longer ones.
FORWARD_ROWS = 32
BACKWARD_ROWS = 64


def tokens_of(rows: int, v_bsmhp: Tensor) -> int:
    """The ranks of a token are rows of the same products, so with several of them a chunk has as many fewer tokens."""
    return max(rows // max(v_bsmhp.shape[2], 1), 1)


def _in_place(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """In `dtype` with contiguous inner axes: as it is if it may be, so that views of a projection are not copied."""
    tensor = tensor.to(dtype)
    return tensor if tensor.numel() == 0 or tensor[0, 0].is_contiguous() else tensor.contiguous()


def _sequence(tensor: Tensor) -> Sequence:
    return Sequence(data=tensor.data_ptr(), batch_stride=tensor.stride(0), token_stride=tensor.stride(1))


class _Inputs:
    """What both kernels read, and the tensors they point into."""

    def __init__(self, sequence: list[Tensor], state_bhpr: Tensor, segments_bs: Tensor | None, chunk_len: int):
        narrow = all(tensor.dtype == torch.bfloat16 for tensor in sequence[:3])
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.sequence = [*(_in_place(t, self.dtype) for t in sequence[:3]), *map(_in_place, sequence[3:])]
        self.state_bhpr = state_bhpr.to(torch.float32).contiguous()
        self.segments_bs = None if segments_bs is None else segments_bs.to(torch.int64).contiguous()
        b, s, m, h, p = sequence[0].shape
        g, r = sequence[1].shape[3:]
        v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, w_now_bsh, w_later_bsh = map(_sequence, self.sequence)
        self.arguments = Ssd(
            b=b,
            s=s,
            m=m,
            h=h,
            p=p,
            g=g,
            r=r,
            chunk_len=min(chunk_len, s),
            v_bsmhp=v_bsmhp,
            b_bsmgr=b_bsmgr,
            c_bsmgr=c_bsmgr,
            da_bsh=da_bsh,
            w_now_bsh=w_now_bsh,
            w_later_bsh=w_later_bsh,
            segments_bs=pointer(self.segments_bs),
            state_bhpr=pointer(self.state_bhpr),
            narrow=narrow,
        )


def forward(*inputs: Any) -> list[Tensor]:
    *sequence, state_bhpr, segments_bs, chunk_len = inputs
    v_bsmhp = sequence[0]
    given = _Inputs(sequence, state_bhpr, segments_bs, chunk_len or tokens_of(FORWARD_ROWS, v_bsmhp))
    y_bsmhp, last_bhpr = empty(*v_bsmhp.shape, dtype=given.dtype), torch.empty(state_bhpr.shape)
    run(SsdForward(inputs=given.arguments, y_bsmhp=pointer(y_bsmhp), last_bhpr=pointer(last_bhpr)))
    return [y_bsmhp.to(v_bsmhp.dtype), last_bhpr]


def backward(output_grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor]:
    *sequence, state_bhpr, segments_bs, chunk_len, _ = inputs_and_needs
    v_bsmhp, b_bsmgr, _, da_bsh, *_ = sequence
    given = _Inputs(sequence, state_bhpr, segments_bs, chunk_len or tokens_of(BACKWARD_ROWS, v_bsmhp))
    inputs = (*sequence, state_bhpr)
    # Heads of a group add to the same B and C: in float32.
    sides = given.dtype if b_bsmgr.shape[3] == v_bsmhp.shape[3] else torch.float32
    dtypes = (given.dtype, sides, sides, *[torch.float32] * 4)
    grads = [empty(*tensor.shape, dtype=dtype) for tensor, dtype in zip(inputs, dtypes, strict=True)]
    d_y_bsmhp, d_last_bhpr = _in_place(output_grads[0], given.dtype), output_grads[1].to(torch.float32).contiguous()
    shares = _shares(b_bsmgr, da_bsh)
    d_v, d_b, d_c, d_da, d_w_now, d_w_later, d_state = map(pointer, grads)
    run(
        SsdBackward(
            inputs=given.arguments,
            d_y_bsmhp=_sequence(d_y_bsmhp),
            d_last_bhpr=pointer(d_last_bhpr),
            d_v_bsmhp=d_v,
            d_b_bsmgr=d_b,
            d_c_bsmgr=d_c,
            d_da_bsh=d_da,
            d_w_now_bsh=d_w_now,
            d_w_later_bsh=d_w_later,
            d_state_bhpr=d_state,
            narrow_sides=sides == torch.bfloat16,
            ranges=len(shares) + 1,
            shares=pointer(shares),
        )
    )
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
