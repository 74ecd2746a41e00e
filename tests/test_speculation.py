"""Guessed tokens change how long a text takes, and nothing else."""

import random

import pytest
import torch

import mambakit as mk
from mambakit.inference import speculation
from mambakit.inference.speculation import Ngrams, Speculation, close
from mambakit.text.tokens import Bytes
from test_engine import MODELS, make


@pytest.fixture
def always(monkeypatch):
    """Guess wherever there is something to guess, whether it pays or not."""
    monkeypatch.setattr(speculation, "MOST_LOST", float("inf"))


def prompt(seed: int) -> list[int]:
    """Some of it twice."""
    draw = random.Random(seed)
    return [draw.randrange(257) for _ in range(20 + seed)] * 2


def both(model: mk.LanguageModel, ids: list[int], **options) -> tuple[list[int], Speculation]:
    """Generate with and without guesses: the tokens, which are the same, and what was guessed."""
    want = mk.generate(model, ids, **options)[0].tolist()
    run = mk.stream(model, ids, speculate="ngram", **options)
    assert [int(token) for token in run] == want
    assert run._speculation is not None
    return want, run._speculation


def test_what_followed_before():
    text = Ngrams([1, 2, 3, 4, 5, 9, 3, 4, 7, 8])
    assert text.guess(3) == []
    text.add(3)
    assert text.guess(3) == []
    text.add(4)
    assert text.guess(3) == [7, 8, 3]
    text.add(5)
    assert text.guess(4) == [9, 3, 4, 7]
    for token in (6, 1, 2, 3):
        text.add(token)
    assert text.guess(2) == [4, 5]


def test_a_period_goes_on():
    assert Ngrams([7, 1, 2, 1, 2, 1]).guess(5) == [2, 1, 2, 1, 2]
    assert Ngrams([5, 5, 5]).guess(4) == [5, 5, 5, 5]


@pytest.mark.usefixtures("always")
class TestTokens:
    @pytest.mark.parametrize("bits", [None, 8])
    @pytest.mark.parametrize("name", MODELS)
    def test_greedy(self, name, bits):
        """10,000 tokens over all cases."""
        model, accepted, tokens = make(name, bits), 0, 0
        for seed in range(5):
            told, guesses = both(model, prompt(seed), max_new_tokens=250, temperature=0)
            accepted, tokens = accepted + guesses.accepted, tokens + len(told)
        assert tokens == 1250
        assert accepted > 100

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 0, "repetition_penalty": 1.2},
            {"temperature": 0.3, "seed": 4},
            {"temperature": 0.2, "top_k": 5, "top_p": 0.9, "seed": 5, "repetition_penalty": 0.8},
            {"temperature": 0, "backend": "torch"},
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
    def test_caches_at_any_time(self, name):
        model = make(name)
        plain = mk.stream(model, prompt(2), max_new_tokens=60, temperature=0)
        guessing = mk.stream(model, prompt(2), max_new_tokens=60, temperature=0, speculate="ngram")
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

    def test_almost_equal_logits_are_computed_by_single_steps(self, monkeypatch):
        """With every choice taken for close, all of them are those of single steps, bit by bit."""
        model, logits = make("mamba2"), []
        monkeypatch.setattr(speculation, "CLOSE", 1e9)
        choose = mk.inference.sampling.Sampler.choose

        def noted(self, logits_bw, *rest):
            logits[-1].append(logits_bw.clone())
            return choose(self, logits_bw, *rest)

        monkeypatch.setattr(mk.inference.sampling.Sampler, "choose", noted)
        for kind in ("off", "ngram"):
            logits.append([])
            mk.generate(model, prompt(1), max_new_tokens=40, temperature=0, speculate=kind)
        assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


def test_what_is_close():
    assert close(torch.tensor([[1.0, 2.0, 2.0]]))
    assert close(torch.tensor([[1.0, 2.0, 2.00001]]))
    assert not close(torch.tensor([[1.0, 2.0, 2.01]]))
    assert not close(torch.tensor([[-torch.inf, 2.0, -torch.inf]]))
    assert not close(torch.tensor([[2.0]]))


class Clock:
    """Time that passes as a test says."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """A decoder of which a step takes a second, a pass or the prompt `pass_takes`; nothing is computed."""

    def __init__(self, pass_takes: float):
        self.clock, self.steps = Clock(), 0
        self.guesses = Speculation(
            make("mamba2"), self, [1, 2, 3, 4], backend="auto", greedy=False, seconds=pass_takes, clock=self.clock
        )
        self.guesses._read = self.read
        self.pass_takes = pass_takes

    def load(self, cache: object) -> None:
        pass

    def cache(self) -> str:
        return "cache"

    def step(self, ids_b: torch.Tensor) -> torch.Tensor:
        self.clock.now += 1.0
        self.steps += 1
        return torch.zeros(1, 257)

    def read(self, ids: list[int]) -> tuple[torch.Tensor, str]:
        self.clock.now += self.pass_takes
        return torch.zeros(len(ids), 16), "after"


class TestTime:
    def run(self, tokens: list[int], pass_takes: float) -> Timed:
        timed = Timed(pass_takes)
        for count, token in enumerate(tokens, 1):
            timed.guesses.step(torch.tensor([token]))
            assert timed.clock.now <= 1.05 * count + 0.05 * pass_takes
        return timed

    @pytest.mark.parametrize("pass_takes", [0.5, 1.5, 3.0, 20.0])
    def test_wrong_guesses_do_not_cost_much(self, pass_takes):
        draw = random.Random(0)
        tokens = [token for _ in range(1000) for token in (1, 2, draw.randrange(5, 257))]
        assert self.run(tokens, pass_takes).guesses.passes > 0

    @pytest.mark.parametrize("pass_takes", [1.5, 3.0])
    def test_right_ones_pay(self, pass_takes):
        tokens = [10, 11, 12, 13, 14, 15, 16, 17] * 100
        timed = self.run(tokens, pass_takes)
        assert timed.clock.now < len(tokens) / 1.5

    def test_from_good_to_bad(self):
        draw = random.Random(0)
        bad = [token for _ in range(1000) for token in (1, 2, draw.randrange(5, 257))]
        good = self.run([10, 11, 12, 13] * 200, 2.0).clock.now
        assert self.run([10, 11, 12, 13] * 200 + bad, 2.0).clock.now - good <= 1.05 * len(bad)


class TestTrouble:
    def test_what_makes_no_sense(self):
        model = make("mamba2")
        with pytest.raises(ValueError, match="speculate is 'much', expected one of"):
            mk.generate(model, [1], max_new_tokens=1, speculate="much")
        with pytest.raises(ValueError, match="one prompt at a time, got 2"):
            mk.generate(model, [[1], [2]], max_new_tokens=1, speculate="ngram")
        with pytest.raises(ValueError, match=r"in torch.bfloat16 the tokens"):
            mk.generate(make("mamba2").bfloat16(), [1], max_new_tokens=1, speculate="ngram")

    def test_auto_leaves_it_out(self):
        model, given = make("mamba2"), [prompt(0), prompt(1)]
        want = mk.generate(model, given, max_new_tokens=9, temperature=0)
        assert torch.equal(mk.generate(model, given, max_new_tokens=9, temperature=0, speculate="auto"), want)
        run = mk.stream(model, given[0], max_new_tokens=9, temperature=0, speculate="auto")
        assert [int(token) for token in run] == want[0].tolist()
        assert run._speculation is not None
