"""What happened before a token's segment, for sums and products that start afresh with each one."""

import torch
import torch.nn.functional as F
from torch import Tensor


def segment_starts(segments_bs: Tensor) -> Tensor:
    """For each token the index of its segment's first."""
    s = segments_bs.shape[1]
    fresh_bs = segments_bs[:, 1:] != segments_bs[:, :-1]
    index_s = torch.arange(1, s, device=segments_bs.device)
    return F.pad(torch.where(fresh_bs, index_s, 0), (1, 0)).cummax(dim=1).values


def before_segment(total: Tensor, segments_bs: Tensor, identity: Tensor) -> Tensor:
    """For each token the running `total` just before its segment, and `identity` in the first; axes start with b, s."""
    b, s = segments_bs.shape
    if s < 2:
        return identity.expand_as(total)
    previous = torch.cat((identity.expand_as(total[:, :1]), total[:, :-1]), dim=1)
    row_b1 = s * torch.arange(b, device=segments_bs.device)[:, None]
    place_bs = row_b1 + segment_starts(segments_bs)
    return previous.flatten(0, 1).index_select(0, place_bs.flatten()).unflatten(0, (b, s))
