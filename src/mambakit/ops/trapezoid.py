"""Mamba-3's trapezoidal recurrence, each pathway as a filling of the core.

h_t = exp(da_t) h_{t-1} + beta_t u_{t-1} + gamma_t u_t,    y_t[m] = h_t c_t[m],    u_t = sum_m v_t[m] (x) b_t[m]
gamma_t = lambda_t dt_t                                    beta_t = (1 - lambda_t) dt_t exp(da_t)
"""

import torch
from torch import Tensor

from mambakit.arguments import shown
from mambakit.ops.backends import may_overwrite
from mambakit.ops.shapes import full_precision
from mambakit.ops.ssd import add_write, check_core, scan
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

    Examples:
        >>> b, s, m, h, p, g, r = 2, 100, 1, 4, 16, 1, 32
        >>> v_bsmhp, dt_bsh = torch.randn(b, s, m, h, p), 0.1 * torch.rand(b, s, h)
        >>> b_bsmgr, c_bsmgr = torch.randn(b, s, m, g, r), torch.randn(b, s, m, g, r)
        >>> half_bsh = torch.full((b, s, h), 0.5)
        >>> y_bsmhp, state_bhpr = mk.trapezoid(v_bsmhp, b_bsmgr, c_bsmgr, -dt_bsh, dt_bsh, half_bsh)
    """
    if pathway not in PATHWAYS:
        raise ValueError(f"pathway {shown(pathway)} is unknown; choose from {', '.join(PATHWAYS)}")
    if (v_last_bmhp is None) != (b_last_bmgr is None):
        raise ValueError("v_last_bmhp and b_last_bmgr describe one token: give both or neither")
    data = {"v_bsmhp": v_bsmhp, "b_bsmgr": b_bsmgr, "c_bsmgr": c_bsmgr}
    weights = {"da_bsh": da_bsh, "dt_bsh": dt_bsh, "lambda_bsh": lambda_bsh}
    carried = {"state_bhpr": state_bhpr, "v_last_bmhp": v_last_bmhp, "b_last_bmgr": b_last_bmgr}
    size, wide = check_core(data, weights, carried, segments_bs)
    if v_last_bmhp is None or b_last_bmgr is None:
        v_last_bmhp = v_bsmhp.new_zeros(size.b, size.m, size.h, size.p)
        b_last_bmgr = b_bsmgr.new_zeros(size.b, size.m, size.g, size.r)
    gamma_bsh, left_bsh = ends_of(lambda_bsh.to(wide), dt_bsh.to(wide), segments_bs)
    if state_bhpr is None:
        state_bhpr = v_bsmhp.new_zeros(size.b, size.h, size.p, size.r, dtype=wide)
    how = (SsdPath.of(path), segments_bs)
    with full_precision(v_bsmhp.device):
        if pathway == "double":
            beta_bsh = left_bsh * da_bsh.to(wide).exp()
            v_late = torch.cat([v_last_bmhp[:, None].to(v_bsmhp.dtype), v_bsmhp], 1)[:, : size.s]
            b_late = torch.cat([b_last_bmgr[:, None].to(b_bsmgr.dtype), b_bsmgr], 1)[:, : size.s]
            nothing = torch.zeros_like(state_bhpr)
            y_now, state_now = scan(v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, gamma_bsh, gamma_bsh, state_bhpr, *how)
            y_late, state_late = scan(v_late, b_late, c_bsmgr, da_bsh, beta_bsh, beta_bsh, nothing, *how)
            return y_now + y_late, state_now + state_late
        if size.s:
            last = (tensor.to(wide) for tensor in (v_last_bmhp, b_last_bmgr))
            state_bhpr = add_write(state_bhpr.to(wide), left_bsh[:, 0], *last, in_place=may_overwrite())
        later_bsh = w_later(gamma_bsh, left_bsh)
        return scan(v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, gamma_bsh, later_bsh, state_bhpr, *how)


def ends_of(lambda_bsh: Tensor, dt_bsh: Tensor, segments_bs: Tensor | None) -> tuple[Tensor, Tensor]:
    """What each token weighs at the right end of its own step, and what the token before it does at the left end."""
    gamma_bsh, left_bsh = lambda_bsh * dt_bsh, (1 - lambda_bsh) * dt_bsh
    if segments_bs is not None and segments_bs.shape[1]:
        # A segment's first token has no left end; the call's own first one has: the token before the call.
        starts_bs = torch.nn.functional.pad(segments_bs[:, 1:] != segments_bs[:, :-1], (1, 0))
        left_bsh = left_bsh.masked_fill(starts_bs[..., None], 0)
    return gamma_bsh, left_bsh


def w_later(gamma_bsh: Tensor, left_bsh: Tensor) -> Tensor:
    """What later tokens see of each, but for the last one's left end: its successor's call adds that."""
    if gamma_bsh.shape[1] < 2:
        return gamma_bsh
    return gamma_bsh + torch.nn.functional.pad(left_bsh[:, 1:], (0, 0, 0, 1))
