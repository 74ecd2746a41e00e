"""Skip, gate, norm and the sum over ranks, and all gradients from the inputs alone; see `norm.h`."""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.pages import empty
from mambakit.kernels.cpu.structs import Finish, FinishBackward, FinishForward
from mambakit.ops.norm import FINISH


def finish(*inputs: Any) -> list[Tensor]:
    given = Inputs(*inputs)
    out_Ni = empty(given.shape[0], given.shape[2], dtype=given.y.dtype)
    run(FinishForward(inputs=given.arguments(), out=pointer(out_Ni)))
    return [out_Ni]


def finish_backward(grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor | None]:
    *inputs, _ = inputs_and_needs
    given = Inputs(*inputs)
    d_out_Ni = in_rows(grads[0])
    n, m, i = given.shape
    d_y_Nmi = empty(n, m, i, dtype=given.y.dtype)
    d_x_Ni, d_z_Ni = (None if t is None else empty(n, i, dtype=t.dtype) for t in (given.x, given.z))
    sums = torch.empty(2 + 3 * m, i)
    run(
        FinishBackward(
            inputs=given.arguments(),
            d_out=pointer(d_out_Ni),
            d_out_row=d_out_Ni.stride(0),
            d_y=pointer(d_y_Nmi),
            d_x=pointer(d_x_Ni),
            d_z=pointer(d_z_Ni),
            sums=pointer(sums),
        )
    )
    # Copies, because an operator may not return views of one tensor.
    d_skip, d_weight, *d_mimo = (d.clone() for d in (sums[0], sums[1], *sums[2:].unflatten(0, (3, m))))
    return [d_y_Nmi, d_x_Ni, d_skip, d_z_Ni, *d_mimo, d_weight]


class Inputs:
    """What both kernels read, laid out as they read it."""

    def __init__(
        self, y_Nmi: Tensor, x_Ni: Tensor | None, skip_i: Tensor | None, z_Ni: Tensor | None, *rest: Any
    ) -> None:
        *parameters, group, order, eps = rest
        self.shape, self.options = y_Nmi.shape, (group, order, eps)
        self.y, self.x, self.z = in_rows(y_Nmi), *(None if t is None else in_rows(t) for t in (x_Ni, z_Ni))
        self.parameters = [None if t is None else t.contiguous() for t in (skip_i, *parameters)]

    def arguments(self) -> Finish:
        (rows, ranks, width), (group, order, eps) = self.shape, self.options
        skip, mimo_x, mimo_z, mimo_o, weight = map(pointer, self.parameters)
        return Finish(
            rows=rows,
            ranks=ranks,
            width=width,
            group=group,
            y=pointer(self.y),
            y_row=self.y.stride(0),
            x=pointer(self.x),
            x_row=0 if self.x is None else self.x.stride(0),
            skip=skip,
            z=pointer(self.z),
            z_row=0 if self.z is None else self.z.stride(0),
            mimo_x=mimo_x,
            mimo_z=mimo_z,
            mimo_o=mimo_o,
            weight=weight,
            order=order,
            eps=eps,
            narrow=self.y.dtype == torch.bfloat16,
        )


def in_rows(x: Tensor) -> Tensor:
    """`x` itself if each of its rows lies in one piece; the rows may lie anywhere."""
    in_pieces = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if in_pieces else x.contiguous()


FINISH.implement(CPU, finish, finish_backward, casts=True, narrow=(0, 1, 3))
