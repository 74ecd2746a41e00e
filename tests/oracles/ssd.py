"""The scans behind Mamba-2 and Mamba-3 as textbook recurrences: one token after the other, nothing from `ops`."""

import torch
from torch import Tensor


def per_head(x: Tensor, heads: int) -> Tensor:
    """Groups repeated to heads on the last axis but one."""
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def core(v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, w_now_bsh, w_later_bsh, state_bhpr=None, segments_bs=None):
    """h_t = e^da h + w_later u, y_t = (e^da h + w_now u) c, with u = sum_m v (x) b; zero state at a new segment."""
    batch, length, _, heads, channels = v_bsmhp.shape
    rank = b_bsmgr.shape[-1]
    b_bsmhr, c_bsmhr = per_head(b_bsmgr, heads), per_head(c_bsmgr, heads)
    state = v_bsmhp.new_zeros(batch, heads, channels, rank) if state_bhpr is None else state_bhpr
    y = []
    for t in range(length):
        if segments_bs is not None and t > 0:
            goes_on = segments_bs[:, t] == segments_bs[:, t - 1]
            state = torch.where(goes_on[:, None, None, None], state, torch.zeros_like(state))
        held = torch.exp(da_bsh[:, t])[:, :, None, None] * state
        write = torch.einsum("bmhp,bmhr->bhpr", v_bsmhp[:, t], b_bsmhr[:, t])
        seen = held + w_now_bsh[:, t][:, :, None, None] * write
        y.append(torch.einsum("bhpr,bmhr->bmhp", seen, c_bsmhr[:, t]))
        state = held + w_later_bsh[:, t][:, :, None, None] * write
    return (torch.stack(y, 1) if y else torch.zeros_like(v_bsmhp)), state


def mamba2(x_bshp, dt_bsh, a_h, b_bsgr, c_bsgr, d_hp, state_bhpr):
    """h = e^{dt a} h + dt x (x) B, y = h C + D x."""
    heads = x_bshp.shape[2]
    state, y = state_bhpr, []
    for t in range(x_bshp.shape[1]):
        b_bhr, c_bhr = per_head(b_bsgr[:, t], heads), per_head(c_bsgr[:, t], heads)
        write = (dt_bsh[:, t, :, None] * x_bshp[:, t])[..., None] * b_bhr[:, :, None, :]
        state = torch.exp(dt_bsh[:, t] * a_h)[:, :, None, None] * state + write
        y.append((state * c_bhr[:, :, None, :]).sum(-1) + d_hp * x_bshp[:, t])
    return torch.stack(y, 1), state


def mamba3(v_bsmhp, b_bsmhr, c_bsmhr, da_bsh, dt_bsh, lam_bsh, state_bhpr, v_last_bmhp, b_last_bmhr, segments_bs=None):
    """h_t = alpha h + beta u_{t-1} + gamma u_t, y_t = h_t c_t, where u_{t-1} is nothing at the start of a segment."""
    heads = v_bsmhp.shape[3]
    state, y = state_bhpr, []
    before = torch.einsum("bmhp,bmhr->bhpr", v_last_bmhp, per_head(b_last_bmhr, heads))
    for t in range(v_bsmhp.shape[1]):
        if segments_bs is not None and t > 0:
            goes_on = (segments_bs[:, t] == segments_bs[:, t - 1])[:, None, None, None]
            state = torch.where(goes_on, state, torch.zeros_like(state))
            before = torch.where(goes_on, before, torch.zeros_like(before))
        alpha = torch.exp(da_bsh[:, t])
        beta = (1 - lam_bsh[:, t]) * dt_bsh[:, t] * alpha
        gamma = lam_bsh[:, t] * dt_bsh[:, t]
        write = torch.einsum("bmhp,bmhr->bhpr", v_bsmhp[:, t], per_head(b_bsmhr[:, t], heads))
        state = alpha[:, :, None, None] * state + beta[:, :, None, None] * before + gamma[:, :, None, None] * write
        y.append(torch.einsum("bhpr,bmhr->bmhp", state, per_head(c_bsmhr[:, t], heads)))
        before = write
    return torch.stack(y, 1), state
