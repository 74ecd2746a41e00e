"""Many requests at once: each gets what it would get alone."""

import gc
import itertools
import math
import os
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import mambakit as mk
from mambakit.inference import Engine, State
from mambakit.inference.requests import Stops
from mambakit.text.tokens import Bytes

M2 = mk.Mamba2Config(d_model=16, state_rank=8, per_head_dim=8)
MODELS = {
    "mamba1": {"block": mk.Mamba1Config(d_model=16, state_rank=4), "n_layer": 2},
    "mamba2": {"block": M2, "n_layer": 2},
    "mamba3": {"block": mk.Mamba3Config(d_model=16, state_rank=8, per_head_dim=8), "n_layer": 2},
    "hybrid": {
        "layers": (
            (mk.ParallelConfig(M2, mk.AttentionConfig(16, 4, 2, rope_theta=1e4)), mk.MLPConfig(16, 24)),
            (mk.AttentionConfig(16, 2, window=20), mk.MoEConfig(16, 12, 4, 2)),
        )
    },
}
VOCABULARY = 257


def make(name: str, bits: int | None = None) -> mk.LanguageModel:
    torch.manual_seed(0)
    model = mk.LanguageModel(mk.ModelConfig(vocab_size=VOCABULARY, **MODELS[name]))
    with torch.no_grad():
        model.backbone.embedding.weight.normal_()  # so that every prompt goes its own way
    return model if bits is None else mk.quantize(model, bits=bits)


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 90))] for _ in range(count)]


