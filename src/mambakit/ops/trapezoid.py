"""Mamba-3's trapezoidal recurrence, each pathway as a filling of the core.

h_t = exp(da_t) h_{t-1} + beta_t u_{t-1} + gamma_t u_t,    y_t[m] = h_t c_t[m],    u_t = sum_m v_t[m] (x) b_t[m]
gamma_t = lambda_t dt_t                                    beta_t = (1 - lambda_t) dt_t exp(da_t)
"""

import torch
from torch import Tensor

from mambakit.ops.backends import may_overwrite
from mambakit.ops.shapes import bind, full_precision
from mambakit.ops.ssd import add_write, ssd
from mambakit.ops.ssd_path import SsdPath

PATHWAYS = ("single", "double")


def trapezoid(
    v_bsmhp: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    da_bsh: Tensor,
    dt_bsh: Tensor,
    lambda_bsh: Tensor,
    state_bhpr: Tensor | None = None,
    v_last_bmhp: Tensor | None = None,
    b_last_bmgr: Tensor | None = None,
    *,
    pathway: str = "single",
    path: SsdPath | None = None,
    segments_bs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan with the trapezoidal rule. Returns `y_bsmhp` and `h` after the last token, the same for both pathways.

    `v_last`, `b_last` are the token before the call (None: there is none); its share in the first step belongs to this
    call. `"single"` scans once, `"double"` once per end of the trapezoid. A new segment has no token before it.
    """
    if pathway not in PATHWAYS:
        raise ValueError(f"pathway {pathway!r} is unknown; choose from {', '.join(PATHWAYS)}")
    if (v_last_bmhp is None) != (b_last_bmgr is None):
        raise ValueError("v_last_bmhp and b_last_bmgr describe one token: give both or neither")
    size = bind(
        v_bsmhp=v_bsmhp,
        b_bsmgr=b_bsmgr,
        dt_bsh=dt_bsh,
        lambda_bsh=lambda_bsh,
        v_last_bmhp=v_last_bmhp,
        b_last_bmgr=b_last_bmgr,
        segments_bs=segments_bs,
    )
    if v_last_bmhp is None or b_last_bmgr is None:
        v_last_bmhp = v_bsmhp.new_zeros(size.b, size.m, size.h, size.p)
        b_last_bmgr = b_bsmgr.new_zeros(size.b, size.m, size.g, size.r)
    wide = torch.promote_types(dt_bsh.dtype, torch.float32)
    gamma_bsh = lambda_bsh.to(wide) * dt_bsh.to(wide)
    left_bsh = (1 - lambda_bsh.to(wide)) * dt_bsh.to(wide)
    if segments_bs is not None and size.s:
        # A segment's first token has no left end; the call's own first one has: the token before the call.
        starts_bs = torch.nn.functional.pad(segments_bs[:, 1:] != segments_bs[:, :-1], (1, 0))
        left_bsh = left_bsh.masked_fill(starts_bs[..., None], 0)
    scan = _single if pathway == "single" else _double
    with full_precision(v_bsmhp.device):
        return scan(
            v_bsmhp,
            b_bsmgr,
            c_bsmgr,
            da_bsh,
            gamma_bsh,
            left_bsh,
            state_bhpr,
            v_last_bmhp,
            b_last_bmgr,
            path,
            segments_bs,
        )


def _single(v, b, c, da_bsh, gamma_bsh, left_bsh, state_bhpr, v_last_bmhp, b_last_bmgr, path, segments_bs):
    if state_bhpr is None:
        state_bhpr = v.new_zeros(v.shape[0], *v.shape[3:], b.shape[-1], dtype=gamma_bsh.dtype)
    if v.shape[1]:
        last = (tensor.to(left_bsh.dtype) for tensor in (v_last_bmhp, b_last_bmgr))
        state_bhpr = state_bhpr.to(left_bsh.dtype)
        state_bhpr = add_write(state_bhpr, left_bsh[:, 0], *last, in_place=may_overwrite())
    # The last token has no successor here; its left-end share is added by the next call.
    w_later_bsh = gamma_bsh
    if v.shape[1] != 1:
        w_later_bsh = gamma_bsh + torch.nn.functional.pad(left_bsh[:, 1:], (0, 0, 0, min(v.shape[1], 1)))
    return ssd(v, b, c, da_bsh, gamma_bsh, w_later_bsh, state_bhpr, path=path, segments_bs=segments_bs)


def _double(v, b, c, da_bsh, gamma_bsh, left_bsh, state_bhpr, v_last_bmhp, b_last_bmgr, path, segments_bs):
    beta_bsh = left_bsh * da_bsh.to(left_bsh.dtype).exp()
    v_late = torch.cat([v_last_bmhp[:, None].to(v.dtype), v], 1)[:, : v.shape[1]]
    b_late = torch.cat([b_last_bmgr[:, None].to(b.dtype), b], 1)[:, : b.shape[1]]
    y_now, state_now = ssd(v, b, c, da_bsh, gamma_bsh, gamma_bsh, state_bhpr, path=path, segments_bs=segments_bs)
    y_late, state_late = ssd(v_late, b_late, c, da_bsh, beta_bsh, beta_bsh, path=path, segments_bs=segments_bs)
    return y_now + y_late, state_now + state_late
