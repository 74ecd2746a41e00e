"""One token of Mamba-3's scan, Q and K already rotated, the state updated in place."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.references.rotary import selective_state_update_fused_ref_v2
from mambakit.ops.shapes import bind
from mambakit.ops.trapezoid import trapezoid

__all__ = ["mamba3_step_fn", "selective_state_update_fused_ref_v2"]

__getattr__ = gpu_only(__name__, kernels="Mamba3Step", tiles="transpose_view select get_gmem_tiled_copy _bytes_of")


@of_tensors
def mamba3_step_fn(
    state: Tensor,
    Bstate: Tensor,
    Xstate: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    x: Tensor,
    dt: Tensor,
    trap: Tensor,
    xproj: Tensor,
    outproj: Tensor | None = None,
    state_out: Tensor | None = None,
    out: Tensor | None = None,
    z: Tensor | None = None,
    zproj: Tensor | None = None,
    tile_D: int = 64,
    num_warps: int = 2,
) -> None:
    """Writes the output to `out`, (b, h, p) or without `outproj` (b, m, h, p), and the state to `state_out` or `state`.

    `state` is (b, h, p, r), `Bstate`, `B`, `C` (b, m, h, r), `Xstate`, `x`, `z` (b, h, p), `A`, `dt`, `trap` (b, h),
    `trap` after its sigmoid, `D` (h), `xproj`, `zproj`, `outproj` (m, h, p). `Bstate` and `Xstate` are not changed.
    `tile_D` and `num_warps` have no effect.
    """
    bind(state_bhpr=state, Bstate_bmhr=Bstate, Xstate_bhp=Xstate, A_bh=A, B_bmhr=B, C_bmhr=C, D_h=D, x_bhp=x)
    bind(x_bhp=x, dt_bh=dt, trap_bh=trap, z_bhp=z, xproj_mhp=xproj, zproj_mhp=zproj, outproj_mhp=outproj)
    if out is None:
        raise ValueError("out is None, expected the tensor to write the output to")
    if (z is None) != (zproj is None):
        raise ValueError("z and zproj go together: give both or neither")
    wide = torch.promote_types(state.dtype, torch.float32)
    B, C, Bstate = (t[:, None].to(wide) for t in (B, C, Bstate))
    v_bsmhp, v_last_bmhp = (x.to(wide)[:, None] * xproj)[:, None], Xstate.to(wide)[:, None] * xproj
    A, dt, trap = (t.to(wide)[:, None] for t in (A, dt, trap))
    y, after = trapezoid(v_bsmhp, B, C, A * dt, dt, trap, state.to(wide), v_last_bmhp, Bstate[:, 0])
    y_bmhp = y[:, 0] + D[:, None] * v_bsmhp[:, 0]
    if z is not None and zproj is not None:
        y_bmhp = y_bmhp * F.silu(z.to(wide)[:, None] * zproj)
    with torch.no_grad():
        (state if state_out is None else state_out).copy_(after)
        out.copy_(y_bmhp if outproj is None else (y_bmhp * outproj).sum(1))