def options(i: int) -> dict:
    """Of all kinds, request by request."""
    kinds = [
        {"temperature": 0},
        {"temperature": 0.8, "top_k": 20},
        {"top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 1.3, "min_p": 0.01},
    ]
    return {**kinds[i % 4], "seed": i, "max_new_tokens": 3 + 5 * i % 31}


def some_biased(i: int) -> dict:
    return options(i) | ({"frequency_penalty": 0.5, "presence_penalty": -0.2, "logit_bias": {3: 2.0}} if i % 3 else {})


def alone(model: mk.LanguageModel, ids: list[int], backend: str = "auto", **more) -> list[int]:
    engine = Engine(model, max_rows=1, backend=backend)
    request = engine.add(ids, **more)
    engine.run()
    return request.tokens


def test_bias_against_a_loop():
    """What is added to logits by token, and taken off those of tokens that the new text has said."""
    model, ids, added = make("mamba2"), [5, 6, 7], {9: 1.5, 11: -100.0}
    want: list[int] = []
    for _ in range(40):
        logits_w = model(torch.tensor([[*ids, *want]]))[0][0, -1].double()
        for token, number in added.items():
            logits_w[token] += number
        for token in set(want):
            logits_w[token] -= 0.75 * want.count(token) + 0.4
        want.append(int(logits_w.argmax()))
    bias = {"frequency_penalty": 0.75, "presence_penalty": 0.4, "logit_bias": added}
    assert alone(model, ids, temperature=0, max_new_tokens=40, **bias) == want
    assert alone(model, ids, temperature=0, max_new_tokens=40) != want
    forced = alone(model, ids, max_new_tokens=5, logit_bias={3: 1e4})
    assert forced == [3] * 5


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", MODELS)
def test_together_as_alone(name, bits):
    model = make(name, bits)
    given = prompts(40)
    engine = Engine(model, max_rows=35, prefill_chunk=50)
    draw, requests = random.Random(1), []
    for i, ids in enumerate(given):
        requests.append(engine.add(ids, **some_biased(i)))
        for _ in range(draw.randrange(3)):
            engine.step()
        if i % 9 == 8:
            requests[-3].cancel()
    engine.run()
    assert engine.active == engine.waiting == 0
    for i, request in enumerate(requests):
        want = alone(model, given[i], **some_biased(i))
        assert request.done
        if request.finish_reason == "cancelled":
            assert want[: len(request.tokens)] == request.tokens
        else:
            assert (request.finish_reason, request.tokens) == ("length", want)
    assert sum(request.finish_reason == "cancelled" for request in requests) >= 3


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", MODELS)
def test_to_the_last_bit(name, bits):
    """Log-probabilities of prompts and tokens, with others there and without."""
    model, given = make(name, bits), prompts(20, seed=5)
    asked = [{**options(i), "logprobs": 2, "echo": True} for i in range(20)]
    engine, draw, requests = Engine(model, prefill_chunk=24), random.Random(2), []
    for ids, more in zip(given, asked, strict=True):
        requests.append(engine.add(ids, **more))
        for _ in range(draw.randrange(3)):
            engine.step()
    engine.run()
    for request, ids, more in zip(requests, given, asked, strict=True):
        engine = Engine(model, max_rows=1, prefill_chunk=24)
        want = engine.add(ids, **more)
        engine.run()
        assert len(want.prompt_logprobs) == len(ids) - 1
        assert (request.prompt_logprobs, request.logprobs) == (want.prompt_logprobs, want.logprobs)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_that_are_read_together(name):
    model, given = make(name), prompts(13)
    engine = Engine(model, prefill_chunk=16, prefill_rows=5)
    requests = [engine.add(ids, **options(i)) for i, ids in enumerate(given)]
    engine.step()
    requests[4].cancel()
    engine.run()
    for i, request in enumerate(requests):
        if i != 4:
            assert request.tokens == alone(model, given[i], **options(i))
    assert requests[4].finish_reason == "cancelled"
    with pytest.raises(ValueError, match="leave out prefill_rows"):
        Engine(model, prefix_cache=mk.PrefixCache(), prefill_rows=2)


def test_nothing_is_left_behind():
    """$MAMBAKIT_REQUESTS of them, a third cancelled somewhere: all are let go of, and so is their memory."""
    count = int(os.environ.get("MAMBAKIT_REQUESTS", "150"))
    block = mk.Mamba2Config(d_model=64)
    model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=VOCABULARY))
    engine = Engine(model, max_rows=8, prefill_chunk=64, prefix_cache=mk.PrefixCache(max_entries=8))
    draw, running, seen, sizes = random.Random(0), [], [], []
    for i in range(count):
        running.append(engine.add(prompts(1, i)[0] * 2, draw.randrange(1, 12), seed=i))
        seen.append(weakref.ref(running[-1]))
        while len(running) == 8:
            engine.step()
            if draw.random() < 0.1:
                draw.choice(running).cancel()
            running = [request for request in running if not request.done]
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]))
    engine.run()
    running.clear()
    gc.collect()
    assert not any(one() for one in seen)
    assert engine.active == engine.waiting == 0
    assert sizes[-1] <= 1.05 * sizes[count // 3]


@pytest.mark.parametrize("name", ["mamba2", "hybrid"])
def test_as_generate_gives_it(name):
    model = make(name)
    for i, ids in enumerate(prompts(6)):
        want = mk.generate(model, ids, **options(i))
        assert alone(model, ids, **options(i)) == want[0].tolist()
        assert (
            alone(model, ids, "torch", **options(i))
            == mk.generate(model, ids, **options(i), backend="torch")[0].tolist()
        )


@pytest.mark.parametrize("name", ["mamba2", "hybrid"])
def test_on_the_torch_backend_rows_come_and_go(name):
    model = make(name)
    engine = Engine(model, max_rows=5, backend="torch")
    requests = [engine.add(ids, **options(i)) for i, ids in enumerate(prompts(12))]
    engine.run()
    for i, (request, ids) in enumerate(zip(requests, prompts(12), strict=True)):
        assert request.tokens == alone(model, ids, "torch", **options(i))


def test_long_prompts_do_not_hold_up_others():
    model = make("mamba2")
    engine = Engine(model, prefill_chunk=16)
    first = engine.add([1, 2, 3], max_new_tokens=20, temperature=0)
    engine.step()
    long = engine.add(list(range(200)), max_new_tokens=2, temperature=0)
    behind = engine.add([5], max_new_tokens=1, temperature=0)
    for _ in range(5):
        engine.step()
    assert len(first.tokens) == 6
    assert not long.tokens
    assert behind.done, "a short prompt does not wait for a long one"
    assert engine.waiting == 1
    engine.run()
    assert len(long.tokens) == 2


def test_nor_do_short_ones_hold_up_a_long_one():
    """Half of the pieces are of the request that came first."""
    model = make("mamba2")
    engine = Engine(model, prefill_chunk=16)
    long = engine.add(list(range(200)), max_new_tokens=1, temperature=0)
    steps = 0
    while not long.done:
        engine.add([steps % VOCABULARY] * 16, max_new_tokens=1, temperature=0)
        engine.step()
        steps += 1
    assert steps <= 2 * (200 // 16 + 1)


class TestEnds:
    def test_ids_strings_and_lengths(self):
        model, tokens = make("mamba1"), Bytes()
        free = alone(model, [65, 66], max_new_tokens=40, temperature=1.0, seed=5)
        engine = Engine(model, tokenizer=tokens)
        text = tokens.decode(free)
        by_id = engine.add([65, 66], max_new_tokens=40, seed=5, stop=free[7])
        by_ids = engine.add([65, 66], max_new_tokens=40, seed=5, stop=[free[10:12], VOCABULARY - 1])
        by_text = engine.add([65, 66], max_new_tokens=40, seed=5, stop=[text[5:8], "never there"])
        nothing = engine.add([65, 66], max_new_tokens=0)
        engine.run()
        assert by_id.tokens == free[: free.index(free[7]) + 1]
        assert by_ids.tokens[-2:] == free[10:12]
        assert by_text.text == text[: text.index(text[5:8])]
        assert [one.finish_reason for one in (by_id, by_ids, by_text, nothing)] == ["stop", "stop", "stop", "length"]
        assert nothing.tokens == []

    def test_text_as_it_comes_only_grows(self):
        model, tokens = make("mamba1"), Bytes()
        engine, seen = Engine(model, tokenizer=tokens), []
        request = engine.add(
            [65], max_new_tokens=120, seed=1, stop=["zzzz"], on_token=lambda request: seen.append(request.text)
        )
        engine.run()
        assert len(seen) == 121 - (request.finish_reason == "length")
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
        assert seen[-1] == tokens.decode(request.tokens)

    @pytest.mark.parametrize(
        ("said", "stop", "found", "text"),
        [
            ("€uro".encode(), "\ufffd", None, "€uro"),
            ("a😀b".encode(), "a\ufffd", None, "a😀b"),
            (b"a\xffbcd", "\ufffd", 3, "a"),
            (b"a\xff\xff\xffb", "a\ufffd", 5, ""),
            (b"ab\xe2\x82", "\ufffd", None, "ab\ufffd"),
            (b"ab\xe2\x82c", "b\ufffdc", 5, "a"),
        ],
    )
    def test_the_character_for_what_is_none(self, said, stop, found, text):
        """Bytes that may yet become a character are none of it."""
        stops = Stops([], [stop], Bytes())
        ends = [upto for upto in range(1, len(said) + 1) if stops.found(list(said[:upto]))]
        assert ends[:1] == ([] if found is None else [found])
        assert stops.text(list(said[:found]), final=True) == text

    @pytest.mark.parametrize("kind", ["bytes of nothing", "all bytes", "characters"])
    def test_a_long_text_is_not_decoded_again(self, kind):
        draw, decoded = random.Random(0), []

        class Counting(Bytes):
            def decode(self, ids):
                decoded.append(len(ids))
                return super().decode(ids)

        said = {
            "bytes of nothing": [255] * 600,
            "all bytes": [draw.randrange(256) for _ in range(600)],
            "characters": list("😀€ä".encode() * 66),
        }[kind]
        stops = Stops([], ["never"], Counting())
        for upto in range(1, len(said) + 1):
            assert stops.text(said[:upto], final=True) == Bytes().decode(said[:upto])
        assert max(decoded) <= 4 * Stops.WINDOW
        assert sum(decoded) < 100 * len(said)

    def test_what_is_no_part_of_an_engine(self):
        model = make("mamba2")
        with pytest.raises(ValueError, match="prefix_cache is a bool, expected a PrefixCache"):
            Engine(model, prefix_cache=True)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"tokenizer is a str, expected one with decode\(ids\)"):
            Engine(model, tokenizer="x")  # type: ignore[arg-type]
        engine = Engine(model)
        with pytest.raises(ValueError, match="on_token is a str, expected a function of a request"):
            engine.add([1], on_token="x")  # type: ignore[arg-type]
        wrong: dict[str, tuple[Any, str]] = {
            "echo": (torch.zeros(2), "echo is .*, expected a whole number of at least 0"),
            "keep_state": (1, "keep_state is 1, expected True or False"),
            "ends": (5, "ends is a int, expected a list of numbers of tokens"),
            "stop": (5.5, "stop is a float, expected ids, strings, or a list of them"),
        }
        for name, (value, told) in wrong.items():
            with pytest.raises(ValueError, match=told):
                engine.add([1], **{name: value})
        for other in ("x", torch.nn.Linear(2, 2)):
            with pytest.raises(ValueError, match=f"model is a {type(other).__name__}, expected a LanguageModel"):
                Engine(other)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=f"model is a {type(other).__name__}, expected a LanguageModel"):
                mk.generate(other, [1], max_new_tokens=1)  # type: ignore[arg-type]
        assert not engine.step()

    @pytest.mark.parametrize("at", [1, 3])
    def test_a_callback_that_raises_ends_its_own_request(self, at):
        model = make("mamba2")
        engine = Engine(model)

        def fails(request: Any) -> None:
            if len(request.tokens) >= at:
                raise KeyError("lost")

        failing = engine.add([1, 2], 3, temperature=0, on_token=fails)
        other = engine.add([3, 4], 5, temperature=0)
        engine.run()
        assert isinstance(failing.error, KeyError)
        assert failing.finish_reason == ("error" if at < 3 else "length")
        assert len(failing.tokens) == at
        assert other.tokens == alone(model, [3, 4], max_new_tokens=5, temperature=0)

    def test_a_callback_that_raises_at_a_failure_does_not_hide_it(self):
        def fails(request: Any) -> None:
            raise KeyError("lost")

        request = Engine(make("mamba2")).add([1, 2], 3, on_token=fails)
        failure = RuntimeError("no memory")
        request.finish("error", failure)
        assert request.error is failure

    def test_cancelled_everywhere(self):
        model = make("mamba2")
        engine = Engine(model, prefill_chunk=8, max_rows=2)
        running, reading, waiting = (engine.add(list(range(20)), seed=0) for _ in range(3))
        while not running.tokens:
            engine.step()
        for request in (waiting, reading, running):
            request.cancel()
        engine.step()
        assert [one.finish_reason for one in (running, reading, waiting)] == ["cancelled"] * 3
        assert not engine.step()


