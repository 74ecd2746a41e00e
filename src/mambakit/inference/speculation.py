"""Several tokens in one call: guesses of what comes next, checked by the model; see docs/generation.md.

A guess is only ever a reason to compute logits ahead of time. Who chooses tokens asks for the logits after each as
always, and gets those that are there already if the token is the one that was guessed. They are the same to the last
digit, so nothing shows of it but time.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mambakit.arguments import shown
from mambakit.inference import decoder as decoders
from mambakit.inference.decoder import Decoder
from mambakit.inference.guesses import Draft, Ngrams, Source
from mambakit.models.language_model import LanguageModel
from mambakit.ops.decode import DECODE

KINDS = ("off", "auto", "ngram")
LENGTHS = (2, 4, 8, 12, 16)
"""Tokens in a call, the one that is sure among them. Products take them four at a time."""
MOST_LOST = 0.04
"""Of a generation's time, what guesses may have cost."""
TOKEN_TAKES = 0.25
"""Until calls are measured: what each more token is taken to add to one, in steps."""
FORGOTTEN = 64
"""Calls after which a time is no longer known."""
RECENT = 5
"""Calls of a length by whose median it is known."""
SELDOM = 32
"""Steps between guesses that are made only to learn from."""
FIRST_STEPS = 3
"""Steps before the first guess: the very first takes longer than others."""


