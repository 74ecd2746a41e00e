"""Guessed tokens change how long a text takes, and nothing else.

MAMBAKIT_SPECULATION_TOKENS=10000 compares so many greedy tokens of every family, hybrid and format.
"""

import argparse
import os
import random
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import mambakit as mk
from mambakit.inference import Engine, speculation
from mambakit.inference.guesses import Draft, Ngrams
from mambakit.inference.speculation import Speculation, Times
from mambakit.kernels.cpu.library import why_missing
from mambakit.text.tokens import Bytes
from test_engine import MODELS, make

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
TOKENS = int(os.environ.get("MAMBAKIT_SPECULATION_TOKENS", "500"))


@pytest.fixture
def always(monkeypatch):
    """Guess wherever there is something to guess, whether it pays or not."""
    monkeypatch.setattr(speculation, "MOST_LOST", float("inf"))
    monkeypatch.setattr(speculation.Times, "of", lambda self, length: 1.0)
    monkeypatch.setattr(speculation.Times, "may_try", lambda self, length: True)


def prompt(seed: int) -> list[int]:
    """Some of it twice."""
    draw = random.Random(seed)
    return [draw.randrange(257) for _ in range(20 + seed)] * 2


def smaller(name: str) -> mk.LanguageModel:
    """As a draft it is right now and then: a copy with a little noise."""
    model = make(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.003 * torch.randn_like(parameter)
    return model


def told(kind: Any) -> dict[str, Any]:
    """A kind of guesses, or a model that makes them, as it is asked for."""
    return {"draft": kind} if isinstance(kind, mk.LanguageModel) else {"speculate": kind}


def both(model: mk.LanguageModel, ids: list[int], speculate: Any = "ngram", **options) -> tuple[list[int], Speculation]:
    """Generate with and without guesses: the tokens, which are the same, and what was guessed."""
    want = mk.generate(model, ids, **options)[0].tolist()
    run = mk.stream(model, ids, **told(speculate), **options)
    assert [int(token) for token in run] == want
    assert run._speculation is not None
    return want, run._speculation


class TestNgrams:
    def test_what_followed_before(self):
        text = Ngrams([1, 2, 3, 4, 5, 9, 2, 3, 4, 7, 8])
        assert text.guess(3) == []
        for token in (2, 3):
            text.add(token)
            assert text.guess(3) == []
            assert text.hopes(3) == []
        text.add(4)
        assert text.guess(3) == [7, 8, 2], "the latest of two places"
        text.add(5)
        assert text.guess(4) == [9, 2, 3, 4]

    def test_the_longest_agreement(self):
        """The latest place is not the best."""
        text = Ngrams([1, 2, 3, 4, 5, 9, 2, 3, 4, 7, 0, 1, 2, 3, 4])
        assert text.guess(2) == [5, 9]

    def test_a_period_goes_on(self):
        assert Ngrams([7, 1, 2, 1, 2, 1]).guess(5) == [2, 1, 2, 1, 2]
        assert Ngrams([5, 5, 5, 5]).guess(4) == [5, 5, 5, 5]

    def test_hopes_are_what_came_true(self):
        draw = random.Random(0)
        same, other = Ngrams([1, 2, 3, 4, 5, 6, 7] * 30), Ngrams([])
        for _ in range(300):
            for token in (1, 2, 3, draw.randrange(4, 257)):
                other.add(token)
        for token in (300, 1, 2, 3):
            other.add(token)
        assert min(same.hopes(8)) > 0.9
        assert other.hopes(1)[0] < 0.1

    def test_against_a_search(self):
        """The guess follows a place that agrees for as long as any of the latest ones does."""
        draw = random.Random(1)
        ids: list[int] = []
        text = Ngrams(ids)
        for _ in range(2000):
            token = draw.randrange(3)
            text.add(token)
            ids.append(token)
            lengths = [agreement(ids, place) for place in range(1, len(ids))]
            best = max(lengths, default=0)
            if text.guess(1):
                assert text._length >= 3
                assert text._length <= min(best, 16)
                assert agreement(ids, text._place) >= text._length
                assert text.guess(1) == [ids[text._place]]
            else:
                assert best < 3


def agreement(ids: list[int], place: int) -> int:
    length = 0
    while length < place and ids[place - 1 - length] == ids[len(ids) - 1 - length]:
        length += 1
    return length


@pytest.mark.usefixtures("always")
class TestTokens:
    @pytest.mark.parametrize("bits", [None, 8])
    @pytest.mark.parametrize("name", MODELS)
    def test_greedy(self, name, bits):
        model, accepted, tokens, seed = make(name, bits), 0, 0, 0
        while tokens < TOKENS:
            told, guesses = both(model, prompt(seed % 40), max_new_tokens=250, temperature=0)
            accepted, tokens, seed = accepted + guesses.accepted, tokens + len(told), seed + 1
        assert accepted > TOKENS / 20

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 0, "repetition_penalty": 1.2},
            {"temperature": 0.3, "seed": 4},
            {"temperature": 0.2, "top_k": 5, "top_p": 0.9, "seed": 5, "repetition_penalty": 0.8},
            {"temperature": 0, "backend": "cpu"},
            {"temperature": 0, "stop": [[9, 9], 3]},
            {"temperature": 0.5, "seed": 1, "prefill_chunk": 7},
        ],
    )
    @pytest.mark.parametrize("name", MODELS)
    def test_of_all_kinds(self, name, options):
        for seed in range(2):
            both(make(name), prompt(seed), max_new_tokens=80, **options)

    def test_with_a_constraint(self):
        pytest.importorskip("llguidance")
        schema = {"type": "array", "items": {"enum": ["spring", "summer"]}, "minItems": 6, "maxItems": 9}
        options = {"constraint": schema, "tokenizer": Bytes(), "seed": 3}
        _, guesses = both(make("mamba2"), prompt(0), max_new_tokens=150, **options)
        assert guesses.accepted > 10

    @pytest.mark.parametrize("name", MODELS)
    def test_logits_are_those_of_single_steps(self, name, monkeypatch):
        model, logits = make(name), []
        choose = mk.inference.generation.choose

        def noted(requests, logits_bw, *rest):
            logits[-1].append(logits_bw.clone())
            return choose(requests, logits_bw, *rest)

        monkeypatch.setattr(mk.inference.generation, "choose", noted)
        for kind in ("off", "ngram"):
            logits.append([])
            mk.generate(model, prompt(1), max_new_tokens=40, temperature=0, speculate=kind)
        assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))

    @pytest.mark.parametrize("drafted", [False, True])
    @pytest.mark.parametrize("name", MODELS)
    def test_caches_at_any_time(self, name, drafted):
        model = make(name)
        plain = mk.stream(model, prompt(2), max_new_tokens=60, temperature=0)
        kind = smaller(name) if drafted else "ngram"
        guessing = mk.stream(model, prompt(2), max_new_tokens=60, temperature=0, **told(kind))
        for place, (want, got) in enumerate(zip(plain, guessing, strict=True)):
            assert torch.equal(want, got)
            if place % 7 == 5:
                then = [
                    mk.generate(model, [3], max_new_tokens=4, temperature=0, cache=run.cache)
                    for run in (plain, guessing)
                ]
                assert torch.equal(*then)
        assert guessing._speculation is not None
        assert guessing._speculation.accepted

    @pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.4, "seed": 2}])
    @pytest.mark.parametrize("name", MODELS)
    def test_of_a_smaller_model(self, name, options):
        _, guesses = both(make(name, 8), prompt(3), smaller(name), max_new_tokens=120, **options)
        assert guesses.accepted > 20

    @pytest.mark.parametrize("name", MODELS)
    def test_a_model_that_guesses_for_itself_is_always_right(self, name):
        model = make(name)
        _, guesses = both(model, prompt(3), model, max_new_tokens=100, temperature=0)
        assert guesses.guessed - guesses.accepted < 16, "what is left of the last guess"

    @pytest.mark.parametrize("name", MODELS)
    def test_a_draft_reads_what_it_missed(self, name):
        """Its guesses are those of a draft that has read every token as it came."""
        model, draw = smaller(name), random.Random(0)
        ids = prompt(4)
        draft = Draft(model, ids)
        for _ in range(12):
            for _ in range(draw.choice([1, 1, 2, 40])):
                token = draw.randrange(257)
                draft.add(token)
                ids.append(token)
            count = draw.randint(1, 6)
            guess = draft.guess(count)
            assert guess == mk.generate(model, ids, max_new_tokens=count, temperature=0)[0].tolist()
            taken = guess[: draw.randint(0, count)]
            for token in taken:
                draft.add(token)
                ids.append(token)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", MODELS)