class TestStates:
    @pytest.mark.parametrize("name", MODELS)
    def test_going_on_from_a_state(self, name):
        model = make(name)
        engine = Engine(model)
        first = engine.add([1, 2, 3, 4], max_new_tokens=5, temperature=0, keep_state=True)
        engine.run()
        assert isinstance(first.state, State)
        assert first.state.ids == (1, 2, 3, 4, *first.tokens)
        more = [*first.state.ids, 9, 8]
        again = engine.add(more, max_new_tokens=5, temperature=0, state=first.state)
        same = engine.add(list(first.state.ids), max_new_tokens=3, temperature=0, state=first.state)
        engine.run()
        assert again.reused_tokens == 9
        assert again.tokens == alone(model, more, max_new_tokens=5, temperature=0)
        assert same.tokens == alone(model, list(first.state.ids), max_new_tokens=3, temperature=0)
        with pytest.raises(ValueError, match="does not begin with the tokens of its state"):
            engine.add([7, 7], state=first.state)
        with pytest.raises(ValueError, match="state is a tuple, expected the State of a request"):
            engine.add([7, 7], state=())  # type: ignore[arg-type]
        state = first.state
        for broken in (state._replace(x_1d="x"), state._replace(x_1d=state.x_1d.to_sparse())):
            with pytest.raises(ValueError, match=r"x_1d is str|is a sparse_coo tensor"):
                engine.add([*state.ids, 7], state=broken)

    @pytest.mark.parametrize("name", ["mamba2", "hybrid"])
    def test_known_prefixes(self, name):
        model, known = make(name), mk.PrefixCache()
        engine = Engine(model, prefix_cache=known, prefill_chunk=16)
        shared, own = prompts(1, 8)[0] * 2, prompts(3, 9)
        for ids in own:
            request = engine.add([*shared, *ids], max_new_tokens=4, temperature=0, ends=[len(shared)])
            engine.run()
            assert request.tokens == alone(model, [*shared, *ids], max_new_tokens=4, temperature=0)
        assert request.reused_tokens == len(shared)
        follow = [*shared, *own[2], *request.tokens, 3]
        after = engine.add(follow, max_new_tokens=4, temperature=0)
        engine.run()
        assert after.reused_tokens == len(follow) - 1
        assert after.tokens == alone(model, follow, max_new_tokens=4, temperature=0)


