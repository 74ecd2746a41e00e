"""Several tokens in one call: guesses of what comes next, checked by the model; see docs/generation.md.

A guess is only ever a reason to compute logits ahead of time. Who chooses tokens asks for the logits after each as
always, and gets those that are there already if the token is the one that was guessed. They are the same to the last
digit, so nothing shows of it but time.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

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
MOST_LOST, ALLOWED = 0.01, 2
"""What guesses may have cost: of the time since the first one, and so many steps to begin with."""
TOKEN_TAKES = 0.25
"""Until calls are measured: what each more token is taken to add to one, in steps."""
COUNTS, AFTER, THOUGHT = 0, -1, -2
"""Among the times of calls: what counting takes, what a step takes longer after a guess, and what thinking takes."""
COUNTS_TAKES = 0.1
"""Until it is measured: what a token that counts adds to the next call, in steps."""
MANY = 3
"""Tokens that count from which on the next call tells what that takes, and not only that a guess was before it."""
LONGER = 0.7
"""What more tokens are hoped to take in a longer call than has been tried, each beside those of the longest one."""
THINKS, ASLEEP = 0.015, 16
"""Of a step, what thinking about guesses may take on average; and the most steps without it."""
WORTH = 1.1
"""Times as many tokens per second as steps give: what a guess has to promise."""
SAVED = 8
"""Steps: what guesses have gained and may lose again."""
LEAST_CHANCE = 0.03
"""Guesses that are less likely to be reached are not thought about."""
FORGOTTEN = 256
"""Calls after which a time is no longer known."""
RECENT = 9
"""Calls of a length by whose median it is known."""
SELDOM = 32
"""Steps after the first guess that is made only to learn from, and so many more after each other one."""
FIRST_CALLS, FIRST_TAKES = 3, 0.5
"""So many first calls of a length, which may take long, do not show that its tokens take more than this, in steps."""
FIRST_STEPS, SETTLED = 3, 4
"""Steps by which one is known before the first guess; and those after a guess, and first of all, that take longer."""


class Times:
    """How long calls took lately, in seconds: by the number of tokens, and for each token before them that counts.

    Tokens of a chain that count are written into large states by the call after it.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        """Of those that were asked for since the last call of the kind."""
        self._when: dict[int, int] = {}
        """The last call of each length, as a number of calls."""
        self._calls = self._until = self._steps = 0
        """Those that there were, those up to which the least hope is known, and steps since one of several tokens."""

    def add(self, length: int, seconds: float, counted: int | None = None) -> float:
        """Take note of a call; what it took, without what was done in between.

        `counted` are the guessed tokens before it that count, and None says that there was no guess. A step is known by
        those after several others: after a guess, memory that steps read has to come from further away.
        """
        self._calls += 1
        self._steps = 0 if length > 1 else self._steps + 1
        if length == 1 and counted is None:
            if self.is_settled:
                self._put(1, seconds)
            elif self._knows(AFTER) and self._calls - self._when[AFTER] < self._steps:
                # It is the same guess that it comes after.
                self._recent[AFTER][-1] += max(0.0, seconds - self.of(1))
                self._medians.pop(AFTER, None)
            return seconds
        expected = self.of(length) + (counted or 0) * self.counts
        expected += self.after if length == 1 else 0.0
        if counted and counted >= MANY and self._knows(length):
            self._put(COUNTS, max(0.0, seconds - expected + counted * self.counts) / counted)
        elif length > 1:
            self._put(length, seconds - (counted or 0) * self.counts)
        else:
            self._put(AFTER, max(0.0, seconds - expected + self.after))
        return min(seconds, 2 * expected)

    def add_thought(self, seconds: float) -> int:
        """What it took to think about a guess that was not made; for how many steps not to think about the next."""
        self._put(THOUGHT, seconds)
        thought, step = self._median(THOUGHT) or 0.0, self.of(1)
        return min(ASLEEP, int(thought / (THINKS * step))) if step and self.is_settled else 0

    def of(self, length: int) -> float:
        """Of lengths without a call lately, what shorter ones make of it; never less than a step."""
        step = self._median(1) or 0.0
        if length == 1:
            return step
        shorter = next((n for n in reversed(LENGTHS) if n <= length and self._knows(n)), None)
        if shorter is None:
            return step * (1 + TOKEN_TAKES * (length - 1))
        takes = max(step, self._median(shorter) or 0.0)
        if len(self._recent[shorter]) < FIRST_CALLS:
            takes = min(takes, step * (1 + FIRST_TAKES * (shorter - 1)))
        return takes + LONGER * (takes - step) / (shorter - 1) * (length - shorter)

    @property
    def after(self) -> float:
        """What a step takes longer after a guess."""
        return self._median(AFTER) or 0.0

    @property
    def counts(self) -> float:
        """What a guessed token that counts adds to the call after it."""
        known = self._median(COUNTS)
        return COUNTS_TAKES * self.of(1) if known is None else known

    def may_try(self, length: int) -> bool:
        """Lengths are tried one after the other, as nobody knows what they take."""
        at = LENGTHS.index(length)
        return at == 0 or self._knows(LENGTHS[at - 1]) or self._knows(length)

    @property
    def least_hope(self) -> float:
        """How likely the next token has to be guessed for a call of some length to pay, if all after it are right."""
        if self._calls >= self._until:
            # Counting takes its part of what each token saves.
            step, saves = self.of(1), 1 - WORTH * self.counts / self.of(1)
            lengths = [length for length in LENGTHS if self.may_try(length)]
            least = min((WORTH * (self.of(length) + self.after) / step - 1) / (length - 1) for length in lengths)
            self._least, self._until = least / saves if saves > 0 else math.inf, self._calls + SELDOM
        return self._least

    @property
    def is_settled(self) -> bool:
        """Whether the last step took as long as others."""
        return self._steps > SETTLED

    @property
    def has_step(self) -> bool:
        return len(self._recent.get(1, ())) >= FIRST_STEPS and self._knows(1) and self.of(1) > 0

    def _put(self, kind: int, seconds: float) -> None:
        recent = self._recent.get(kind)
        if recent is None:
            recent = self._recent[kind] = deque(maxlen=RECENT)
        recent.append(seconds)
        self._medians.pop(kind, None)
        self._when[kind] = self._calls
        if kind not in (1, THOUGHT):
            self._until = self._calls

    def _median(self, kind: int) -> float | None:
        if kind not in self._medians and kind in self._recent:
            self._medians[kind] = sorted(self._recent[kind])[len(self._recent[kind]) // 2]
        return self._medians.get(kind)

    def _knows(self, length: int) -> bool:
        return length in self._when and self._calls - self._when[length] <= FORGOTTEN


class Speculation:
    """The only row of a decoder, with logits of guessed tokens computed ahead of time, where that pays.

    What guesses is made by `read(ids)` for each prompt. Others may use the decoder in between.
    """

    def __init__(
        self,
        decoder: Decoder,
        read: Callable[[list[int]], Source],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._decoder, self._read_prompt, self._clock = decoder, read, clock
        self._times = Times()
        self._spent = self._lost = 0.0
        """Seconds: in all, and of those lost by guessing."""
        self._ids: list[int] | None = None
        """The prompt, by which a text is known."""
        self._told = 0
        """Tokens after it that the source has seen."""
        self.calls = self.guessed = self.accepted = 0

    def step(self, ids: list[int], tokens: Sequence[int]) -> Tensor:
        """The logits after `tokens`, which followed the prompt `ids`; the decoder has seen all but the last."""
        if self._ids is not ids:
            self._begin(ids)
        if self._asleep:
            self._asleep -= 1
            self._steps += 1
            return self._decoder.step([tokens[-1]])
        begun, news = self._clock(), tokens[self._told :]
        for token in news:
            self._source.add(token)
        self._told = len(tokens)
        if len(news) == 1 and self._guess and self._guess[0] == news[0]:
            logits_1w = self._accept()
            self._steps = 0 if self._guess else self._steps + 1
            self._count(self._clock() - begun, 0, None)
            return logits_1w
        counted = self._counted - 1 if self._chained and len(news) == 1 else None
        self._forget()
        length = self._choose_length()
        self._guess = self._source.guess(length - 1) if length > 1 else []
        if not self._guess and self._source.learns:
            self._asleep = self._times.add_thought(self._clock() - begun)
        logits_1w = self._read(tokens[-1])
        self._steps = 0 if self._guess else self._steps + 1
        self._count(self._clock() - begun, length, counted)
        return logits_1w

    def _begin(self, ids: list[int]) -> None:
        """With another text."""
        self._chained = False
        """Whether the last call was one of several tokens."""
        self._ids, self._source, self._told = ids, self._read_prompt(ids), 0
        self._steps = self._patience = 0
        """Since there was a guess, and before one is thought about by who learns from guesses alone."""
        self._asleep = 0
        """Steps before the next guess is thought about by who learns from every token."""
        self._decoder.expect(LENGTHS[-1])
        self._forget()

    def _forget(self) -> None:
        self._guess: list[int] = []
        """What is left of it."""
        self._counted = 1
        """Tokens of the last call that were chosen."""

    def _accept(self) -> Tensor:
        self._counted += 1
        self._decoder.accept(0, self._counted)
        self.accepted += 1
        self._guess.pop(0)
        return self._ahead_tw[self._counted - 1 : self._counted]

    def _read(self, token: int) -> Tensor:
        self._chained = bool(self._guess)
        if not self._chained:
            return self._decoder.step([token])
        logits_tw = self._decoder.chains([[token, *self._guess]])
        self.calls, self.guessed = self.calls + 1, self.guessed + len(self._guess)
        self._ahead_tw = logits_tw
        return logits_tw[:1]

    def _choose_length(self) -> int:
        """Of the next call: that from which most tokens per second are hoped for."""
        times, learns = self._times, self._source.learns
        if not times.has_step or (not learns and 0 < self._steps < self._patience):
            return 1
        # Most often this says that no guess pays, and it is asked before every token.
        first = self._source.hopes(1)
        if not first or (learns and first[0] < times.least_hope):
            return 1
        step, counts, hopes = times.of(1), times.counts, self._source.hopes(LENGTHS[-1] - 1)
        best, per_second, tokens, chance = 1, WORTH / step, 1.0, 1.0
        for number, hope in enumerate(hopes, 2):
            chance *= hope
            if chance < LEAST_CHANCE:
                break
            tokens += chance
            if number in LENGTHS and times.may_try(number) and self._may_lose(times.of(number) - step):
                hoped = tokens / (times.of(number) + times.after + counts * (tokens - 1))
                if hoped > per_second:
                    best, per_second = number, hoped
        # Trying is how some learn, and half of what may be lost is for that.
        tries = best == 1 and not learns and self._steps >= self._patience
        if tries and self._may_lose(2 * (times.of(LENGTHS[0]) - step)):
            best, self._patience = LENGTHS[0], self._patience + SELDOM
        return best

    def _may_lose(self, seconds: float) -> bool:
        return self._lost + seconds <= ALLOWED * self._times.of(1) + MOST_LOST * self._spent

    def _count(self, seconds: float, length: int, counted: int | None) -> None:
        times = self._times
        if length:
            seconds = times.add(length, seconds, counted)
        if length == 1 and counted is None and (times.is_settled or not times.of(1)):
            self._spent += seconds
            return
        step, seconds = times.of(1), seconds + (times.counts if not length else -(counted or 0) * times.counts)
        self._spent += seconds
        # Few gains are saved up: a text that was easy to guess says little about the next part of it.
        self._lost = max(-SAVED * step, self._lost + seconds - step)


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