class Times:
    """How long calls of each length took lately, in seconds."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._when: dict[int, int] = {}
        """The last call of each length, as a number of calls."""
        self._calls = 0

    def add(self, length: int, seconds: float) -> float:
        """Take note of a call; what it took, without what something else did in between."""
        known = min(seconds, 2 * self.of(length)) if 1 in self._medians else seconds
        self._calls += 1
        self._when[length] = self._calls
        recent = self._recent.setdefault(length, deque(maxlen=RECENT))
        recent.append(seconds)
        self._medians[length] = sorted(recent)[len(recent) // 2]
        return known

    def of(self, length: int) -> float:
        """Of lengths without a call lately, what shorter ones make of it; never less than a step."""
        step, shorter = self._medians.get(1, 0.0), [n for n in LENGTHS if n <= length and self._knows(n)]
        if length == 1 or not shorter:
            return step * (1 + TOKEN_TAKES * (length - 1))
        takes = max(step, self._medians[shorter[-1]])
        return takes + (takes - step) / (shorter[-1] - 1) * (length - shorter[-1])

    def may_try(self, length: int) -> bool:
        """Lengths are tried one after the other, as nobody knows what they take."""
        at = LENGTHS.index(length)
        return at == 0 or self._knows(LENGTHS[at - 1]) or self._knows(length)

    @property
    def has_step(self) -> bool:
        return len(self._recent.get(1, ())) >= FIRST_STEPS and self._knows(1)

    def _knows(self, length: int) -> bool:
        return length in self._when and self._calls - self._when[length] <= FORGOTTEN


class Speculation:
    """The only row of a decoder, with logits of guessed tokens computed ahead of time, where that pays.

    What guesses is made by `read(ids)` for each prompt; `seconds` is what reading that took the model. Others may use
    the decoder in between.
    """

    def __init__(
        self,
        decoder: Decoder,
        read: Callable[[list[int]], Source],
        *,
        seconds: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._decoder, self._read_prompt, self._seconds, self._clock = decoder, read, seconds, clock
        self._times = Times()
        self._ids: list[int] | None = None
        """The prompt, by which a text is known."""
        self._told = 0
        """Tokens after it that the source has seen."""
        self.calls = self.guessed = self.accepted = 0

    def step(self, ids: list[int], tokens: Sequence[int]) -> Tensor:
        """The logits after `tokens`, which followed the prompt `ids`; the decoder has seen all but the last."""
        if self._ids is not ids:
            self._begin(ids)
        begun, news = self._clock(), tokens[self._told :]
        for token in news:
            self._source.add(token)
        self._told = len(tokens)
        if len(news) == 1 and self._guess and self._guess[0] == news[0]:
            logits_1w, length = self._accept(), 0
        else:
            self._forget()
            length = self._choose_length()
            self._guess = self._source.guess(length - 1) if length > 1 else []
            logits_1w = self._read(tokens[-1])
        self._steps = 0 if self._guess else self._steps + 1
        self._count(self._clock() - begun, length)
        return logits_1w

    def _begin(self, ids: list[int]) -> None:
        """With another text, of which nothing is lost yet."""
        self._ids, self._source, self._told = ids, self._read_prompt(ids), 0
        self._spent, self._lost = self._seconds, 0.0
        """Seconds: in all, and of those lost by guessing."""
        self._steps = 0
        """Since there was a guess."""
        self._decoder.expect(LENGTHS[-1])
        self._forget()

    def _forget(self) -> None:
        self._guess: list[int] = []
        """What is left of it."""
        self._ahead: list[Tensor] = []
        """Logits after each of its tokens."""
        self._counted = 1
        """Tokens of the last call that were chosen."""

    def _accept(self) -> Tensor:
        self._counted += 1
        self._decoder.accept(0, self._counted)
        self.accepted += 1
        self._guess.pop(0)
        return self._ahead.pop(0)

    def _read(self, token: int) -> Tensor:
        if not self._guess:
            return self._decoder.step(torch.tensor([token]))
        logits_tw = self._decoder.chains([[token, *self._guess]])
        self.calls, self.guessed = self.calls + 1, self.guessed + len(self._guess)
        first_1w, *self._ahead = logits_tw.split(1)
        return first_1w

    def _choose_length(self) -> int:
        """Of the next call: that from which most tokens per second are hoped for."""
        hopes = self._source.hopes(LENGTHS[-1] - 1) if self._times.has_step else []
        if not hopes:
            return 1
        step = self._times.of(1)
        best, per_second, tokens, chance = 1, 1 / step, 1.0, 1.0
        for number, hope in enumerate(hopes, 2):
            chance *= hope
            tokens += chance
            if number in LENGTHS and tokens / self._times.of(number) > per_second and self._times.may_try(number):
                best, per_second = number, tokens / self._times.of(number)
        may_lose = MOST_LOST
        if best == 1 and not self._source.learns and self._steps >= SELDOM:
            # Trying is how it learns, and half of what may be lost is for that.
            best, may_lose = LENGTHS[0], MOST_LOST / 2
        may = self._lost + self._times.of(best) - step <= may_lose * self._spent
        return best if may else 1

    def _count(self, seconds: float, length: int) -> None:
        step = self._times.of(1)
        if length:
            seconds = self._times.add(length, seconds)
        self._spent += seconds
        if length != 1:
            # Gains are not saved up: a text that was easy to guess says little about the next part of it.
            self._lost = max(0.0, self._lost + seconds - step)


def make_source(
    asked: str, draft: LanguageModel | None, model: LanguageModel, prompts: Sequence[Sequence[int]], backend: str
) -> Source | None:
    """What guesses, having read the prompt, if anything does. What is asked for by name does, or it is a ValueError."""
    guesses = is_wanted(asked, model, len(prompts), backend)
    if draft is not None:
        check_draft(draft, model, len(prompts), backend)
        return Draft(draft, *prompts)
    return Ngrams(*prompts) if guesses else None


def is_wanted(asked: str, model: LanguageModel, rows: int, backend: str) -> bool:
    """Whether n-grams guess. What is asked for by name is, or it is a ValueError."""
    if asked not in KINDS:
        raise ValueError(f"speculate is {shown(asked)}, expected one of {', '.join(map(repr, KINDS))}")
    reason = None if asked == "off" else why_not(model, rows, backend)
    if asked == "ngram" and reason is not None:
        raise ValueError(f'speculate="ngram": {reason}; "auto" leaves it out')
    return asked != "off" and reason is None


def check_draft(draft: LanguageModel, model: LanguageModel, rows: int, backend: str) -> None:
    if not isinstance(draft, LanguageModel):
        raise ValueError(f"draft is a {type(draft).__name__}, expected a language model")
    own, other = model.config.vocab_size, draft.config.vocab_size
    if own != other:
        raise ValueError(f"draft is a model of {other} tokens, expected one of the same {own} tokens")
    reason = why_not(model, rows, backend) or why_not(draft, rows, backend)
    if reason is not None:
        raise ValueError(f"draft: {reason}; leave it out")


def why_not(model: LanguageModel, rows: int, backend: str) -> str | None:
    """What keeps guesses from being of use, or None."""
    if rows != 1:
        return f"it is for one prompt at a time, got {rows}"
    if backend != "auto" and backend not in DECODE.kernels:
        return f'backend "{backend}" computes one token at a time'
    reason = decoders.why_not(model)
    if reason is None and DECODE.offer(model.backbone.embedding.weight.detach()) is None:
        reason = "there is no kernel for it on this machine"
    return None if reason is None else f"it needs a model that is decoded in one call, and {reason}"
