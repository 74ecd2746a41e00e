"""One token of Mamba-3's scan with one rank."""

from typing import Any

from torch import Tensor

from mambakit.compat.arguments import in_the_order
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

__all__ = ["mamba3_siso_step"]

__getattr__ = gpu_only(__name__, kernels="mamba3_siso_step_kernel", tiles="_alloc_fn")


@in_the_order("Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, Input_States", mamba3_siso_combined)
def mamba3_siso_step(**given: Any) -> tuple[Tensor, list[Tensor]]:
    """`out` (b, h, p) and the new states, in the shapes of `mamba3_siso_combined` without the axis of time."""
    given |= {name: given[name][:, None] for name in ("Q", "K", "V", "Angles", "Z") if given.get(name) is not None}
    given |= {name: given[name][..., None] for name in ("ADT", "DT", "Trap")}
    out, *states = mamba3_siso_combined(**given, return_final_states=True)
    return out[:, 0], states
