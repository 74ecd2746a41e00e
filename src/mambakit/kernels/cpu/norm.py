"""Skip, gate, norm and the sum over ranks as two operators: outputs, and all gradients from the inputs alone.

Everything is float32 and in rows of channels; see `norm.h`. Absent parts are None.
"""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.library import kernel, pointer
from mambakit.kernels.cpu.pages import empty

NO_NORM, GATE_FIRST, NORM_FIRST = range(3)

# rows, ranks, width; y, x and z with the strides of their rows; mimo_x, mimo_z, mimo_o, weight; group, order, eps.
INPUTS = "iii" + "pi" + "pip" + "pi" + "pppp" + "iif"


@torch.library.custom_op("mambakit::finish_cpu", mutates_args=())
def finish_cpu(
    y_Nmi: Tensor,
    x_Ni: Tensor | None,
    skip_i: Tensor | None,
    z_Ni: Tensor | None,
    mimo_x_mi: Tensor | None,
    mimo_z_mi: Tensor | None,
    mimo_o_mi: Tensor | None,
    weight_i: Tensor | None,
    group: int,
    order: int,
    eps: float,
) -> Tensor:
    return finish(y_Nmi, x_Ni, skip_i, z_Ni, mimo_x_mi, mimo_z_mi, mimo_o_mi, weight_i, group, order, eps)


def finish(
    y_Nmi: Tensor,
    x_Ni: Tensor | None,
    skip_i: Tensor | None,
    z_Ni: Tensor | None,
    mimo_x_mi: Tensor | None,
    mimo_z_mi: Tensor | None,
    mimo_o_mi: Tensor | None,
    weight_i: Tensor | None,
    group: int,
    order: int,
    eps: float,
) -> Tensor:
    given = Inputs(y_Nmi, x_Ni, skip_i, z_Ni, mimo_x_mi, mimo_z_mi, mimo_o_mi, weight_i)
    out_Ni = empty(y_Nmi.shape[0], y_Nmi.shape[2])
    kernel("finish", INPUTS + "p")(*given.arguments(), group, order, eps, pointer(out_Ni))
    return out_Ni


@torch.library.custom_op("mambakit::finish_backward_cpu", mutates_args=())
def finish_backward_cpu(
    d_out_Ni: Tensor,
    y_Nmi: Tensor,
    x_Ni: Tensor | None,
    skip_i: Tensor | None,
    z_Ni: Tensor | None,
    mimo_x_mi: Tensor | None,
    mimo_z_mi: Tensor | None,
    mimo_o_mi: Tensor | None,
    weight_i: Tensor | None,
    group: int,
    order: int,
    eps: float,
) -> list[Tensor]:
    """Gradients of the tensors that are given, in their order."""
    given = Inputs(y_Nmi, x_Ni, skip_i, z_Ni, mimo_x_mi, mimo_z_mi, mimo_o_mi, weight_i)
    d_out_Ni = in_rows(d_out_Ni)
    n, m, i = y_Nmi.shape
    d_y_Nmi = empty(n, m, i)
    d_x_Ni, d_z_Ni = (None if t is None else empty(n, i) for t in (x_Ni, z_Ni))
    sums = y_Nmi.new_empty(2 + 3 * m, i)
    kernel("finish_backward", INPUTS + "pi" + "p" + "pi" + "pi" + "p")(
        *given.arguments(),
        *(group, order, eps),
        *(pointer(d_out_Ni), d_out_Ni.stride(0)),
        pointer(d_y_Nmi),
        *(pointer(d_x_Ni), i),
        *(pointer(d_z_Ni), i),
        pointer(sums),
    )
    # Copies, because an operator may not return views of one tensor.
    d_skip, d_weight, *d_mimo = (d.clone() for d in (sums[0], sums[1], *sums[2:].unflatten(0, (3, m))))
    every = (d_y_Nmi, d_x_Ni, d_skip, d_z_Ni, *d_mimo, d_weight)
    return [d for d, t in zip(every, given.tensors, strict=True) if t is not None and d is not None]


class Inputs:
    """What both kernels read, laid out as they read it."""

    def __init__(
        self, y_Nmi: Tensor, x_Ni: Tensor | None, skip_i: Tensor | None, z_Ni: Tensor | None, *parameters: Tensor | None
    ) -> None:
        self.shape = y_Nmi.shape
        self.rows = [None if t is None else in_rows(t) for t in (y_Nmi, x_Ni, z_Ni)]
        self.parameters = [None if t is None else t.contiguous() for t in (skip_i, *parameters)]
        self.tensors = (y_Nmi, x_Ni, skip_i, z_Ni, *parameters)

    def arguments(self) -> tuple[Any, ...]:
        skip, *parameters = map(pointer, self.parameters)
        y, x, z = ((pointer(t), 0 if t is None else t.stride(0)) for t in self.rows)
        return (*self.shape, *y, *x, skip, *z, *parameters)


def in_rows(x: Tensor) -> Tensor:
    """`x` itself if each of its rows lies in one piece; the rows may lie anywhere."""
    in_pieces = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if in_pieces else x.contiguous()


@finish_cpu.register_fake
def _(y_Nmi, x_Ni, skip_i, z_Ni, mimo_x_mi, mimo_z_mi, mimo_o_mi, weight_i, group, order, eps):
    return y_Nmi.new_empty(y_Nmi.shape[0], y_Nmi.shape[2])


@finish_backward_cpu.register_fake
def _(d_out_Ni, *inputs_and_options):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs_and_options[:8] if t is not None]
