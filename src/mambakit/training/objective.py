"""What is trained on, the loss of each token, and what is reported, bits per byte."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.blocks.caches import detach
from mambakit.blocks.moe import balance_loss
from mambakit.models.language_model import LanguageModel
from mambakit.training.segments import run_in_segments

EVALUATED_TOGETHER = 8
EVALUATED_LEN = 2048


class TokenLosses(nn.Module):
    """`loss_bs, cache = losses(pairs_bs2, cache)`: minus the log-probability of each next token, in nats.

    With `balance`, so much of the model's `balance_loss` is added to each, in training and where it has experts.
    """

    def __init__(self, model: LanguageModel, balance: float = 0.0):
        super().__init__()
        self.model = model
        self.balance = balance
        self.balances: list[Tensor] = []
        """What it was, call by call, before its share was taken."""

    def forward(self, pairs_bs2: Tensor, cache: Any = None, *, reset_bs: Tensor | None = None) -> tuple[Tensor, Any]:
        logits_bsw, cache = self.model(pairs_bs2[..., 0], cache, reset_bs=reset_bs)
        logits_bsw = logits_bsw.to(torch.promote_types(logits_bsw.dtype, torch.float32))
        # mT: the vocabulary is expected second.
        loss_bs = F.cross_entropy(logits_bsw.mT, pairs_bs2[..., 1], reduction="none")
        found = balance_loss(self.model) if self.balance else None
        if found is not None:
            self.balances.append(found.detach())
            loss_bs = loss_bs + self.balance * found
        return loss_bs, cache


class Objective(nn.Module):
    """`loss, cache = objective(pairs_bs2, cache)`: the mean over all tokens; the cache is detached.

    `balance_loss` of experts, times `balance`, is part of it; `balanced` is what it was before. With `segment_len`,
    activations and logits of one segment at a time are kept; loss and gradients are the same.
    """

    def __init__(self, model: LanguageModel, segment_len: int | None = None, balance: float = 0.0):
        super().__init__()
        self.losses = TokenLosses(model, balance)
        self.segment_len = segment_len
        self.balanced: Tensor | None = None

    def forward(self, pairs_bs2: Tensor, cache: Any = None, *, reset_bs: Tensor | None = None) -> tuple[Tensor, Any]:
        self.losses.balances.clear()  # a backward pass that computes again adds to them
        if self.segment_len is None:
            loss_bs, cache = self.losses(pairs_bs2, cache, reset_bs=reset_bs)
        else:
            loss_bs, cache = run_in_segments(
                self.losses, pairs_bs2, cache, segment_len=self.segment_len, reset_bs=reset_bs
            )
        balances = self.losses.balances
        self.balanced = torch.stack(balances).mean() if balances else None
        return loss_bs.mean(), detach(cache)


def bits_per_byte(model: LanguageModel, documents_s: Sequence[Tensor], bytes_in_all: int) -> float:
    """What the model needs for these documents, each read from its start to its end with the state carried along.

    Each is given as the end token and its ids. That it ends is part of what is predicted.
    """
    device = next(model.parameters()).device
    losses = TokenLosses(model)
    nats = 0.0
    in_order = sorted(documents_s, key=len)
    with torch.no_grad():
        for start in range(0, len(in_order), EVALUATED_TOGETHER):
            together = in_order[start : start + EVALUATED_TOGETHER]
            pairs_bs2, counts_bs = _side_by_side(together)
            cache = None
            for where in range(0, pairs_bs2.shape[1], EVALUATED_LEN):
                piece = slice(where, where + EVALUATED_LEN)
                loss_bs, cache = losses(pairs_bs2[:, piece].to(device), cache)
                nats += float((loss_bs.double() * counts_bs[:, piece].to(device)).sum())
    return nats / math.log(2) / bytes_in_all


def _side_by_side(documents_s: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Documents as rows, filled up after their ends, which nothing before can see; and which places count."""
    longest = max(map(len, documents_s))
    pairs, counts = [], []
    for ids_s in documents_s:
        ids_s = ids_s.long()
        pair_s2 = torch.stack([ids_s, torch.cat([ids_s[1:], ids_s[:1]])], -1)  # the end token comes after the last
        pairs.append(F.pad(pair_s2, (0, 0, 0, longest - len(ids_s))))
        counts.append(torch.arange(longest) < len(ids_s))
    return torch.stack(pairs), torch.stack(counts)
