"""Mamba-3's B and C, normed, biased and turned by quaternions, and all gradients from the inputs alone.

Everything is float32 but the running quaternions, and B and C where they come in bfloat16; see `quaternion_prepare.h`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.mamba3_prepare import side, tokens_in_one_piece
from mambakit.kernels.cpu.pages import empty
from mambakit.kernels.cpu.structs import Pairs, Prepare, QuaternionBackward, QuaternionForward, Turns
from mambakit.ops.quaternion_prepare import QUATERNION_PREPARE


def prepare(*inputs: Any) -> list[Tensor]:
    given = Inputs(*inputs)
    b, s, h, j, m, _, r = given.sizes
    b_bsmhr, c_bsmhr = (empty(b, s, m, h, r, dtype=given.b.dtype) for _ in range(2))
    after_bhj4, running_bshj4 = empty(b, h, j, 4), empty(b, s, h, j, 4)
    run(
        QuaternionForward(
            inputs=given.arguments(),
            running=pointer(running_bshj4),
            b=pointer(b_bsmhr),
            c=pointer(c_bsmhr),
            after=pointer(after_bhj4),
        )
    )
    return [b_bsmhr, c_bsmhr, after_bhj4]


def prepare_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor]:
    *inputs, _ = inputs_and_needs
    b_bsmgr, c_bsmgr, *_, rot_bshj3, dt_bsh = inputs[:8]
    given = Inputs(*inputs)
    b, s, h, j, m, _, r = given.sizes
    running_bshj4, share_bshj3 = empty(b, s, h, j, 4), empty(b, s, h, j, 3)
    d_b, d_c, d_rot, d_dt = (empty(*t.shape, dtype=t.dtype) for t in (b_bsmgr, c_bsmgr, rot_bshj3, dt_bsh))
    d_carry_bhj4, sums = dt_bsh.new_empty(b, h, j, 4), dt_bsh.new_empty(2 * (h * m + 1) * r)
    d_b_out, d_c_out, d_after = (None if d is None else d.contiguous() for d in grads)
    run(
        QuaternionBackward(
            inputs=given.arguments(),
            d_b_out=pointer(d_b_out),
            d_c_out=pointer(d_c_out),
            d_after=pointer(d_after),
            running=pointer(running_bshj4),
            share=pointer(share_bshj3),
            d_b=pointer(d_b),
            d_c=pointer(d_c),
            d_rot=pointer(d_rot),
            d_dt=pointer(d_dt),
            d_before=pointer(d_carry_bhj4),
            sums=pointer(sums),
        )
    )
    # Copies, because an operator may not return views of one tensor.
    d_biases, d_weights = sums.split((2 * h * m * r, 2 * r))
    d_bias = [d.clone() for d in d_biases.view(2, h, m, r)]
    d_weight = [d.clone() for d in d_weights.view(2, r)]
    return [d_b, d_c, *d_weight, *d_bias, d_rot, d_dt, d_carry_bhj4]


class Inputs:
    """What both kernels read, laid out as they read it."""

    def __init__(self, *inputs: Any) -> None:
        b_bsmgr, c_bsmgr, *parameters, rot_bshj3, dt_bsh, carry_bhj4, segments_bs = inputs[:10]
        self.b, self.c, self.rot = map(tokens_in_one_piece, (b_bsmgr, c_bsmgr, rot_bshj3))
        self.parameters = [t.contiguous() for t in parameters]
        self.dt, self.options = dt_bsh.contiguous(), inputs[10:]
        self.carry = None if carry_bhj4 is None else carry_bhj4.contiguous()
        self.segments = None if segments_bs is None else segments_bs.to(torch.int64).contiguous()
        b, s, m, g, r = b_bsmgr.shape
        h, j = rot_bshj3.shape[2:4]
        self.sizes = (b, s, h, j, m, g, r)

    def arguments(self) -> Prepare:
        b, s, h, j, m, g, r = self.sizes
        eps, rotation_range = self.options
        b_weight, c_weight, b_bias, c_bias = self.parameters
        turns = Turns(
            batch=b,
            length=s,
            heads=h,
            angles=j,
            rot=pointer(self.rot),
            rot_batch=self.rot.stride(0),
            rot_token=self.rot.stride(1),
            dt=pointer(self.dt),
            range=rotation_range * math.pi,
            before=pointer(self.carry),
            segments=pointer(self.segments),
        )
        return Prepare(
            turns=turns,
            pairs=Pairs(state=r, angles=j),
            ranks=m,
            groups=g,
            eps=eps,
            b=side(self.b, b_weight, b_bias),
            c=side(self.c, c_weight, c_bias),
            narrow=self.b.dtype == torch.bfloat16,
        )


QUATERNION_PREPARE.implement(CPU, prepare, prepare_backward, casts=True, narrow=(0, 1))
