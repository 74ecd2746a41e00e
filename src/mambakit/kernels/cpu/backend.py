"""The backend of the compiled CPU kernels."""

from typing import Any

import torch

from mambakit.kernels.cpu.library import library, why_missing
from mambakit.ops.backends import Backend, register_backend


def about() -> dict[str, Any]:
    found = library()
    return {
        "instruction_set": found.instruction_set,
        "usable": found.usable,
        "extension": found.extension,
        "torch_threads": found.has_torch_threads,
    }


CPU = register_backend(
    Backend(
        name="cpu",
        device="cpu",
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        why_missing=why_missing,
        about=about,
    )
)
