"""Several tokens in one pass: guesses from the text so far, checked by the model; see docs/generation.md.

A guess is only ever a reason to compute logits ahead of time. Who chooses tokens asks for the logits after each as
always, and gets those that are there already if the token is the one that was guessed.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mambakit.inference.decoder import Decoder, StepByStep
from mambakit.models.language_model import LanguageModel
from mambakit.ops.backends import use_backend

KINDS = ("off", "auto", "ngram")
LONGEST, SHORTEST = 4, 2
"""Tokens at the end of the text by which an earlier place is found."""
MOST_GUESSED = 8
MOST_AGAIN = 16
"""Tokens of earlier passes that are read again at most, before a pass without guesses brings the state up to date."""
MOST_LOST = 0.04
"""Of a generation's time, what guesses may have cost."""
LAYER_TAKES = 5e-4
"""Until a pass is measured: seconds it is taken to need per layer, beside those of a step and of reading its tokens."""
PASSES: "WeakKeyDictionary[LanguageModel, float]" = WeakKeyDictionary()
"""Seconds that a model's passes took lately."""
CLOSE = 256
"""Logits that are nearer than this many roundings of the largest may change places in another order of adding."""


class Ngrams:
    """A text that can be asked what followed the last time it ended like this."""

    def __init__(self, ids: Sequence[int]):
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        """The place after each n-gram's latest occurrence that something follows."""
        for token in ids:
            self.add(token)

    def add(self, token: int) -> None:
        for length in range(SHORTEST, LONGEST + 1):
            if len(self._ids) >= length:
                self._places[tuple(self._ids[-length:])] = len(self._ids)
        self._ids.append(token)

    def guess(self, most: int) -> list[int]:
        """What followed where the text's end, as much of it as is found, stood last; again and again if it is short."""
        for length in range(LONGEST, SHORTEST - 1, -1):
            place = self._places.get(tuple(self._ids[-length:])) if len(self._ids) >= length else None
            if place is not None:
                period = self._ids[place:]
                return [period[i % len(period)] for i in range(most)]
        return []


