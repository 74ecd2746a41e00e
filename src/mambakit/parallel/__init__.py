"""One model on several ranks of `torch.distributed`: sequences split, or widths; see docs/parallel.md."""

from mambakit.parallel.context import context_parallel, whole_sequences

__all__ = ["context_parallel", "whole_sequences"]
