"""The backend of the compiled CPU kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.library import library, processor, torch_is_narrower, torch_is_wider, why_missing
from mambakit.ops.backends import Backend, register_backend


def about() -> dict[str, Any]:
    found = library()
    return {
        "instruction_set": found.instruction_set,
        "usable": found.usable,
        "extension": found.extension,
        "why_no_amx": found.why_no_amx(found.instruction_set),
        "torch_threads": found.has_torch_threads,
    }


def why_not_auto(operation: str, tensors: Sequence[Tensor | None]) -> str | None:
    """Many rows where torch's products are faster: of float32 unless its vectors are narrower, of bfloat16 where they
    are wider, and on Arm without the instructions for rounded numbers."""
    if operation != "few_rows":
        return None
    # Here, because operations import kernels.
    from mambakit.ops.few_rows import MAX_ROWS

    x, weight = tensors[:2]
    assert x is not None, "it is what is multiplied"
    assert weight is not None, "it is what it is multiplied with"
    if x.numel() <= MAX_ROWS * x.shape[-1]:
        return None
    instruction_set, extension = processor()
    if weight.dtype == torch.float32:
        return None if torch_is_narrower() else "torch's products of many rows are faster"
    if weight.dtype == torch.bfloat16:
        slower = torch_is_wider() or (instruction_set == "neon" and extension in ("none", "vnni"))
    else:
        slower = instruction_set == "neon" and extension == "none"
    if not slower:
        return None
    return "without instructions for such numbers, torch's products of many rows are faster"


CPU = register_backend(
    Backend(
        name="cpu",
        device="cpu",
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        why_missing=why_missing,
        about=about,
        why_not_auto=why_not_auto,
    )
)
