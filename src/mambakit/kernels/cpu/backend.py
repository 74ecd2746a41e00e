"""The backend of the compiled CPU kernels."""

import torch

from mambakit.kernels.cpu.library import why_missing
from mambakit.ops.backends import Backend, register_backend

CPU = register_backend(
    Backend(name="cpu", device="cpu", dtypes=(torch.float32, torch.bfloat16, torch.float16), why_missing=why_missing)
)
