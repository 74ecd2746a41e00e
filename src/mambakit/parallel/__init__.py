"""One model on several ranks of `torch.distributed`: sequences split, or widths; see docs/parallel.md."""

from mambakit.parallel.context import context_parallel, whole_sequences
from mambakit.parallel.meshes import clip_gradients
from mambakit.parallel.parts import joined, parted, share_of_cache, whole_cache
from mambakit.parallel.tensor import tensor_parallel
from mambakit.parallel.vocabulary import token_losses

__all__ = [
    "clip_gradients",
    "context_parallel",
    "joined",
    "parted",
    "share_of_cache",
    "tensor_parallel",
    "token_losses",
    "whole_cache",
    "whole_sequences",
]
