"""What attention has of a sequence whose shares lie on different ranks: all keys and values, as long as they are."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.ops.boundary import Boundary, Carried


def pass_positions(edge: Boundary, position_b: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens each row has seen before this rank's first, and after the last rank's last."""
    facts = edge.facts

    def through(j: int, carried: Carried) -> Carried:
        return (torch.where(facts.is_cut_jb[j], facts.since_jb[j], carried[0] + facts.length_jb[j]),)

    (entering_b,), (last_b,) = edge.follow((position_b,), lambda: (torch.zeros_like(position_b[:1]),), through)
    return entering_b, last_b


def gather_rows(edge: Boundary, *parts_bsgp: Tensor) -> list[Tensor]:
    """Of each row the tokens of all ranks one after the other, filled up on the right."""
    length_jb = edge.facts.length_jb
    rows, sum_jb = length_jb.shape[1], length_jb.cumsum(0)
    longest, most = (int(n_jb.max()) if rows else 0 for n_jb in (length_jb, sum_jb))
    gathered = edge.gather(*(F.pad(x_bsgp, (0, 0, 0, 0, 0, longest - x_bsgp.shape[1])) for x_bsgp in parts_bsgp))
    index_bS = torch.arange(most, device=sum_jb.device).repeat(rows, 1)
    rank_bS = torch.searchsorted(sum_jb.T.contiguous(), index_bS, right=True).clamp(max=edge.size - 1)
    place_bS = index_bS - (sum_jb - length_jb).T.gather(1, rank_bS)
    taken_bS11 = (rank_bS * longest + place_bS.clamp(max=max(longest - 1, 0)))[..., None, None]
    found = []
    for x_bsgp, x_jbsgp in zip(parts_bsgp, gathered, strict=True):
        x_bTgp = x_jbsgp.transpose(0, 1).flatten(1, 2)
        found.append(x_bTgp.gather(1, taken_bS11.expand(-1, -1, *x_bTgp.shape[2:])).to(x_bsgp.dtype))
    return found
