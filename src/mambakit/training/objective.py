"""What is trained on, the loss of each token, and what is reported: bits per byte, or the loss of an answer's token."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.blocks.caches import detach
from mambakit.blocks.moe import balance_loss
from mambakit.models.language_model import LanguageModel
from mambakit.parallel.vocabulary import token_losses
from mambakit.training.processes import Ranks
from mambakit.training.segments import run_in_segments

EVALUATED_TOGETHER = 8
EVALUATED_LEN = 2048


class TokenLosses(nn.Module):
    """`loss_bs, cache = losses(pairs_bs2, cache)`: minus the log-probability of each next token, in nats.

    It is 0 where that is -100, and `scale` times as much everywhere. With `balance`, so much of the model's
    `balance_loss` is added to each, in training and where it has experts.
    """

    def __init__(self, model: LanguageModel, balance: float = 0.0):
        super().__init__()
        self.model = model
        self.balance = balance
        self.balances: list[Tensor] = []
        """What it was, call by call, before its share was taken."""

    def forward(
        self, pairs_bs2: Tensor, cache: Any = None, *, reset_bs: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Any]:
        loss_bs, cache = token_losses(self.model, pairs_bs2[..., 0], pairs_bs2[..., 1], cache, reset_bs=reset_bs)
        loss_bs = loss_bs if scale == 1 else scale * loss_bs
        found = balance_loss(self.model) if self.balance else None
        if found is not None:
            self.balances.append(found.detach())
            loss_bs = loss_bs + self.balance * found
        return loss_bs, cache


class Objective(nn.Module):
    """`loss, cache = objective(pairs_bs2, cache)`: the mean over all places, times `scale`; the cache is detached.

    `balance_loss` of experts, times `balance`, is part of it; `balanced` is what it was before. With `segment_len`,
    activations and logits of one segment at a time are kept; loss and gradients are the same.
    """

    def __init__(self, model: LanguageModel, segment_len: int | None = None, balance: float = 0.0):
        super().__init__()
        self.losses = TokenLosses(model, balance)
        self.segment_len = segment_len
        self.balanced: Tensor | None = None

    def forward(
        self, pairs_bs2: Tensor, cache: Any = None, *, reset_bs: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Any]:
        self.losses.balances.clear()  # a backward pass that computes again adds to them
        if self.segment_len is None:
            loss_bs, cache = self.losses(pairs_bs2, cache, reset_bs=reset_bs, scale=scale)
        else:
            loss_bs, cache = run_in_segments(
                self.losses, pairs_bs2, cache, segment_len=self.segment_len, reset_bs=reset_bs, scale=scale
            )
        balances = self.losses.balances
        self.balanced = torch.stack(balances).mean() if balances else None
        return loss_bs.mean(), detach(cache)


def bits_per_byte(
    model: LanguageModel, documents_s: Sequence[Tensor], bytes_in_all: int, ranks: Ranks | None = None
) -> float:
    """What the model needs for these documents, each read from its start to its end with the state carried along.

    Each is given as the end token and its ids. That it ends is part of what is predicted. Ranks divide them.
    """
    # The end token comes after the last.
    pairs = [torch.stack([ids_s, torch.cat([ids_s[1:], ids_s[:1]])], -1) for ids_s in documents_s]
    return nats(model, pairs, ranks) / math.log(2) / bytes_in_all


def nats(model: LanguageModel, pairs_s2: Sequence[Tensor], ranks: Ranks | None = None) -> float:
    """What the model needs for all tokens to predict, in sequences of pairs that know nothing of each other.

    Of several ranks each reads some of them, those that share heads the same; all get the sum.
    """
    device = next(model.parameters()).device
    losses = TokenLosses(model)
    total = 0.0
    in_order = sorted(pairs_s2, key=len)
    together = [in_order[at : at + EVALUATED_TOGETHER] for at in range(0, len(in_order), EVALUATED_TOGETHER)]
    own, idle = (together, 0) if ranks is None else _shared(together, ranks)
    with torch.no_grad():
        for sequences in own:
            pairs_bs2, counts_bs = _side_by_side(sequences)
            cache = None
            for where in range(0, pairs_bs2.shape[1], EVALUATED_LEN):
                piece = slice(where, where + EVALUATED_LEN)
                loss_bs, cache = losses(pairs_bs2[:, piece].to(device), cache)
                total += float((loss_bs.double() * counts_bs[:, piece].to(device)).sum())
        for _ in range(idle):
            losses(torch.zeros(1, 1, 2, dtype=torch.int64, device=device))
    return total if ranks is None else ranks.sums(total)[0] / ranks.tensor


def _shared(together: list[list[Tensor]], ranks: Ranks) -> tuple[list[list[Tensor]], int]:
    """What this rank reads, and how many calls it makes for nothing, where ranks need each other at every call."""
    groups = ranks.world // ranks.tensor
    calls = [-(-len(sequences[-1]) // EVALUATED_LEN) for sequences in together]
    of_each = [sum(calls[group::groups]) for group in range(groups)]
    return together[ranks.group :: groups], max(of_each) - of_each[ranks.group] if ranks.parallel == "fsdp" else 0


def _side_by_side(pairs_s2: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sequences as rows, filled up after their ends, which nothing before can see; and which places count."""
    longest = max(map(len, pairs_s2))
    pairs_bs2 = torch.stack([F.pad(pair_s2.long(), (0, 0, 0, longest - len(pair_s2))) for pair_s2 in pairs_s2])
    return pairs_bs2, torch.stack([torch.arange(longest) < len(pair_s2) for pair_s2 in pairs_s2])