def test_in_an_engine(name, bits):
    """While a request is alone it is guessed; tokens, log-probabilities and states are those without, bit for bit."""
    model, found = make(name, bits), []
    for kind in ("off", "ngram"):
        engine, draw, requests = Engine(model, speculate=kind, prefill_chunk=64), random.Random(0), []
        for seed in range(6):
            heat, count = draw.choice([0, 0, 0.3]), draw.choice([40, 90])
            more: dict[str, Any] = {"temperature": heat, "seed": seed, "keep_state": True, "logprobs": 1}
            requests.append(engine.add(prompt(seed), count, **more))
            for _ in range(draw.choice([0, 1, 70])):
                engine.step()
            if seed == 4:
                requests[-1].cancel()
        engine.run()
        found.append(requests)
    for want, got in zip(*found, strict=True):
        assert (got.tokens, got.logprobs, got.finish_reason) == (want.tokens, want.logprobs, want.finish_reason)
        if want.state is not None:
            assert got.state is not None
            assert torch.equal(got.state.x_1d, want.state.x_1d)
            assert equal_caches(got.state.cache, want.state.cache)
    assert engine._groups[0]._speculation.accepted > 10


def equal_caches(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return all(equal_caches(a, b) for a, b in zip(one, other, strict=True))
    return one == other


class Clock:
    """Time that passes as a test says."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """A decoder of which a step takes a second, each more token of a chain so many seconds, and each of these that
    counts so many in the next call. Steps after a chain take more anyway, less and less so; nothing is computed."""

    def __init__(self, tokens: list[int], token_takes: float, counts: float = 0.0, after: float = 0.0):
        self.clock, self.token_takes, self.counts, self.first = Clock(), token_takes, counts, 0.0
        self.after, self.counted, self.more, self.room_takes = after, 0, 0.0, 0.0
        decoder: Any = self
        self.ids, self.said = tokens, []
        self.guesses = Speculation(decoder, lambda ids: Ngrams(ids), clock=self.clock)

    def say(self, token: int) -> None:
        self.said.append(token)
        self.guesses.step(self.ids, self.said)

    def expect(self, tokens: int) -> None:
        self.clock.now, self.room_takes = self.clock.now + self.room_takes, 0.0

    def step(self, ids_b: torch.Tensor) -> torch.Tensor:
        self.clock.now, self.first = self.clock.now + 1.0 + self.first, 0.0
        self.clock.now += self.more
        self.more /= 3
        return self.write()

    def chains(self, ids: list[list[int]]) -> torch.Tensor:
        self.clock.now += 1 + self.token_takes * (len(ids[0]) - 1)
        self.more = self.after
        return self.write().expand(len(ids[0]), 257)

    def accept(self, row: int, tokens: int) -> None:
        self.counted = tokens - 1

    def write(self) -> torch.Tensor:
        """What counts, before what is new."""
        self.clock.now, self.counted = self.clock.now + self.counts * self.counted, 0
        return torch.zeros(1, 257)


def hostile(count: int) -> list[int]:
    """What looks as if it had been there, and goes on otherwise."""
    draw = random.Random(0)
    return [token for _ in range(count) for token in (1, 2, 3, draw.randrange(5, 257))]


class TestTime:
    def run(self, tokens: list[int], token_takes: float, counts: float = 0.0, after: float = 0.0) -> Timed:
        timed = Timed([1, 2, 3, 4], token_takes, counts, after)
        for count, token in enumerate(tokens, 1):
            timed.say(token)
            # Nobody knows what a call takes before the first one of its length, nor what counting does.
            assert timed.clock.now <= 1.02 * count + speculation.ALLOWED + 4 * (token_takes + counts + after)
        return timed

    @pytest.mark.parametrize("token_takes", [0.05, 0.5, 1.0, 1.2])
    def test_wrong_guesses_do_not_cost_much(self, token_takes):
        self.run(hostile(500), token_takes)

    @pytest.mark.parametrize("token_takes", [0.1, 0.3])
    def test_right_ones_pay(self, token_takes):
        tokens = [*range(10, 18)] * 100
        timed = self.run(tokens, token_takes)
        assert timed.clock.now < len(tokens) / 2
        assert timed.guesses.accepted > len(tokens) / 2

    def test_room_for_chains_is_no_loss(self):
        """It is made once, like the decoder, however long that takes beside a step."""
        timed = Timed([1, 2, 3, 4], 0.3)
        timed.room_takes = 15.0
        for token in [*range(10, 18)] * 40:
            timed.say(token)
        assert timed.clock.now < 15 + 160
        assert timed.guesses.accepted > 160

    def test_not_where_a_token_takes_a_step(self):
        timed = self.run([*range(10, 18)] * 100, 1.2)
        assert timed.guesses.accepted < 100

    @pytest.mark.parametrize(("token_takes", "counts"), [(0.6, 0.5), (0.2, 0.9), (0.1, 1.5)])
    def test_not_where_the_next_call_takes_longer(self, token_takes, counts):
        """Right guesses that cost more than they save, but not when they are made."""
        self.run([*range(10, 18)] * 100, token_takes, counts)

    @pytest.mark.parametrize(("token_takes", "after"), [(0.1, 0.3), (0.1, 1.0), (0.5, 0.3), (0.5, 0.8)])
    def test_what_follows_a_guess_is_counted(self, token_takes, after):
        """A step after a chain takes longer than others, and is none to compare chains with."""
        draw = random.Random(3)
        some = [token for _ in range(300) for token in (1, 2, 3, 4, 5, *([6, 7, 8] if draw.random() < 0.5 else [9]))]
        self.run(hostile(300), token_takes, after=after)
        self.run(some, token_takes, 0.1, after)

    def test_a_step_is_known_by_those_that_are_not_slowed_down(self):
        times = Times()
        for seconds in (9.0, 3.0, 2.0, 1.5, *[1.0] * 12):
            times.add(1, seconds)
        for _ in range(20):
            times.add(8, 4.8)
            times.add(1, 1.6, 0)
            times.add(1, 1.3)
            times.add(1, 1.1)
        assert times.of(1) == 1.0
        assert times.after == pytest.approx(1.0), "what all of them take longer"

    @pytest.mark.parametrize("module", [argparse, textwrap, zipfile])
    @pytest.mark.parametrize(
        ("token_takes", "counts", "after", "least"),
        [(0.16, 0.02, 0.15, 1.1), (0.5, 0.1, 0.7, 0.98), (0.7, 0.2, 0.9, 0.98)],
    )
    def test_code(self, module, token_takes, counts, after, least):
        """With the times of a model in float32 it pays, and with those of narrow weights nothing is lost."""
        ids = list(Path(module.__file__).read_bytes()[8000:9400])
        timed = Timed(ids[:1000], token_takes, counts, after)
        for token in ids[1000:]:
            timed.say(token)
        assert timed.clock.now <= 400 / least

    def test_long_calls_pay_where_short_ones_do_not(self):
        """As with narrow weights: what a call takes beside its tokens is much of a short one."""
        timed = self.run([*range(10, 18)] * 100, 0.4, 0.05, 0.5)
        assert timed.guesses.accepted > 500

    @pytest.mark.parametrize("thinks", [0.01, 0.05, 0.2])
    def test_thinking_does_not_take_long(self, thinks):
        timed, draw = Timed([1, 2, 3, 4], 0.3), random.Random(0)

        class Slow(Ngrams):
            def hopes(self, most: int) -> list[float]:
                timed.clock.now += thinks
                return super().hopes(most)

        timed.guesses._read_prompt = Slow
        for _ in range(1000):
            timed.say(draw.randrange(257))
        assert timed.clock.now <= 1.02 * 1000

    @pytest.mark.parametrize("token_takes", [0.1, 0.5])
    def test_from_good_to_bad(self, token_takes):
        good, bad = [10, 11, 12, 13] * 200, hostile(500)
        first = self.run(good, token_takes).clock.now
        assert self.run(good + bad, token_takes).clock.now - first <= 1.05 * len(bad)

    @pytest.mark.parametrize("first", [0.0, 9.0])
    def test_a_bad_draft_does_not_cost_much(self, first):
        """It learns from trying, and tries as much as it may, also where the first step takes longer than others."""
        timed = Timed([1], 0.5)

        class Wrong:
            learns = False

            def add(self, token: int) -> None:
                pass

            def hopes(self, most: int) -> list[float]:
                return [0.0] * most

            def guess(self, count: int) -> list[int]:
                timed.clock.now += 0.3 * count
                return [300] * count

        timed.guesses._read_prompt = lambda ids: Wrong()
        timed.first = first
        for token in range(1000):
            timed.say(token % 257)
        assert timed.guesses.calls > 5
        assert timed.clock.now <= 1.05 * 1000 + first


class TestTrouble:
    def test_what_makes_no_sense(self):
        model = make("mamba2")
        with pytest.raises(ValueError, match="speculate is 'much', expected one of"):
            mk.generate(model, [1], max_new_tokens=1, speculate="much")
        with pytest.raises(ValueError, match="one prompt at a time, got 2"):
            mk.generate(model, [[1], [2]], max_new_tokens=1, speculate="ngram")
        with pytest.raises(ValueError, match=r"decoded in one call, and .* torch.float64"):
            mk.generate(make("mamba2").double(), [1], max_new_tokens=1, speculate="ngram")
        with pytest.raises(ValueError, match='backend "torch" computes one token at a time'):
            mk.generate(model, [1], max_new_tokens=1, speculate="ngram", backend="torch")

    def test_models_that_cannot_guess(self):
        model = make("mamba2")
        other = mk.LanguageModel(mk.ModelConfig(vocab_size=99, **MODELS["mamba2"]))
        with pytest.raises(ValueError, match="a model of 99 tokens, expected one of the same 257"):
            mk.generate(model, [1], max_new_tokens=1, draft=other)
        with pytest.raises(ValueError, match=r"draft: .* torch.float64"):
            mk.generate(model, [1], max_new_tokens=1, draft=make("mamba2").double())
        with pytest.raises(ValueError, match="draft is a str, expected a language model"):
            mk.generate(model, [1], max_new_tokens=1, draft="small")  # type: ignore[arg-type]

    def test_auto_leaves_it_out(self):
        model, given = make("mamba2"), [prompt(0), prompt(1)]
        want = mk.generate(model, given, max_new_tokens=9, temperature=0)
        assert torch.equal(mk.generate(model, given, max_new_tokens=9, temperature=0, speculate="auto"), want)
        run = mk.stream(model, given[0], max_new_tokens=9, temperature=0, speculate="auto")
        assert [int(token) for token in run] == want[0].tolist()
        assert run._speculation is not None
        run = mk.stream(model, given[0], max_new_tokens=9, temperature=0, speculate="auto", backend="torch")
        assert [int(token) for token in run] == want[0].tolist()
        assert run._speculation is None
