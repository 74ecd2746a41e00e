"""Blocks where a tensor goes in and a tensor comes out."""

from typing import Any

from torch import Tensor, nn


class TensorOnly(nn.Module):
    """A block, layer or stack without its cache, for `nn.Sequential` and whatever else expects one tensor.

    Every call is a sequence of its own; steps and caches are those of `block`.

    Examples:
        >>> net = torch.nn.Sequential(mk.TensorOnly(mk.Mamba3(d_model=64, per_head_dim=16)), torch.nn.Linear(64, 10))
        >>> net(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 10])
    """

    def __init__(self, block: nn.Module):
        super().__init__()
        if not isinstance(block, nn.Module):
            raise ValueError(f"TensorOnly takes a block such as Mamba3(d_model=64), got a {type(block).__name__}")
        self.block = block

    def forward(self, x_bsd: Tensor, **options: Any) -> Tensor:
        """The block's output; `options` such as `mask_bs` are the block's."""
        return self.block(x_bsd, **options)[0]
