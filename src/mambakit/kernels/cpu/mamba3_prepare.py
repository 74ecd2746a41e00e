"""Mamba-3's B and C as two operators: normed, biased and turned, and all gradients from the inputs alone.

Everything is float32 but the running angles; see `mamba3_prepare.h` and `rotation.h`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.library import kernel, pointer
from mambakit.kernels.cpu.pages import empty

# Tokens of a block, as in rotation.h.
BLOCK = 64
# batch, length, heads, angles, ranks, groups, state, neighbours, eps; B, C and rot with their strides, weights and
# biases; dt, range, angles before, segments; room for the angles before each block.
INPUTS = "iiiiiiiif" + "piipp" + "piipp" + "pii" + "pdpp" + "p"


@torch.library.custom_op("mambakit::mamba3_prepare_cpu", mutates_args=())
def mamba3_prepare_cpu(
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    b_weight_r: Tensor,
    c_weight_r: Tensor,
    b_bias_hmr: Tensor,
    c_bias_hmr: Tensor,
    rot_bsa: Tensor,
    dt_bsh: Tensor,
    angle_bha: Tensor | None,
    segments_bs: Tensor | None,
    eps: float,
    rotation_range: float,
    neighbours: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """B and C per head, `[b, s, m, h, r]`, and the angles after the last token."""
    given = Inputs(
        (b_bsmgr, c_bsmgr, b_weight_r, c_weight_r, b_bias_hmr, c_bias_hmr, rot_bsa, dt_bsh),
        angle_bha,
        segments_bs,
        (eps, rotation_range, neighbours),
    )
    outputs = [empty(*shape) for shape in given.output_shapes()]
    kernel("mamba3_prepare", INPUTS + "ppp")(*given.arguments(), *map(pointer, outputs))
    return outputs[0], outputs[1], outputs[2]


@torch.library.custom_op("mambakit::mamba3_prepare_backward_cpu", mutates_args=())
def mamba3_prepare_backward_cpu(
    d_b_bsmhr: Tensor,
    d_c_bsmhr: Tensor,
    d_last_bha: Tensor | None,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    b_weight_r: Tensor,
    c_weight_r: Tensor,
    b_bias_hmr: Tensor,
    c_bias_hmr: Tensor,
    rot_bsa: Tensor,
    dt_bsh: Tensor,
    angle_bha: Tensor | None,
    segments_bs: Tensor | None,
    eps: float,
    rotation_range: float,
    neighbours: bool,
) -> list[Tensor]:
    """Gradients of the floating-point inputs in their order, that of the angles also where none were given."""
    tensors = (b_bsmgr, c_bsmgr, b_weight_r, c_weight_r, b_bias_hmr, c_bias_hmr, rot_bsa, dt_bsh)
    given = Inputs(tensors, angle_bha, segments_bs, (eps, rotation_range, neighbours))
    b, s, h, a, m, _, r = given.sizes
    d_theta_bsha = empty(b, s, h, a)
    d_b, d_c, d_rot, d_dt = (empty(*t.shape) for t in (b_bsmgr, c_bsmgr, rot_bsa, dt_bsh))
    d_angle_bha, sums = dt_bsh.new_empty(b, h, a), dt_bsh.new_empty(2 * (h * m + 1) * r)
    d_outputs = [None if d is None else d.contiguous() for d in (d_b_bsmhr, d_c_bsmhr, d_last_bha)]
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

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        angle_bha: Tensor | None,
        segments_bs: Tensor | None,
        options: tuple[float, float, bool],
    ) -> None:
        b_bsmgr, c_bsmgr, *parameters, rot_bsa, dt_bsh = tensors
        self.b, self.c, self.rot = (
            tokens_in_one_piece(b_bsmgr),
            tokens_in_one_piece(c_bsmgr),
            tokens_in_one_piece(rot_bsa),
        )
        self.parameters = [t.contiguous() for t in parameters]
        self.dt, self.options = dt_bsh.contiguous(), options
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


@mamba3_prepare_cpu.register_fake
def _(b_bsmgr, c_bsmgr, b_weight_r, c_weight_r, b_bias_hmr, c_bias_hmr, rot_bsa, dt_bsh, *others):
    b, s, m, _, r = b_bsmgr.shape
    h, a = dt_bsh.shape[2], rot_bsa.shape[2]
    return b_bsmgr.new_empty(b, s, m, h, r), c_bsmgr.new_empty(b, s, m, h, r), dt_bsh.new_empty(b, h, a)


@mamba3_prepare_backward_cpu.register_fake
def _(d_b_bsmhr, d_c_bsmhr, d_last_bha, *inputs):
    dt_bsh, rot_bsa = inputs[7], inputs[6]
    angle_bha = dt_bsh.new_empty(dt_bsh.shape[0], dt_bsh.shape[2], rot_bsa.shape[2])
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*inputs[:8], angle_bha)]


def _keep_inputs(ctx, inputs, output):
    *tensors, eps, rotation_range, neighbours = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = (eps, rotation_range, neighbours)


def _backward(ctx, d_b_bsmhr, d_c_bsmhr, d_last_bha):
    grads = mamba3_prepare_backward_cpu(d_b_bsmhr, d_c_bsmhr, d_last_bha, *ctx.saved_tensors, *ctx.options)
    wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None, None, None


mamba3_prepare_cpu.register_autograd(_backward, setup_context=_keep_inputs)