class TestLogProbs:
    def test_of_tokens_and_prompt(self):
        model = make("mamba2")
        engine = Engine(model, prefill_chunk=5)
        ids = prompts(1)[0]
        request = engine.add(ids, max_new_tokens=4, temperature=0, logprobs=3, echo=True)
        engine.run()
        with torch.no_grad():
            logits, _ = model(torch.tensor([[*ids, *request.tokens]]))
        want = logits[0].log_softmax(-1)
        everything = [*ids, *request.tokens]
        told = [*request.prompt_logprobs, *request.logprobs]
        assert len(told) == len(everything) - 1
        for place, one in enumerate(told):
            assert one.logprob == pytest.approx(float(want[place, everything[place + 1]]), abs=1e-4)
            assert len(one.likeliest) == 3
            assert max(one.likeliest.values()) == pytest.approx(float(want[place].max()), abs=1e-4)

    def test_of_the_end_of_a_prompt(self):
        """From a state, and without reading a last token that nothing is asked about."""
        model, ids = make("mamba2"), prompts(1)[0]
        engine = Engine(model, prefill_rows=3, prefill_chunk=7)
        whole = engine.add(ids, 0, logprobs=2, echo=True)
        states = [engine.add(ids[:length], 0, keep_state=True) for length in (10, len(ids) - 1)]
        engine.run()
        ends = [engine.add(ids, 0, logprobs=2, echo=len(one.ids), state=one.state) for one in states]
        from_start = engine.add(ids, 0, echo=12, logprobs=1)
        single = engine.add(ids[:1], 0, echo=True)
        engine.run()
        for end, length in ((ends[0], 10), (ends[1], len(ids) - 1), (from_start, 12)):
            want = [one.logprob for one in whole.prompt_logprobs[length - 1 :]]
            assert [one.logprob for one in end.prompt_logprobs] == pytest.approx(want, abs=1e-4)
        assert [end.reused_tokens for end in ends] == [10, len(ids) - 1]
        assert {len(one.likeliest) for one in ends[0].prompt_logprobs} == {2}
        assert {len(one.likeliest) for one in from_start.prompt_logprobs} == {1}
        assert single.prompt_logprobs == []


