"""Examples of which only some tokens count, several to a row; nothing of one is known to the next."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor

from mambakit.models.language_model import LanguageModel
from mambakit.parallel.vocabulary import IGNORED
from mambakit.text.conversations import Example
from mambakit.training.batches import Batch
from mambakit.training.objective import nats
from mambakit.training.processes import Ranks
from mambakit.training.settings import TrainSettings

TOO_LONG = ("refuse", "skip", "cut")


def pairs_of(example: Example) -> Tensor:
    """Each token and the one to predict from it, or `IGNORED`."""
    ids_n = torch.tensor(example.ids, dtype=torch.int32)
    asked_n = ids_n.masked_fill(~torch.tensor(example.counts), IGNORED)
    return torch.stack([ids_n[:-1], asked_n[1:]], -1)


def fitting(examples: Sequence[Example], seq_len: int, too_long: str) -> tuple[list[Tensor], list[str]]:
    """The pairs of all examples, none longer than a row, and notes of those that are left out or cut.

    With "refuse" a longer one raises ValueError. One of whose answers nothing is left is left out.
    """
    pairs, dropped, shortened = [], [], []
    longer = [example for example in examples if len(example.ids) > seq_len + 1]
    if longer and too_long == "refuse":
        longest = max(longer, key=lambda example: len(example.ids))
        are = "1 example is" if len(longer) == 1 else f"{len(longer)} examples are"
        raise ValueError(
            f"{are} longer than a row of {seq_len} tokens, up to {len(longest.ids) - 1} ({longest.name}); "
            "raise --seq-len, or choose --too-long skip or cut"
        )
    for example in examples:
        pairs_s2 = pairs_of(example)
        if len(pairs_s2) > seq_len:
            (shortened if too_long == "cut" else dropped).append(example.name)
            pairs_s2 = pairs_s2[: seq_len if too_long == "cut" else 0]
            if too_long == "cut" and not _counted(pairs_s2):
                dropped.append(shortened.pop())
        if _counted(pairs_s2):
            pairs.append(pairs_s2)
    told = ((dropped, f"left out: longer than {seq_len} tokens"), (shortened, f"cut to {seq_len} tokens"))
    return pairs, [f"{len(names)} {what}: {_first(names)}" for names, what in told if names]


class Packed:
    """Examples in rows of at most `seq_len` tokens, in an order of rows drawn anew for each epoch.

    Rows are filled as well as they can be, and stay the same in all epochs. Without `packing` each example is a row.
    The loss of a step is the mean over the tokens that count in all of its rows.
    """

    carries = False

    def __init__(self, pairs_s2: Sequence[Tensor], settings: TrainSettings, *, packing: bool = True):
        if not pairs_s2:
            raise ValueError("there is no example to train on")
        if settings.boundaries != "reset":
            raise ValueError(f"boundaries = {settings.boundaries!r}: nothing is carried from one example to the next")
        self._pairs_s2, self._settings = list(pairs_s2), settings
        lengths = [len(pair_s2) for pair_s2 in pairs_s2]
        self.rows = fill_rows(lengths, settings.seq_len) if packing else [[i] for i in range(len(lengths))]
        """Of each row the numbers of its examples."""
        self.tokens = sum(lengths)
        self.counted = sum(map(_counted, pairs_s2))
        self._order: dict[int, list[int]] = {}

    def at(self, step: int, rows: slice) -> Batch:
        """These rows of step number `step`, as long as the longest of the whole step."""
        chosen = [self._row(number) for number in range(step * self._settings.batch, (step + 1) * self._settings.batch)]
        laid_out = [[self._pairs_s2[i] for i in examples] for examples in chosen]
        length = max(sum(map(len, row)) for row in laid_out)
        counted = sum(_counted(pairs_s2) for row in laid_out for pairs_s2 in row)
        own = laid_out[rows]
        pairs_bs2 = torch.tensor([0, IGNORED]).repeat(len(own), length, 1)
        reset_bs = torch.zeros(len(own), length, dtype=torch.bool)
        for place, row in enumerate(own):
            start = 0
            for pairs_s2 in row:
                reset_bs[place, start] = True
                pairs_bs2[place, start : start + len(pairs_s2)] = pairs_s2
                start += len(pairs_s2)
        return Batch(pairs_bs2, reset_bs, True, len(laid_out) * length / counted)

    def _row(self, number: int) -> list[int]:
        """Rows go on from epoch to epoch, wherever steps begin and end."""
        epoch, place = divmod(number, len(self.rows))
        if epoch not in self._order:
            drawn = torch.Generator().manual_seed(self._settings.seed * 1_000_003 + epoch)
            recent = dict(sorted(self._order.items())[-1:])
            self._order = {**recent, epoch: torch.randperm(len(self.rows), generator=drawn).tolist()}
        return self.rows[self._order[epoch][place]]


def fill_rows(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of examples by row: the longest first, each where the least room is left."""
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []
    """Of rows that are not full, in order: the room, and which row."""
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(left, (lengths[i], -1))
        if place == len(left):
            rows.append([])
            free, row = room, len(rows) - 1
        else:
            free, row = left.pop(place)
        rows[row].append(i)
        if free > lengths[i]:
            insort(left, (free - lengths[i], row))
    return rows


class HeldOutAnswers:
    """Examples to evaluate on, each by itself: the mean loss of a token that counts, in nats."""

    measure = "loss_per_answer_token"

    def __init__(self, pairs_s2: Sequence[Tensor]):
        self.pairs_s2 = list(pairs_s2)
        self.size = sum(map(_counted, pairs_s2))
        """Tokens that count."""

    def first(self, at_least: int) -> "HeldOutAnswers":
        """So many that they have `at_least` tokens, or all."""
        count, total = 0, 0
        while count < len(self.pairs_s2) and total < at_least:
            total += len(self.pairs_s2[count])
            count += 1
        return HeldOutAnswers(self.pairs_s2[:count])

    def evaluate(self, model: LanguageModel, ranks: Ranks | None = None) -> float:
        return nats(model, self.pairs_s2, ranks) / self.size


def _counted(pairs_s2: Tensor) -> int:
    return int((pairs_s2[:, 1] != IGNORED).sum())


def _first(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
