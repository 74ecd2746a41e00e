"""What every scan is tested on: the parametrised list of algorithms, and random inputs by shape."""

import os
from dataclasses import replace

import torch
from torch import Tensor

from mambakit import SsdPath

# A new algorithm or kernel is one entry here and inherits every claim.
ALGORITHMS = {
    "minimal": SsdPath("minimal", backend="torch"),
    "serial": SsdPath("serial", backend="torch"),
    "serial_recalculated": SsdPath("serial_recalculated", backend="torch"),
    "cpu": SsdPath("serial_recalculated", backend="cpu"),
}
# Triton's kernels run here in its interpreter only, in processes of their own: see test_triton_interpreter.py.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    ALGORITHMS["triton"] = SsdPath("serial_recalculated", backend="triton")
# The fused kernels compute in float32; everything else is held to float64.
IN_FLOAT32 = ("cpu", "triton")
# The dtype in which each backend is tested.
DTYPE = {"torch": torch.float64, "cpu": torch.float32} | ({"triton": torch.float32} if INTERPRETED else {})
TWICE_DIFFERENTIABLE = ("minimal", "serial")


def path_of(algorithm: str, chunk_len: int | None) -> SsdPath:
    return replace(ALGORITHMS[algorithm], chunk_len=chunk_len)


def dtype_of(algorithm: str) -> torch.dtype:
    """The widest dtype the algorithm computes in."""
    return torch.float32 if algorithm in IN_FLOAT32 else torch.float64


def value_tolerance(algorithm: str, float64: float = 1e-10) -> float:
    return 1e-5 if algorithm in IN_FLOAT32 else float64


def gradient_tolerance(algorithm: str, float64: float = 1e-9) -> float:
    return 1e-4 if algorithm in IN_FLOAT32 else float64


def core_inputs(
    b: int, s: int, m: int, h: int, p: int, g: int, r: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    """Random inputs of the core; the two weights are independent and of both signs."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    inputs = {
        "v_bsmhp": normal(b, s, m, h, p),
        "b_bsmgr": normal(b, s, m, g, r),
        "c_bsmgr": normal(b, s, m, g, r),
        "da_bsh": -torch.rand(b, s, h, generator=make, dtype=torch.float64),
        "w_now_bsh": normal(b, s, h),
        "w_later_bsh": normal(b, s, h),
        "state_bhpr": normal(b, h, p, r),
    }
    return {name: tensor.to(dtype) for name, tensor in inputs.items()}


def core_heads(inputs: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Independent random weights on both outputs, so that a gradient lost on either side shows."""
    make = torch.Generator().manual_seed(seed)
    shapes = {"y": inputs["v_bsmhp"].shape, "state": inputs["state_bhpr"].shape}
    return {name: torch.randn(*shape, generator=make, dtype=torch.float64) for name, shape in shapes.items()}


def random_segments(b: int, s: int, chance: float = 0.3, seed: int = 2) -> Tensor:
    """Ids that start anywhere and skip some numbers."""
    make = torch.Generator().manual_seed(seed)
    steps = (torch.rand(b, s, generator=make) < chance) * torch.randint(1, 3, (b, s), generator=make)
    return steps.cumsum(1)