class TestTrouble:
    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"ids": []}, "ids has shape"),
            ({"ids": [VOCABULARY]}, "ids has ids from"),
            ({"ids": [1.5]}, "integer token ids"),
            ({"max_new_tokens": -1}, "max_new_tokens is -1"),
            ({"temperature": -1}, "temperature is -1"),
            ({"stop": "text"}, "needs a tokenizer"),
            ({"stop": [[]]}, "stop 0"),
            ({"ends": [5]}, "ends = "),
            ({"logprobs": -2}, "logprobs is -2"),
            ({"seed": "x"}, "seed is 'x'"),
            ({"temperature": None}, "temperature is None"),
            ({"temperature": 10**400}, "temperature is 1000"),
            (
                {"repetition_penalty": 1e-40},
                "repetition_penalty is 1e-40, expected a finite number above 0 and at least 1e-06",
            ),
            ({"echo": None}, "echo is None"),
            ({"frequency_penalty": "x"}, "frequency_penalty is 'x'"),
            ({"presence_penalty": math.inf}, "presence_penalty is inf"),
            ({"logit_bias": [1]}, "logit_bias is a list"),
            ({"logit_bias": {-1: 1.0}}, "logit_bias has -1, expected ids from 0 to"),
            ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\] is nan"),
        ],
    )
    def test_what_makes_no_sense(self, given, told):
        engine = Engine(make("mamba1"))
        with pytest.raises(ValueError, match=told):
            engine.add(**{"ids": [1, 2], **given})
        assert engine.waiting == 0
        for name in ("max_rows", "prefill_chunk", "prefill_rows"):
            for number in (0, None):
                with pytest.raises(ValueError, match=f"{name} is {number}, expected"):
                    Engine(make("mamba1"), **{name: number})

    def test_one_that_fails_takes_nobody_along(self):
        model = make("mamba2")
        engine = Engine(model)
        good = engine.add([1, 2], max_new_tokens=6, temperature=0)
        poison = Engine(model)
        spoiled = poison.add([3], max_new_tokens=1, temperature=0, keep_state=True)
        poison.run()
        assert spoiled.state is not None
        window, ssm = spoiled.state.cache[0]
        broken = (type(spoiled.state.cache[0])(window, ssm * float("nan")), *spoiled.state.cache[1:])
        bad = engine.add(
            [*spoiled.state.ids, 1], max_new_tokens=6, temperature=0, state=spoiled.state._replace(cache=broken)
        )
        wrong = engine.add([*spoiled.state.ids, 1], max_new_tokens=6, state=spoiled.state._replace(cache=("no cache",)))
        odd = [engine.add([1, 2], 6, temperature=t, seed=1) for t in (5e-324, 1e308, 2**70)]
        engine.run()
        assert good.tokens == alone(model, [1, 2], max_new_tokens=6, temperature=0)
        assert [len(one.tokens) for one in odd] == [6] * 3
        assert odd[0].tokens == good.tokens
        assert (bad.finish_reason, wrong.finish_reason) == ("error", "error")
        assert "not finite" in str(bad.error)
        assert isinstance(wrong.error, ValueError)

    def test_requests_from_many_threads(self):
        model = make("mamba2")
        engine, done = Engine(model, max_rows=8), threading.Event()
        requests: list = [None] * 24

        def stepping() -> None:
            while not done.is_set():
                engine.step()

        def asking(i: int) -> None:
            requests[i] = engine.add(prompts(24)[i], **options(i))
            assert requests[i].wait(60)

        worker = threading.Thread(target=stepping)
        worker.start()
        askers = [threading.Thread(target=asking, args=(i,)) for i in range(24)]
        for thread in askers:
            thread.start()
        for thread in askers:
            thread.join()
        done.set()
        worker.join()
        for i, ids in enumerate(prompts(24)):
            assert requests[i].tokens == alone(model, ids, **options(i))


def test_one_call_asked_for_by_name_is_refused_at_once():
    block = mk.Mamba3Config(d_model=16, state_rank=8, per_head_dim=8)
    model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=1, vocab_size=VOCABULARY))
    model.backbone.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"cannot be decoded in one call .* has hooks"):
        Engine(model, backend="cpu")
