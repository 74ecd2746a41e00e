"""What may come next in a text: from what followed before, or from a smaller model.

A source is told every token of the text and asked for the ones that may follow. It also says how likely it is to be
right: whether a guess is worth its time is another's to decide.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from mambakit.inference.decoder import Decoder
from mambakit.models.language_model import LanguageModel
from mambakit.ops import few_rows

LONGEST, SHORTEST = 16, 3
"""Tokens at the end of the text by which an earlier place is found."""
CANDIDATES = 16
"""Earlier places that are compared, the latest ones."""
READ_AT_ONCE = 512
"""Tokens of a prompt that a draft model reads in one pass."""


class Source(Protocol):
    learns: bool
    """Whether it knows how good it is without having been asked."""

    def add(self, token: int) -> None:
        """One more token of the text."""
        ...

    def hopes(self, most: int) -> list[float]:
        """How likely each of the next tokens is guessed, if those before it were; as many as it would guess now."""
        ...

    def guess(self, count: int) -> list[int]:
        """The next tokens, as many as it hopes for at most."""
        ...


class Rate:
    """How often something was right, lately more than before."""

    def __init__(self) -> None:
        self.value, self.count = 0.5, 0

    def add(self, right: bool) -> None:
        self.count += 1
        self.value += max(0.05, 1 / (self.count + 1)) * (right - self.value)


class Ngrams:
    """What followed where the text's end, as much of it as is found, stood before."""

    learns = True

    def __init__(self, ids: Sequence[int]):
        self._ids: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        """The place after each n-gram's latest occurrence."""
        self._before: list[int] = []
        """For every place, the one before it that follows the same n-gram, or 0."""
        self._place = self._length = 0
        """What followed an earlier occurrence of so many last tokens; 0: there is none."""
        self._rates = [Rate() for _ in range(LONGEST + 1)]
        """By the number of tokens that agree: how often the next one did too."""
        for token in ids:
            self.add(token)

    def add(self, token: int) -> None:
        goes_on = bool(self._length) and self._ids[self._place] == token
        if self._length:
            self._rates[self._length].add(goes_on)
        self._ids.append(token)
        gram = tuple(self._ids[-SHORTEST:])
        found = self._last.get(gram, 0)
        self._before.append(found)
        self._last[gram] = len(self._ids)
        if goes_on:
            # No other place can agree for longer: it would have done so before.
            self._place, self._length = self._place + 1, min(self._length + 1, LONGEST)
        else:
            self._find(found)

    def _find(self, place: int) -> None:
        """The earlier place where the text agrees for longest, the latest of those."""
        ids, here = self._ids, len(self._ids)
        self._length = 0
        for _ in range(CANDIDATES):
            if not place or self._length == LONGEST:
                return
            length = SHORTEST
            while length < min(place, LONGEST) and ids[place - length - 1] == ids[here - length - 1]:
                length += 1
            if length > self._length:
                self._place, self._length = place, length
            place = self._before[place - 1]

    def hopes(self, most: int) -> list[float]:
        if not self._length:
            return []
        # One that has not been seen yet is taken to be as good as the next shorter one.
        shorter = range(self._length, SHORTEST - 1, -1)
        known = next((self._rates[n] for n in shorter if self._rates[n].count), self._rates[0])
        hopes = [known.value]
        for rate in self._rates[self._length + 1 : self._length + most]:
            known = rate if rate.count else known
            hopes.append(known.value)
        return hopes + [known.value] * (most - len(hopes))

    def guess(self, count: int) -> list[int]:
        """What followed, again and again if it is short."""
        found = self._ids[self._place : self._place + count] if self._length else []
        return found if len(found) == count or not found else [found[i % len(found)] for i in range(count)]


class Draft:
    """What a smaller model holds most likely. It reads the text too, when it is asked."""

    learns = False

    def __init__(self, model: LanguageModel, ids: Sequence[int]):
        self._decoder, self._rate = Decoder(model), Rate()
        with torch.no_grad():
            cache = model.fresh_cache(1)
            for begin in range(0, len(ids), READ_AT_ONCE):
                piece_1s = torch.tensor([ids[begin : begin + READ_AT_ONCE]])
                _, cache = model.backbone(model.embed(piece_1s), cache)
        self._decoder.load(cache)
        self._unread: list[int] = []
        self._read: list[int] = []
        """Its own guesses that it has read, as far as the text has not come to them."""
        self._guessed: list[int] = []
        """Those that the text has not come to."""
        self._counted = 1

    def add(self, token: int) -> None:
        if self._guessed:
            right = self._guessed.pop(0) == token
            self._rate.add(right)
            if not right:
                self._guessed = []
        if self._read and self._read[0] == token and not self._unread:
            self._read.pop(0)
            self._counted += 1
        else:
            self._read = []
            self._unread.append(token)

    def hopes(self, most: int) -> list[float]:
        return [self._rate.value] * most

    def guess(self, count: int) -> list[int]:
        logits_tw = self._catch_up()
        found = [int(logits_tw[-1].argmax())]
        while len(found) < count:
            found.append(int(self._decoder.chains([found[-1:]], on=True)[-1].argmax()))
        self._read, self._guessed = found[:-1], list(found)
        return found

    def _catch_up(self) -> torch.Tensor:
        """Read what the text has since it was asked last; the logits after it."""
        self._decoder.accept(0, self._counted)
        logits_tw = torch.empty(0)
        while self._unread:
            piece, self._unread = self._unread[: few_rows.MAX_ROWS], self._unread[few_rows.MAX_ROWS :]
            logits_tw = self._decoder.chains([piece])
            self._counted = len(piece)
            self._decoder.accept(0, self._counted)
        return logits_tw