class Speculation:
    """A decoder of one row that computes logits of guessed tokens ahead of time, where that has paid so far.

    `seconds` is what reading the prompt took. With `greedy` it can go back to single steps: see `exact`.
    """

    def __init__(
        self,
        model: LanguageModel,
        decoder: Decoder | StepByStep,
        ids: Sequence[int],
        *,
        backend: str,
        greedy: bool,
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._model, self._decoder, self._clock = model, decoder, clock
        self._backend, self._greedy = "torch" if backend == "torch" else "auto", greedy
        self._text = Ngrams(ids)
        self._most_guessed = MOST_GUESSED // 2
        self._forget()
        # What is measured, in seconds: in all, of that lost by guessing, and of a step lately.
        self._spent, self._lost = seconds, 0.0
        self._pass_adds = LAYER_TAKES * len(model.backbone.order) + seconds * (self._most_guessed + 1) / len(ids)
        self._step_takes: float | None = None
        self.passes = self.guessed = self.accepted = 0

    def _forget(self) -> None:
        """The decoder's state is the one after all tokens, and made by single steps."""
        self._base: Any = None
        """The cache before the tokens `_again`, while the decoder's is an older one."""
        self._again: list[int] = []
        self._guess: list[int] = []
        self._ahead: list[Tensor] = []
        """Logits after each of the guess's tokens."""
        self._after: Any = None
        """The cache after all of them."""
        self._exact: Any = None
        """The last cache that no pass has part in, and the tokens since."""
        self._since: list[int] = []

    def load(self, cache: Any) -> None:
        self._decoder.load(cache)
        self._forget()

    def step(self, ids_b: Tensor) -> Tensor:
        begun, (token,) = self._clock(), ids_b.tolist()
        self._text.add(token)
        if self._exact is not None:
            self._since.append(token)
        if self._guess and self._guess[0] == token:
            logits_bw, took_part = self._accept(token), True
        else:
            self._most_guessed = max(2, self._most_guessed // 2) if self._guess else self._most_guessed
            guess = self._text.guess(self._most_guessed) if self._may_guess() else []
            if not self._again and self._base is not None and not guess:
                self._decoder.load(self._base)
                self._base = None
            took_part = bool(guess) or self._base is not None
            logits_bw = self._pass(token, guess) if took_part else self._decoder.step(ids_b)
        self._count(self._clock() - begun, took_part)
        return logits_bw

    def cache(self) -> Any:
        if self._base is not None:
            if self._again:
                _, self._base = self._read(self._again)
            self._decoder.load(self._base)
            self._base, self._again, self._guess = None, [], []
        return self._decoder.cache()

    @property
    def is_exact(self) -> bool:
        """Whether no pass had part in the logits that were returned last."""
        return self._exact is None

    def exact(self) -> Tensor:
        """The logits that single steps give instead of those returned last, in which a pass had part.

        A pass adds in another order than single steps do. All that this changes is which of two almost equal logits is
        the larger: who takes the largest asks for these where two are `close`.
        """
        begun = self._clock()
        self._decoder.load(self._exact)
        *before, last = [torch.tensor([token]) for token in self._since]
        for ids_b in before:
            self._decoder.step(ids_b)
        logits_bw = self._decoder.step(last)
        self._forget()
        seconds = self._clock() - begun
        self._spent, self._lost = self._spent + seconds, self._lost + seconds
        return logits_bw

    def _may_guess(self) -> bool:
        if self._step_takes is None or len(self._again) > MOST_AGAIN:
            return False
        takes = PASSES.get(self._model, self._step_takes + self._pass_adds)
        # Where the guess is wrong, the next token takes a pass as well.
        return self._lost + 2 * max(0.0, takes - self._step_takes) <= MOST_LOST * self._spent

    def _count(self, seconds: float, took_part: bool) -> None:
        self._spent += seconds
        if not took_part:
            self._step_takes = recent(self._step_takes, seconds)
            return
        # Gains are not saved up: a text that was easy to guess says little about the next part of it.
        self._lost = max(0.0, self._lost + seconds - (self._step_takes or 0.0))

    def _accept(self, token: int) -> Tensor:
        self.accepted += 1
        self._again.append(token)
        self._guess = self._guess[1:]
        if not self._guess:
            self._base, self._again = self._after, []
            self._most_guessed = min(MOST_GUESSED, 2 * self._most_guessed)
        return self._ahead.pop(0)

    def _pass(self, token: int, guess: list[int]) -> Tensor:
        """Read a token and the guess that follows it."""
        begun = self._clock()
        if self._base is None:
            self._base = self._decoder.cache()
            if self._greedy and self._exact is None:
                self._exact, self._since = self._base, [token]
        self._again.append(token)
        x_sd, self._after = self._read([*self._again, *guess])
        with use_backend(self._backend):
            logits_sw = self._model.logits(x_sd[len(self._again) - 1 :])
        first_1w, *self._ahead = logits_sw.split(1)
        self._guess = guess
        if guess:
            self.passes, self.guessed = self.passes + 1, self.guessed + len(guess)
            PASSES[self._model] = recent(PASSES.get(self._model), self._clock() - begun)
        else:
            self._base, self._again = self._after, []
        return first_1w

    def _read(self, ids: list[int]) -> tuple[Tensor, Any]:
        """From the base: the residual stream at each token, and the cache after them."""
        with torch.no_grad(), use_backend(self._backend):
            ids_1s = torch.tensor([ids], device=self._model.backbone.embedding.weight.device)
            x_1sd, after = self._model.backbone(self._model.embed(ids_1s), self._base)
        return x_1sd[0], after


def recent(before: float | None, now: float) -> float:
    """A running mean of what something takes."""
    return now if before is None else before + 0.2 * (now - before)


def close(logits_1w: Tensor) -> bool:
    """Whether rounding may decide which logit is the largest."""
    if logits_1w.shape[1] < 2:
        return False
    first, second = logits_1w[0].topk(2).values.tolist()
    largest = float(logits_1w[0].masked_fill(logits_1w[0].isinf(), 0).abs().amax())
    return first - second <= CLOSE * torch.finfo(logits_1w.dtype).eps * largest


def why_not(model: LanguageModel, rows: int) -> str | None:
    """What keeps guesses from being of use, or None."""
    if rows != 1:
        return f"it is for one prompt at a time, got {rows}"
    dtype = model.backbone.embedding.weight.dtype
    if dtype not in (torch.float32, torch.float64):
        return f"in {dtype} the tokens of a pass would not be those of single steps; use float32"
    return None
