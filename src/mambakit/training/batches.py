"""Documents as rows of tokens. What a step reads follows from its number and the seed, not from who reads it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mambakit.text.documents import Document
from mambakit.text.tokens import Tokens
from mambakit.training.settings import TrainSettings


class Batch(NamedTuple):
    """Rows of one step."""

    pairs_bs2: Tensor
    """Each token and the one to predict from it."""
    reset_bs: Tensor | None
    """Where a document starts; None if states are carried into it."""
    starts_afresh: bool
    """The rows do not continue those of the step before."""
    scale: float = 1.0
    """Of the mean over all places, where only some of the step's tokens count: it makes it the mean over these."""


def encode(documents: Sequence[Document], tokens: Tokens) -> list[Tensor]:
    """The ids of each document after the end token, which is what a document starts from."""
    dtype = torch.int16 if tokens.vocab_size <= 2**15 else torch.int32
    encoded = []
    for name, content in documents:
        try:
            encoded.append(torch.tensor([tokens.end, *tokens.encode(content)], dtype=dtype))
        except ValueError as error:
            raise ValueError(f"{name} is {error}") from error
    return encoded


class Rows:
    """Documents in an order drawn anew for each epoch, one after the other, in `batch` rows of equal length.

    Step by step each row goes on where it stopped, so that the state may be carried, until the epoch ends.
    """

    carries = True

    def __init__(self, documents_s: Sequence[Tensor], end: int, settings: TrainSettings):
        self._documents_s, self._end, self._settings = list(documents_s), end, settings
        total = sum(map(len, documents_s))
        self.tokens = total
        row_len = total // settings.batch
        self.steps_per_epoch = (row_len - 1) // settings.seq_len
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"the text has {total} tokens, but {settings.batch} rows of {settings.seq_len} need "
                f"{settings.batch * (settings.seq_len + 1)}; give more text, or a smaller --batch or --seq-len"
            )
        self._epoch = -1
        self._rows_bS = torch.empty(0)

    def at(self, step: int, rows: slice) -> Batch:
        """These rows of step number `step`."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._rows_bS, self._epoch = self._lay_out(epoch), epoch
        s = self._settings.seq_len
        ids_bS = self._rows_bS[rows, place * s : place * s + s + 1].long()
        inputs_bs = ids_bS[:, :-1]
        reset_bs = inputs_bs == self._end if self._settings.boundaries == "reset" else None
        return Batch(torch.stack([inputs_bs, ids_bS[:, 1:]], -1), reset_bs, place == 0)

    def _lay_out(self, epoch: int) -> Tensor:
        drawn = torch.Generator().manual_seed(self._settings.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self._documents_s), generator=drawn).tolist()
        stream_n = torch.cat([self._documents_s[i] for i in order])
        batch = self._settings.batch
        return stream_n[: len(stream_n) // batch * batch].unflatten(0, (batch, -1))
