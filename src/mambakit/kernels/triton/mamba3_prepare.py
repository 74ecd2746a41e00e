"""Mamba-3's B and C, normed, biased and turned: outputs, and all gradients from the inputs alone.

The running angles are sums in float64 over tokens, for torch's own scan.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.triton.backend import implement
from mambakit.kernels.triton.launch import launch, parts, power_of_two
from mambakit.kernels.triton.tiles import why_refused
from mambakit.ops.mamba3_prepare import MAMBA3_PREPARE
from mambakit.ops.rotation import running_angle
from mambakit.ops.segments import before_segment

WIDEST = 1024
"""Longest state axis: a tile holds all of it."""
ELEMENTS, TOKENS = 2048, 32
"""Most entries and most tokens of a tile: short states in more tokens spill."""


class Inputs:
    """What the kernels read, laid out as they read it."""

    def __init__(self, *inputs: Any):
        *tensors, rot_bsa, dt_bsh, angle_bha, segments_bs, self.eps, rotation_range, neighbours = inputs
        self.b, self.c, self.b_weight, self.c_weight, self.b_bias, self.c_bias = (t.contiguous() for t in tensors)
        self.angles = (rot_bsa, dt_bsh, rotation_range, angle_bha)
        self.segments = segments_bs
        (b, s, m, g, r), h, a = tensors[0].shape, dt_bsh.shape[2], rot_bsa.shape[2]
        self.n, self.programs = b * s, m * g
        block = max(power_of_two(r), 16)
        self.rows = min(max(ELEMENTS // block, 4), TOKENS)
        self.sizes = {"M": m, "G": g, "H": h, "R": r, "A": a, "NEIGHBOURS": neighbours, "BN": self.rows, "BR": block}

    @property
    def tiles(self) -> int:
        return parts(self.n, self.rows)

    def turn(self) -> tuple[Tensor, Tensor]:
        """The angle at every token and after the last."""
        angle_bsha, last_bha = running_angle(*self.angles, segments_bs=self.segments)
        return angle_bsha.contiguous(), last_bha


def prepare(*inputs: Any) -> list[Tensor]:
    given = Inputs(*inputs)
    angle_bsha, last_bha = given.turn()
    found, (b, s, m, _, r) = [], given.b.shape
    for x, weight, bias in ((given.b, given.b_weight, given.b_bias), (given.c, given.c_weight, given.c_bias)):
        found.append(x.new_empty(b, s, m, angle_bsha.shape[2], r))
        tensors = (x, weight, bias, angle_bsha, found[-1])
        launch("mamba3_prepare.prepare", given.tiles * given.programs, *tensors, given.n, given.eps, **given.sizes)
    return [*found, last_bha.to(inputs[7].dtype)]


def prepare_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor | None]:
    *inputs, _ = inputs_and_needs
    given = Inputs(*inputs)
    size, tiles = given.sizes, given.tiles
    m, g, h, r, a = (size[name] for name in "MGHRA")
    d_b_out, d_c_out, d_last = (grad.contiguous() for grad in grads)
    angle_bsha, _ = given.turn()
    numbers, d_x, d_weights, d_biases = (given.n, given.eps), [], [], []
    for x, weight, d_out in ((given.b, given.b_weight, d_b_out), (given.c, given.c_weight, d_c_out)):
        d_bias, d_weight = (d_out.new_empty(tiles, *shape, r, dtype=torch.float32) for shape in ((h, m), (m, g)))
        d_x.append(torch.empty_like(x))
        tensors = (x, weight, angle_bsha, d_out, d_x[-1], d_bias, d_weight)
        launch("mamba3_prepare.grad_vectors", tiles * given.programs, *tensors, *numbers, **size)
        d_weights.append(d_weight.sum((0, 1, 2)))
        d_biases.append(d_bias.sum(0))
    d_angle = torch.empty_like(angle_bsha, dtype=torch.float32)
    tensors = (given.b, given.c, given.b_weight, given.c_weight, given.b_bias, given.c_bias, angle_bsha)
    block = max(power_of_two(a), 16)
    into = (d_b_out, d_c_out, d_angle)
    launch("mamba3_prepare.grad_angles", tiles * h if a else 0, *tensors, *into, *numbers, BA=block, **size)
    d_turned = turn_backward(d_angle, d_last, *given.angles, given.segments)
    every = (*d_x, *d_weights, *d_biases, *d_turned)
    return [None if d is None else d.to(t.dtype) for d, t in zip(every, inputs, strict=False)]


def turn_backward(
    d_angle_bsha: Tensor,
    d_last_bha: Tensor,
    rot_bsa: Tensor,
    dt_bsh: Tensor,
    rotation_range: float,
    angle_bha: Tensor | None,
    segments_bs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `running_angle`: a token's turn counts for every later angle of its segment."""
    if rot_bsa.shape[1] == 0:
        return torch.zeros_like(rot_bsa), torch.zeros_like(dt_bsh), None if angle_bha is None else d_last_bha.clone()
    d_wide = d_angle_bsha.to(torch.float64)
    d_wide[:, -1] += d_last_bha
    later_bsha = d_wide.flip(1).cumsum(1)
    if segments_bs is not None:
        later_bsha = later_bsha - before_segment(later_bsha, segments_bs.flip(1), later_bsha.new_zeros(()))
    d_turn_bsha = later_bsha.flip(1)
    tanh_bsa = torch.tanh(rot_bsa.to(torch.float64))
    scale = rotation_range * math.pi
    d_dt_bsh = (d_turn_bsha * (scale * tanh_bsa)[:, :, None]).sum(3)
    d_rate_bsa = (d_turn_bsha * dt_bsh[..., None]).sum(2)
    d_rot_bsa = d_rate_bsa * scale * (1 - tanh_bsa.square())
    return d_rot_bsa, d_dt_bsh, None if angle_bha is None else d_turn_bsha[:, 0].clone()


def why_not(b_bsmgr: Tensor, *_: Any) -> str | None:
    m, r = b_bsmgr.shape[2], b_bsmgr.shape[4]
    if r > WIDEST:
        return f"it got states of {r}, at most {WIDEST} fit"
    return why_refused(f"mamba3_prepare {r}, ranks {m}", b_bsmgr.dtype, b_bsmgr.device)


implement(MAMBA3_PREPARE, prepare, prepare_backward, why_not)
