"""Collectives along the first axis: plain ones that may run in the background, and ones with gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "AllGatherFunc",
    "AllReduceFunc",
    "ReduceScatterFunc",
    "all_gather",
    "all_gather_raw",
    "all_reduce",
    "all_reduce_raw",
    "allreduce_sequence_parallel_grad",
    "get_dim_for_local_rank",
    "reduce_scatter",
    "reduce_scatter_raw",
    "sync_shared_params",
]


def all_gather_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    """The inputs of all processes one after the other, and a handle to wait for."""
    size = dist.get_world_size(process_group)
    output = input_.new_empty(size * input_.shape[0], *input_.shape[1:])
    return output, dist.all_gather_into_tensor(output, input_.contiguous(), group=process_group, async_op=async_op)


def reduce_scatter_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    """This process's share of the sum of all inputs, and a handle to wait for."""
    size = dist.get_world_size(process_group)
    if input_.shape[0] % size:
        raise ValueError(f"{input_.shape[0]} rows cannot be divided among {size} processes")
    output = input_.new_empty(input_.shape[0] // size, *input_.shape[1:])
    return output, dist.reduce_scatter_tensor(output, input_.contiguous(), group=process_group, async_op=async_op)


def all_reduce_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    """The sum of all inputs, in place where the input is contiguous, and a handle to wait for."""
    output = input_.contiguous()
    return output, dist.all_reduce(output, group=process_group, async_op=async_op)


class AllGatherFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.process_group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return reduce_scatter_raw(grad_output, ctx.process_group)[0], None


class ReduceScatterFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.process_group = process_group
        return reduce_scatter_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_gather_raw(grad_output, ctx.process_group)[0], None


class AllReduceFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce_raw(input_.clone(), process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_output, None


all_gather, reduce_scatter, all_reduce = AllGatherFunc.apply, ReduceScatterFunc.apply, AllReduceFunc.apply


@torch.no_grad()
def sync_shared_params(model: nn.Module, process_group: Any) -> None:
    """Parameters marked with `_shared_params` become those of the group's first process."""
    source = dist.get_global_rank(process_group, 0)
    for _, parameter in sorted(marked(model, "_shared_params").items()):
        dist.broadcast(parameter, src=source, group=process_group)


@torch.no_grad()
def allreduce_sequence_parallel_grad(model: nn.Module, process_group: Any) -> None:
    """Gradients of parameters marked with `_sequence_parallel` are added over all processes."""
    for _, parameter in sorted(marked(model, "_sequence_parallel").items()):
        dist.all_reduce(parameter.grad, group=process_group)


def marked(model: nn.Module, mark: str) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if getattr(p, mark, False)}


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """This process's share of `dim`, in multiples of `multiple_of`; the first ones take what is left over."""
    share, left = divmod(dim // multiple_of, world_size)
    return (share + (local_rank < left)) * multiple_of
