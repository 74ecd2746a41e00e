"""One token of the scans, the state updated in place."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.compat.arguments import in_full_precision, of_tensors, step_size
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.mamba2_core import scan
from mambakit.compat.references.scans import selective_state_update_ref
from mambakit.compat.slots import Slots
from mambakit.ops.selective_scan import selective_scan
from mambakit.ops.shapes import bind

__all__ = ["selective_state_update", "selective_state_update_ref"]

__getattr__ = gpu_only(__name__, kernels="_selective_scan_update_kernel")


@of_tensors
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """The output of the token `x`, which is written into `state`.

    Without heads: `state` (b, p, r), `x`, `dt`, `z` (b, p), `A` (p, r), `B`, `C` (b, r), `D`, `dt_bias` (p). With
    heads: `state` (b, h, p, r), `x`, `dt`, `z` (b, h, p), `A` (h, p, r), `B`, `C` (b, g, r), `D`, `dt_bias` (h, p).
    With `state_batch_indices` (b) the rows of the batch are these rows of a larger `state`; negative ones are padding.
    """
    slots = Slots("state_batch_indices", state_batch_indices, state, x)
    rows = slots.read(state)
    if state.dim() == 4:
        bind(state_bhpr=rows, x_bhp=x, dt_bhp=dt, A_hpr=A, B_bgr=B, C_bgr=C, D_hp=D, z_bhp=z, dt_bias_hp=dt_bias)
    else:
        bind(state_bpr=rows, x_bp=x, dt_bp=dt, A_pr=A, B_br=B, C_br=C, D_p=D, z_bp=z, dt_bias_p=dt_bias)
        B, C = B[:, None], C[:, None]
    if state.dim() == 4 and x.shape[1] % B.shape[1]:
        raise ValueError(f"{x.shape[1]} heads are not a multiple of the {B.shape[1]} groups of B")
    per_head = is_per_head(dt, A, dt_bias)
    if per_head:
        dt, A, dt_bias = dt[..., 0], A[:, 0, 0], None if dt_bias is None else dt_bias[:, 0]
    rows, x_wide, dt, A, B, C, D, z, dt_bias = in_full_precision(rows, x, dt, A, B, C, D, z, dt_bias)
    dt = step_size(dt, dt_bias, dt_softplus)
    if per_head:
        y, after = scan(x_wide[:, None], B[:, None], C[:, None], (dt * A)[:, None], dt[:, None], rows)
    else:
        last = -A.dim() + 1  # the axes of a channel: head and position, or position
        x_bsi, dt_bsi = (t.flatten(last)[:, None] for t in (x_wide, dt))
        state_bir = rows.flatten(1, -2) if state.dim() == 4 else rows
        y, after = selective_scan(x_bsi, dt_bsi, A.flatten(0, -2), B[:, None], C[:, None], state_bir)
    with torch.no_grad():
        slots.write(state, after.view(rows.shape))
    y = y[:, 0].view(x.shape)
    y = y if D is None else y + D * x_wide
    return slots.hide(y if z is None else y * F.silu(z)).to(x.dtype)


def is_per_head(dt: Tensor, A: Tensor, dt_bias: Tensor | None) -> bool:
    """Whether all channels of a head have one step and one decay, which callers with Mamba-2's heads `expand`."""
    return (
        A.dim() == 3
        and A.stride()[1:] == (0, 0)
        and dt.stride(-1) == 0
        and (dt_bias is None or dt_bias.stride(-1) == 0)
    )
