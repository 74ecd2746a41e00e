"""The word "triton", which this version only knows how to refuse."""

import torch

from mambakit.ops.backends import Backend, register_backend

TRITON = register_backend(
    Backend(
        name="triton",
        device="cuda",
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        why_missing=lambda: "this version of mambakit has no Triton kernels",
    )
)
