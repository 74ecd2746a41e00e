"""Causal attention over kept and new keys, and where a token is kept.

A row keeps its tokens in slots: position `i` in slot `i`, or with a window `w` in slot `i mod w`, where the token that
leaves the window makes room for the one that enters it. Whatever cut a sequence comes in, a slot holds the same token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 256
"""Queries that share a mask: no mask is as long as the sequence on both sides."""
ABSENT = -(2**62)
"""The place of a key that is not there, before all others."""


def filled(position_b: Tensor, window: int | None) -> Tensor:
    """How many slots hold a token after so many."""
    return position_b if window is None else position_b.clamp(max=window)


def places(position_b: Tensor, slots: int, window: int | None) -> Tensor:
    """Where the token in each slot stands, the next one being at 0: -1 is the last. `ABSENT` in empty slots."""
    slot_t, position_b1 = torch.arange(slots, device=position_b.device), position_b[:, None]
    place_bt = slot_t - position_b1 if window is None else -1 - (position_b1 - 1 - slot_t) % window
    return place_bt.masked_fill(slot_t >= filled(position_b1, window), ABSENT)


def attend(
    q_bshp: Tensor,
    k_bTgp: Tensor,
    v_bTgp: Tensor,
    scale: float,
    *,
    place_bt: Tensor,
    window: int | None = None,
    starts_bs: Tensor | None = None,
) -> Tensor:
    """`softmax(scale q k) v` over the keys each query sees: itself and, up to a window, the tokens before it.

    The keys are those in slots, at `place_bt`, and then the queries' own. `starts_bs` is where the segment of each
    token begins; only the first one's tokens see what is in slots.
    """
    s, t = q_bshp.shape[1], place_bt.shape[1]
    if t == 0 and starts_bs is None and (window is None or s <= window):
        return dot_products(q_bshp, k_bTgp, v_bTgp, scale, is_causal=True)
    own_s = torch.arange(s, device=q_bshp.device)
    place_bT = torch.cat((place_bt, own_s.expand(len(place_bt), s)), 1)
    low_bs = lowest_seen(own_s, window, starts_bs)
    begins = range(0, s, PIECE)
    first = [0] * len(begins)
    if starts_bs is not None and len(starts_bs) and not torch.compiler.is_compiling():
        first = starts_bs[:, ::PIECE].amin(0).tolist()
    y = []
    for begin, low in zip(begins, first, strict=True):
        end = min(begin + PIECE, s)
        low = low if window is None else max(low, begin - window + 1)
        # What is in slots is out of sight of all queries of the piece where its first token is.
        keys = slice(t + low if low > 0 else 0, t + end)
        place_b1T = place_bT[:, None, keys]
        seen_blT = (place_b1T <= own_s[begin:end, None]) & (place_b1T >= low_bs[:, begin:end, None])
        q_blhp = q_bshp[:, begin:end]
        y.append(dot_products(q_blhp, k_bTgp[:, keys], v_bTgp[:, keys], scale, attn_mask=seen_blT[:, None]))
    return torch.cat(y, 1)


def lowest_seen(own_s: Tensor, window: int | None, starts_bs: Tensor | None) -> Tensor:
    """The first place that each query sees."""
    low_s = torch.full_like(own_s, ABSENT + 1) if window is None else own_s - (window - 1)
    if starts_bs is None:
        return low_s[None]
    return torch.where(starts_bs > 0, torch.maximum(starts_bs, low_s), low_s)


def attend_one(q_bhp: Tensor, k_btgp: Tensor, v_btgp: Tensor, scale: float, filled_b: Tensor) -> Tensor:
    """`attend` for one token of each row, which is in a slot already."""
    b, g = len(filled_b), k_btgp.shape[2]
    least, most = (int(n) for n in filled_b.aminmax()) if b else (0, 0)
    seen_b11t = None
    if least < most:
        seen_b11t = (torch.arange(most, device=q_bhp.device) < filled_b[:, None])[:, None, None]
    # The heads of a group are queries of its keys: each key is read once and not for every head.
    q_bgHp = q_bhp.unflatten(1, (g, q_bhp.shape[1] // g))
    k_bgtp, v_bgtp = k_btgp[:, :most].transpose(1, 2), v_btgp[:, :most].transpose(1, 2)
    return F.scaled_dot_product_attention(q_bgHp, k_bgtp, v_bgtp, attn_mask=seen_b11t, scale=scale).flatten(1, 2)


def dot_products(q_bshp: Tensor, k_btgp: Tensor, v_btgp: Tensor, scale: float, **masks: Tensor | bool) -> Tensor:
    """Torch's attention with tokens before heads."""
    q_bhsp, k_bgtp, v_bgtp = (x.transpose(1, 2) for x in (q_bshp, k_btgp, v_btgp))
    shared = q_bhsp.shape[1] != k_bgtp.shape[1]
    y_bhsp = F.scaled_dot_product_attention(q_bhsp, k_bgtp, v_bgtp, scale=scale, enable_gqa=shared, **masks)  # type: ignore[arg-type]
    return y_bhsp.transpose(1, 2)
