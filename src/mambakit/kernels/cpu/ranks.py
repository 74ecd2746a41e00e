"""One copy of a token per rank as two operators; see `ranks.h`. Everything is float32 and in rows of channels."""

import torch
from torch import Tensor

from mambakit.kernels.cpu.library import kernel, pointer
from mambakit.kernels.cpu.norm import in_rows
from mambakit.kernels.cpu.pages import empty


@torch.library.custom_op("mambakit::expand_ranks_cpu", mutates_args=())
def expand_ranks_cpu(x_Ni: Tensor, weight_mi: Tensor) -> Tensor:
    """`x weight[m]` for every rank, `[N, m, i]`."""
    x_Ni, weight_mi = in_rows(x_Ni), weight_mi.contiguous()
    (n, i), m = x_Ni.shape, len(weight_mi)
    v_Nmi = empty(n, m, i)
    kernel("expand_ranks", "iiipipp")(n, m, i, pointer(x_Ni), x_Ni.stride(0), pointer(weight_mi), pointer(v_Nmi))
    return v_Nmi


@torch.library.custom_op("mambakit::expand_ranks_backward_cpu", mutates_args=())
def expand_ranks_backward_cpu(d_v_Nmi: Tensor, x_Ni: Tensor, weight_mi: Tensor) -> tuple[Tensor, Tensor]:
    d_v_Nmi, x_Ni, weight_mi = d_v_Nmi.contiguous(), in_rows(x_Ni), weight_mi.contiguous()
    n, m, i = d_v_Nmi.shape
    d_x_Ni, d_weight_mi = empty(n, i), torch.empty_like(weight_mi)
    kernel("expand_ranks_backward", "iiipipppp")(
        *(n, m, i, pointer(x_Ni), x_Ni.stride(0)), *map(pointer, (weight_mi, d_v_Nmi, d_x_Ni, d_weight_mi))
    )
    return d_x_Ni, d_weight_mi


@expand_ranks_cpu.register_fake
def _(x_Ni, weight_mi):
    return x_Ni.new_empty(x_Ni.shape[0], weight_mi.shape[0], x_Ni.shape[1])


@expand_ranks_backward_cpu.register_fake
def _(d_v_Nmi, x_Ni, weight_mi):
    return x_Ni.new_empty(x_Ni.shape), weight_mi.new_empty(weight_mi.shape)


def _keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, d_v_Nmi):
    grads = expand_ranks_backward_cpu(d_v_Nmi, *ctx.saved_tensors)
    return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=True))


expand_ranks_cpu.register_autograd(_backward, setup_context=_keep_inputs)
