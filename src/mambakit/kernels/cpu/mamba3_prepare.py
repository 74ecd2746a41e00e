"""Mamba-3's B and C, normed, biased and turned, and all gradients from the inputs alone.

Everything is float32 but the running angles, and B and C where they come in bfloat16; see `mamba3_prepare.h` and
`rotation.h`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.pages import empty
from mambakit.kernels.cpu.structs import Pairs, Prepare, PrepareBackward, PrepareForward, Side, Turns
from mambakit.ops.mamba3_prepare import MAMBA3_PREPARE

# Tokens of a block, as in rotation.h.
BLOCK = 64


def prepare(*inputs: Any) -> list[Tensor]:
    given = Inputs(*inputs)
    b, s, h, a, m, _, r = given.sizes
    b_bsmhr, c_bsmhr = (empty(b, s, m, h, r, dtype=given.b.dtype) for _ in range(2))
    after_bha = empty(b, h, a)
    run(PrepareForward(inputs=given.arguments(), b=pointer(b_bsmhr), c=pointer(c_bsmhr), after=pointer(after_bha)))
    return [b_bsmhr, c_bsmhr, after_bha]


def prepare_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor]:
    *inputs, _ = inputs_and_needs
    b_bsmgr, c_bsmgr, *_, rot_bsa, dt_bsh = inputs[:8]
    given = Inputs(*inputs)
    b, s, h, a, m, _, r = given.sizes
    d_theta_bsha = empty(b, s, h, a)
    d_b, d_c, d_rot, d_dt = (empty(*t.shape, dtype=t.dtype) for t in (b_bsmgr, c_bsmgr, rot_bsa, dt_bsh))
    d_angle_bha, sums = dt_bsh.new_empty(b, h, a), dt_bsh.new_empty(2 * (h * m + 1) * r)
    d_b_out, d_c_out, d_after = (None if d is None else d.contiguous() for d in grads)
    run(
        PrepareBackward(
            inputs=given.arguments(),
            d_b_out=pointer(d_b_out),
            d_c_out=pointer(d_c_out),
            d_after=pointer(d_after),
            d_theta=pointer(d_theta_bsha),
            d_b=pointer(d_b),
            d_c=pointer(d_c),
            d_rot=pointer(d_rot),
            d_dt=pointer(d_dt),
            d_before=pointer(d_angle_bha),
            sums=pointer(sums),
        )
    )
    # Copies, because an operator may not return views of one tensor.
    d_biases, d_weights = sums.split((2 * h * m * r, 2 * r))
    d_bias = [d.clone() for d in d_biases.view(2, h, m, r)]
    d_weight = [d.clone() for d in d_weights.view(2, r)]
    return [d_b, d_c, *d_weight, *d_bias, d_rot, d_dt, d_angle_bha]


class Inputs:
    """What both kernels read, laid out as they read it."""

    def __init__(self, *inputs: Any) -> None:
        b_bsmgr, c_bsmgr, *parameters, rot_bsa, dt_bsh, angle_bha, segments_bs = inputs[:10]
        self.b, self.c, self.rot = (
            tokens_in_one_piece(b_bsmgr),
            tokens_in_one_piece(c_bsmgr),
            tokens_in_one_piece(rot_bsa),
        )
        self.parameters = [t.contiguous() for t in parameters]
        self.dt, self.options = dt_bsh.contiguous(), inputs[10:]
        self.angle = None if angle_bha is None else angle_bha.contiguous()
        self.segments = None if segments_bs is None else segments_bs.to(torch.int64).contiguous()
        b, s, m, g, r = b_bsmgr.shape
        h, a = dt_bsh.shape[2], rot_bsa.shape[2]
        self.sizes = (b, s, h, a, m, g, r)
        self.entering = torch.empty(b, max(-(-s // BLOCK), 1), h, a, dtype=torch.float64)

    def arguments(self) -> Prepare:
        b, s, h, a, m, g, r = self.sizes
        eps, rotation_range, neighbours = self.options
        b_weight, c_weight, b_bias, c_bias = self.parameters
        turns = Turns(
            batch=b,
            length=s,
            heads=h,
            angles=a,
            rot=pointer(self.rot),
            rot_batch=self.rot.stride(0),
            rot_token=self.rot.stride(1),
            dt=pointer(self.dt),
            range=rotation_range * math.pi,
            before=pointer(self.angle),
            segments=pointer(self.segments),
        )
        return Prepare(
            turns=turns,
            pairs=Pairs(state=r, angles=a, neighbours=neighbours),
            ranks=m,
            groups=g,
            eps=eps,
            b=side(self.b, b_weight, b_bias),
            c=side(self.c, c_weight, c_bias),
            entering=pointer(self.entering),
            narrow=self.b.dtype == torch.bfloat16,
        )


def side(x_bsmgr: Tensor, weight_r: Tensor, bias_hmr: Tensor) -> Side:
    return Side(
        x=pointer(x_bsmgr),
        x_batch=x_bsmgr.stride(0),
        x_token=x_bsmgr.stride(1),
        weight=pointer(weight_r),
        bias=pointer(bias_hmr),
    )


def tokens_in_one_piece(x_bsX: Tensor) -> Tensor:
    """`x` itself if each token's channels follow each other; tokens and rows may lie anywhere."""
    width = 1
    for size, stride in zip(reversed(x_bsX.shape[2:]), reversed(x_bsX.stride()[2:]), strict=True):
        if size != 1 and stride != width:
            return x_bsX.contiguous()
        width *= size
    return x_bsX


MAMBA3_PREPARE.implement(CPU, prepare, prepare_backward, casts=True, narrow=(0, 1))
