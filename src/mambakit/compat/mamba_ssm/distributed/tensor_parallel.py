"""Linear maps that several processes share."""

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.mamba_ssm.distributed.distributed_utils import (
    AllReduceFunc,
    all_gather,
    all_reduce,
    get_dim_for_local_rank,
    reduce_scatter,
)

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "parallel_linear_func"]

__getattr__ = gpu_only(
    __name__,
    shared="VocabParallelEmbedding ColumnParallelEmbedding ParallelEmbeddings ParallelLinearFunc",
)


class Gathered(AllReduceFunc):
    """Nothing forward; backward the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.process_group = process_group
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce(grad_output, ctx.process_group), None


def parallel_linear_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Tensor:
    """A linear map; with `sequence_parallel` of the inputs of all processes of the group, one after the other."""
    if process_group is not None:
        x = all_gather(x, process_group) if sequence_parallel else Gathered.apply(x, process_group)  # type: ignore[assignment]
    return F.linear(x, weight, bias)


class ColumnParallelLinear(nn.Linear):
    """Each process has some of the outputs."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: Any,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: Any = None,
        dtype: Any = None,
    ):
        share = share_of("out_features", out_features, process_group, multiple_of)
        super().__init__(in_features, share, bias=bias, device=device, dtype=dtype)
        self.process_group, self.sequence_parallel = process_group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - the official name
        return parallel_linear_func(x, self.weight, self.bias, self.process_group, self.sequence_parallel)


class RowParallelLinear(nn.Linear):
    """Each process has some of the inputs, the first one the bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: Any,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: Any = None,
        dtype: Any = None,
    ):
        share = share_of("in_features", in_features, process_group, multiple_of)
        bias = bias and dist.get_rank(process_group) == 0
        super().__init__(share, out_features, bias=bias, device=device, dtype=dtype)
        self.process_group, self.sequence_parallel = process_group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - the official name
        out = parallel_linear_func(x, self.weight, self.bias)
        combine: Any = reduce_scatter if self.sequence_parallel else all_reduce
        return combine(out, self.process_group)


def share_of(name: str, features: int, process_group: Any, multiple_of: int) -> int:
    if features % multiple_of:
        raise ValueError(f"{name} = {features} has to be a multiple of multiple_of = {multiple_of}")
    size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    return get_dim_for_local_rank(features, size, rank, multiple_of)
