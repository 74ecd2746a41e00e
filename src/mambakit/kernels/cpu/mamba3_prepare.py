"""Mamba-3's B and C, normed, biased and turned, and all gradients from the inputs alone.

Everything is float32 but the running angles; see `mamba3_prepare.h` and `rotation.h`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import kernel, pointer
from mambakit.kernels.cpu.pages import empty
from mambakit.ops.mamba3_prepare import MAMBA3_PREPARE

# Tokens of a block, as in rotation.h.
BLOCK = 64
# batch, length, heads, angles, ranks, groups, state, neighbours, eps; B, C and rot with their strides, weights and
# biases; dt, range, angles before, segments; room for the angles before each block.
INPUTS = "iiiiiiiif" + "piipp" + "piipp" + "pii" + "pdpp" + "p"


def prepare(*inputs: Any) -> list[Tensor]:
    given = Inputs(*inputs)
    outputs = [empty(*shape) for shape in given.output_shapes()]
    kernel("mamba3_prepare", INPUTS + "ppp")(*given.arguments(), *map(pointer, outputs))
    return outputs


def prepare_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor]:
    *inputs, _ = inputs_and_needs
    b_bsmgr, c_bsmgr, *_, rot_bsa, dt_bsh = inputs[:8]
    given = Inputs(*inputs)
    b, s, h, a, m, _, r = given.sizes
    d_theta_bsha = empty(b, s, h, a)
    d_b, d_c, d_rot, d_dt = (empty(*t.shape) for t in (b_bsmgr, c_bsmgr, rot_bsa, dt_bsh))
    d_angle_bha, sums = dt_bsh.new_empty(b, h, a), dt_bsh.new_empty(2 * (h * m + 1) * r)
    d_outputs = [None if d is None else d.contiguous() for d in grads]
    outputs = (d_theta_bsha, d_b, d_c, d_rot, d_dt, d_angle_bha, sums)
    kernel("mamba3_prepare_backward", INPUTS + "ppp" + "ppppppp")(
        *given.arguments(), *map(pointer, d_outputs), *map(pointer, outputs)
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

    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        b, s, h, a, m, _, r = self.sizes
        return (b, s, m, h, r), (b, s, m, h, r), (b, h, a)

    def arguments(self) -> tuple[Any, ...]:
        eps, rotation_range, neighbours = self.options
        b_weight, c_weight, b_bias, c_bias = map(pointer, self.parameters)
        return (
            *(*self.sizes, neighbours, eps),
            *(pointer(self.b), *self.b.stride()[:2], b_weight, b_bias),
            *(pointer(self.c), *self.c.stride()[:2], c_weight, c_bias),
            *(pointer(self.rot), *self.rot.stride()[:2]),
            *(pointer(self.dt), rotation_range * math.pi, pointer(self.angle), pointer(self.segments)),
            pointer(self.entering),
        )


def tokens_in_one_piece(x_bsX: Tensor) -> Tensor:
    """`x` itself if each token's channels follow each other; tokens and rows may lie anywhere."""
    width = 1
    for size, stride in zip(reversed(x_bsX.shape[2:]), reversed(x_bsX.stride()[2:]), strict=True):
        if size != 1 and stride != width:
            return x_bsX.contiguous()
        width *= size
    return x_bsX


MAMBA3_PREPARE.implement(CPU, prepare, prepare_backward, casts=True)
