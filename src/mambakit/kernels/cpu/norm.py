"""Skip, gate, norm and the sum over ranks, and all gradients from the inputs alone; see `norm.h`."""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import kernel, pointer
from mambakit.kernels.cpu.pages import empty
from mambakit.ops.norm import FINISH

# rows, ranks, width; y, x and z with the strides of their rows; mimo_x, mimo_z, mimo_o, weight; group, order, eps.
INPUTS = "iii" + "pi" + "pip" + "pi" + "pppp" + "iif"


def finish(*inputs: Any) -> list[Tensor]:
    *tensors, group, order, eps = inputs
    given = Inputs(*tensors)
    out_Ni = empty(given.shape[0], given.shape[2])
    kernel("finish", INPUTS + "p")(*given.arguments(), group, order, eps, pointer(out_Ni))
    return [out_Ni]


def finish_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor | None]:
    *tensors, group, order, eps, _ = inputs_and_needs
    given = Inputs(*tensors)
    d_out_Ni = in_rows(grads[0])
    n, m, i = given.shape
    d_y_Nmi = empty(n, m, i)
    d_x_Ni, d_z_Ni = (None if t is None else empty(n, i) for t in (tensors[1], tensors[3]))
    sums = torch.empty(2 + 3 * m, i)
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
    return [d_y_Nmi, d_x_Ni, d_skip, d_z_Ni, *d_mimo, d_weight]


class Inputs:
    """What both kernels read, laid out as they read it."""

    def __init__(
        self, y_Nmi: Tensor, x_Ni: Tensor | None, skip_i: Tensor | None, z_Ni: Tensor | None, *parameters: Tensor | None
    ) -> None:
        self.shape = y_Nmi.shape
        self.rows = [None if t is None else in_rows(t) for t in (y_Nmi, x_Ni, z_Ni)]
        self.parameters = [None if t is None else t.contiguous() for t in (skip_i, *parameters)]

    def arguments(self) -> tuple[Any, ...]:
        skip, *parameters = map(pointer, self.parameters)
        y, x, z = ((pointer(t), 0 if t is None else t.stride(0)) for t in self.rows)
        return (*self.shape, *y, *x, skip, *z, *parameters)


def in_rows(x: Tensor) -> Tensor:
    """`x` itself if each of its rows lies in one piece; the rows may lie anywhere."""
    in_pieces = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if in_pieces else x.contiguous()


FINISH.implement(CPU, finish, finish_backward, casts=True)
