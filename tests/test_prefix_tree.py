"""Prefix reuse: what the tree finds, plans and evicts is what plain lists say; shared beginnings are read once."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from blocks import CONFIGS
from mambakit import LanguageModel, ModelConfig, PrefixCache, generate, stream
from mambakit.inference import Engine
from mambakit.inference.prefix_cache import Plan, Prefix
from mambakit.inference.radix import WIDTH, Node, Tree, ancestry, pack
from mambakit.inference.reading import Known, Reading
from mambakit.inference.requests import Request, Stops
from mambakit.inference.sampling import Sampler

VOCABULARY = 1000
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=9)
"""Few ids, so that prompts share beginnings and part everywhere."""


class Lists:
    """A PrefixCache by its description: every prompt and every state in a list, all of them looked at each time."""

    def __init__(self, max_entries: int | None, max_bytes: int | None):
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.known: list[list[int]] = []
        self.kept: dict[tuple[int, ...], dict[str, Any]] = {}
        self.lost: set[tuple[int, ...]] = set()
        self.clock, self.turn = 0.0, 0

    def longest(self, ids: list[int]) -> int:
        return max((len(key) for key in self.kept if tuple(ids[: len(key)]) == key), default=0)

    def touch(self, key: tuple[int, ...], weight: int) -> None:
        self.turn += 1
        self.kept[key].update(clock=self.clock, touched=self.turn, weight=weight)

    def plan(self, ids: list[int], ends: list[int]) -> tuple[int, list[int]]:
        reused = self.longest(ids)
        if reused:
            key = tuple(ids[:reused])
            weight = self.kept[key]["weight"]
            self.touch(key, weight + 1 if weight else 0)
        shared = max((in_common(ids, other) for other in self.known), default=0)
        self.known.append(ids)
        cuts = {*ends, len(ids)} | ({shared} if shared > 1 else set())
        return reused, sorted(cut for cut in cuts if cut > reused)

    def worth(self, key: tuple[int, ...]) -> tuple[float, int]:
        entry = self.kept[key]
        before = [len(other) for other, e in self.kept.items() if e["weight"] and key[: len(other)] == other != key]
        again = len(key) - max(before, default=0)
        return entry["clock"] + entry["weight"] * again / entry["nbytes"], entry["touched"]

    def keep(self, ids: list[int], nbytes: int, passing: bool) -> None:
        key, weight = tuple(ids), 0 if passing else 1
        if key in self.kept:
            self.touch(key, max(weight, self.kept[key]["weight"]))
            return
        if self.max_bytes is not None and nbytes > self.max_bytes:
            return
        self.known.append(ids)
        self.kept[key] = {"nbytes": nbytes}
        self.lost.discard(key)
        self.touch(key, weight)
        while (self.max_entries is not None and len(self.kept) > self.max_entries) or (
            self.max_bytes is not None and self.nbytes > self.max_bytes
        ):
            least = min(self.kept, key=self.worth)
            self.clock = max(self.clock, self.worth(least)[0])
            del self.kept[least]
            self.lost.add(least)

    @property
    def nbytes(self) -> int:
        return sum(entry["nbytes"] for entry in self.kept.values())


def in_common(one: list[int], two: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def path_to(node: Node) -> tuple[int, ...]:
    packed = b"".join([above.run for above in ancestry(node)][::-1])
    return tuple(memoryview(packed).cast("i").tolist())


def all_below(node: Node) -> list[Node]:
    return [node, *(below for child in node.children.values() for below in all_below(child))]


def check_shape(tree: Tree) -> None:
    """What holds of every tree: runs fit together, counts are right, no node is there for nothing."""
    bare = 0
    for node in all_below(tree.root):
        assert node.values == sum(below.value is not None for below in all_below(node))
        bare += 0 if node.values else len(node.run)
        for first, child in node.children.items():
            assert child.parent is node
            assert first == child.run[:WIDTH]
            assert child.end == node.end + len(child.run)
        has_a_reason = node.value is not None or node.was_evicted or len(node.children) != 1
        assert node is tree.root or has_a_reason, path_to(node)
        is_tip = node is not tree.root and not node.children and node.value is None
        assert (node in tree._tips) == is_tip
    assert tree.bare_tokens * WIDTH == bare


@st.composite
def limits_and_calls(draw) -> tuple[dict[str, int | None], list[tuple[Any, ...]]]:
    limits = draw(
        st.sampled_from(
            [{"max_entries": 3}, {"max_entries": None, "max_bytes": 200}, {"max_entries": 7, "max_bytes": 400}]
        )
    )
    plans = st.tuples(st.just("plan"), IDS, st.lists(st.integers(0, 9), max_size=2))
    keeps = st.tuples(st.just("keep"), IDS, st.sampled_from([4, 16, 60, 250]), st.booleans())
    return limits, draw(st.lists(plans | keeps, max_size=40))


@given(limits_and_calls())
def test_finds_plans_and_evicts_as_lists_do(drawn):
    limits, calls = drawn
    model, known = nn.Linear(1, 1), PrefixCache(**limits)
    lists = Lists(known.max_entries, known.max_bytes)
    served = known.serve(model)
    for kind, ids, *more in calls:
        if kind == "plan":
            ends = [end for end in more[0] if end <= len(ids)]
            got = known.plan(served, ids, ends)
            was_evicted = any(tuple(ids[: len(key)]) == key for key in lists.lost if len(key) > got.reused)
            assert ("was evicted" in got.why_not_more) == was_evicted
            assert (got.reused, list(got.cuts)) == lists.plan(ids, ends)
            if got.prefix is not None:
                assert got.prefix.x_1d.tolist() == [float(token) for token in ids[: got.reused]], "the right state"
        else:
            size, passing = more
            x = torch.tensor(ids, dtype=torch.float32)
            known.keep(served, ids, x, (torch.zeros(1, size),), passing=passing)
            lists.keep(ids, x.nbytes + 4 * size, passing)
        assert {path_to(node) for node in known._kept} == set(lists.kept)
        assert known.nbytes == lists.nbytes == sum(prefix.nbytes for prefix in known._kept.values())
        check_shape(known._tree)


@given(st.lists(st.tuples(st.booleans(), IDS), max_size=50), st.integers(0, 12))
def test_paths_without_states_are_bounded(calls, bound):
    model, known = nn.Linear(1, 1), PrefixCache(max_entries=2, max_path_tokens=bound)
    served = known.serve(model)
    for keeps, ids in calls:
        got = known.plan(served, ids)
        assert got.cuts == () or got.cuts[-1] == len(ids)
        if keeps:
            known.keep(served, ids, torch.zeros(1), ())
        assert known._tree.bare_tokens <= bound
        check_shape(known._tree)


@given(IDS, st.integers(0, 9), st.lists(st.integers(1, 9), max_size=3), st.integers(1, 9))
def test_pieces_of_a_plan(ids, reused, ends, chunk):
    reused = min(reused, len(ids) - 1)
    cuts = tuple(sorted({end for end in ends if reused < end <= len(ids)} | {len(ids)}))
    prefix = Prefix(reused, torch.zeros(1), (), 4) if reused else None
    want = [end for end in range(reused + 1, len(ids) + 1) if end in cuts or end % chunk == 0]
    assert Plan(prefix, cuts, "").pieces(chunk) == want
    assert Plan(prefix, (), "").pieces(chunk) == [], "nothing is left to read"


def known_with(*kept: list[int], **limits: Any) -> tuple[PrefixCache, int, nn.Module]:
    """A cache for a model, with states kept after each of `kept`; the model has to live as long."""
    model, known = nn.Linear(1, 1), PrefixCache(**limits)
    served = known.serve(model)
    for ids in kept:
        known.keep(served, ids, torch.zeros(1, 4), ())
    return known, served, model


def test_why_not_more():
    known, served, model = known_with(list(range(8)))
    plans = [
        ([50, 51], "nothing like it was read before"),
        ([50, 51, 52], "no state is kept before token 2, where this prompt leaves the ones before"),
        ([50], "no state is kept before token 1, its end"),
        (list(range(8)), "all of it was reused"),
        ([*range(8), 30], "no prompt before shares more than 8 tokens with it"),
        ([*range(8), 30, 31], "no state is kept between token 8 and token 9, where this prompt leaves the ones before"),
    ]
    for ids, why in plans:
        assert known.plan(served, ids).why_not_more == why
    known, served, model = known_with(list(range(8)), list(range(100, 120)), max_entries=1)
    assert known.plan(served, [*range(8), 9]).why_not_more == "the state after token 8 was evicted"
    assert known.plan(served - 1, [1]) == Plan(None, (1,), "the model has changed")
    assert (known.hits, known.misses) == (0, 2)
    del model


def test_evicts_what_costs_least_to_read_again():
    """Tokens to read again per byte, times uses; age counts, but not alone."""
    long, short, other = list(range(100)), [201, 202, 203], [301, 302, 303]
    known, served, model = known_with(long, short, other, max_entries=2)
    assert known.longest(served, long) is not None, "the oldest is the longest"
    assert known.longest(served, short) is None
    for turn in range(60):
        known.keep(served, [1000 + turn, 1, 2], torch.zeros(1, 4), ())
    assert known.longest(served, long) is not None, "worth twice 100 tokens, as it was used"
    for turn in range(90):
        known.keep(served, [2000 + turn, 1, 2], torch.zeros(1, 4), ())
    assert known.longest(served, long) is not None, "and that was a use again"
    for turn in range(300):
        known.keep(served, [3000 + turn, 1, 2], torch.zeros(1, 4), ())
    assert known.longest(served, long) is None, "what is never used goes in the end"
    del model


def test_states_kept_in_passing_go_first():
    known, served, model = known_with([1, 2, 3], max_entries=3)
    for turn in range(20):
        known.keep(served, list(range(100 + turn, 200)), torch.zeros(1, 4), (), passing=True)
        assert known.longest(served, list(range(100 + turn, 200))) is not None, "a use makes it worth no more"
    assert len(known) == 3
    assert known.longest(served, [1, 2, 3]) is not None
    assert known.longest(served, list(range(119, 200))) is not None, "the newest of them is there"
    assert known.longest(served, list(range(110, 200))) is None
    del model


@pytest.mark.parametrize("ids", [[2**31], ["a"], "ab", [1.5]], ids=str)
def test_ids_that_are_none_are_refused(ids):
    known, served, model = known_with()
    with pytest.raises(ValueError, match="expected token ids, whole numbers below"):
        known.plan(served, ids)
    with pytest.raises(ValueError, match=r"ends has \[3\], expected numbers of tokens from 0 to the prompt's 2"):
        known.plan(served, [1, 2], [3])
    with pytest.raises(ValueError, match="max_path_tokens is -1"):
        PrefixCache(max_path_tokens=-1)
    assert known.plan(served, b"ab").cuts == (2,)
    del model


def test_looking_up_does_not_slow_down_with_what_is_known():
    draw = random.Random(0)
    start = [draw.randrange(50000) for _ in range(20_000)]
    prompts = [start + [draw.randrange(50000) for _ in range(100)] for _ in range(1000)]
    known, served, model = known_with(*prompts, max_entries=None)
    assert len(known._tree.root.children) == 1
    began = time.perf_counter()
    assert all(known.longest(served, prompt) is not None for prompt in prompts)
    seconds = time.perf_counter() - began
    # Comparing with each of the 1,000 would take minutes.
    assert seconds < 10
    assert known._tree.bare_tokens == 0
    tokens = sum(len(node.run) for node in all_below(known._tree.root)) // WIDTH
    assert tokens <= 20_000 + 1000 * 100, "the shared part is held once"
    del model


def make_model(name: str = "mamba2") -> LanguageModel:
    torch.manual_seed(1)
    model = LanguageModel(ModelConfig(block=CONFIGS[name], n_layer=1, vocab_size=VOCABULARY, tie_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def make_prompts(shared: int, own: int, number: int = 64) -> list[list[int]]:
    """All with the first `shared` tokens, and each with another one next."""
    draw = random.Random(shared)
    start = [draw.randrange(VOCABULARY) for _ in range(shared)]
    nexts = draw.sample(range(VOCABULARY), number)
    return [start + [first] + [draw.randrange(VOCABULARY) for _ in range(own - 1)] for first in nexts]


@pytest.mark.parametrize(("shared", "own"), [(1600, 600), (1500, 700)])
@pytest.mark.parametrize("limits", [{}, {"max_entries": 4}, {"max_entries": None, "max_bytes": 10_000}], ids=str)
def test_a_shared_beginning_is_read_twice_at_most(shared, own, limits):
    model, known, prompts = make_model(), PrefixCache(**limits), make_prompts(shared, own)
    reused = []
    for prompt in prompts:
        before = known.reused_tokens
        stream(model, prompt, max_new_tokens=0, prefix_cache=known)
        reused.append(known.reused_tokens - before)
    assert reused[0] == 0
    assert reused[2:] == [shared] * 62


@pytest.mark.parametrize(("shared", "own"), [(1600, 600), (1500, 700)])
def test_requests_that_come_at_once_share_a_beginning(shared, own):
    model, prompts = make_model(), make_prompts(shared, own)
    engine = Engine(model, prefix_cache=PrefixCache())
    requests = [engine.add(prompt, max_new_tokens=2, temperature=0) for prompt in prompts]
    engine.run()
    assert [request.reused_tokens for request in requests[2:]] == [shared] * 62
    assert requests[0].why_not_more == "nothing like it was read before"
    assert requests[1].why_not_more.startswith(f"no state is kept before token {shared}, where this prompt leaves")
    assert requests[2].why_not_more == f"no prompt before shares more than {shared} tokens with it"
    for request, prompt in list(zip(requests, prompts, strict=True))[::9]:
        assert request.tokens == generate(model, prompt, max_new_tokens=2, temperature=0)[0].tolist()


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
@pytest.mark.parametrize(("shared", "own"), [(160, 60), (150, 70)])
def test_results_are_those_of_reading_everything(name, shared, own):
    model, known, prompts = make_model(name), PrefixCache(), make_prompts(shared, own, 16)
    options = {"max_new_tokens": 6, "temperature": 0, "prefill_chunk": 51}
    for prompt in prompts:
        got, want = (stream(model, prompt, **options, prefix_cache=cache) for cache in (known, None))
        assert torch.allclose(got._logits_aw, want._logits_aw, rtol=1e-4, atol=1e-4)
        assert torch.equal(torch.stack(list(got)), torch.stack(list(want)))
    assert known.reused_tokens >= 14 * shared


def test_ends_of_messages_are_reused_from_the_second_prompt_on():
    model, known = make_model(), PrefixCache()
    served, (one, two, three) = known.serve(model), make_prompts(120, 30, 3)
    plan = known.plan(served, one, [40, 120])
    assert plan.cuts == (40, 120, 150)
    start, cache = 0, None
    with torch.no_grad():
        for end in plan.pieces(32):
            x, cache = model.backbone(model.embed(torch.tensor([one[start:end]])), cache)
            known.keep(served, one[:end], x[:, -1], cache, passing=end not in plan.cuts)
            start = end
        plan = known.plan(served, two, [40, 120])
        assert (plan.reused, plan.cuts) == (120, (150,))
        request = Request(three, max_new_tokens=0, sampler=Sampler(), seed=0, stops=Stops())
        x_1d, _ = Reading(model, [request], 32, known=Known(known, model)).finish()
        want, _ = model.backbone(model.embed(torch.tensor([three])))
    assert torch.allclose(x_1d, want[:, -1], rtol=1e-4, atol=1e-4)
    assert known.reused_tokens == 240


def test_threads_share_a_beginning():
    """Plans, states and evictions of eight threads at once; every result is that of one alone."""
    model, known, prompts = make_model(), PrefixCache(max_entries=6), make_prompts(90, 20, 40)
    options = {"max_new_tokens": 4, "temperature": 0, "prefill_chunk": 32}
    want = [generate(model, prompt, **options).tolist() for prompt in prompts]
    barrier = threading.Barrier(8)

    def run(thread: int) -> list[Any]:
        barrier.wait()
        return [generate(model, prompt, **options, prefix_cache=known).tolist() for prompt in prompts[thread::8]]

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(run, range(8)))
    assert got == [want[thread::8] for thread in range(8)]
    assert known.hits + known.misses == 40
    assert known.reused_tokens >= 24 * 90, "each thread's first two may find nothing yet"
    assert len(known) == 6
    check_shape(known._tree)


def test_memory_is_bounded_whatever_is_looked_up():
    draw = random.Random(0)
    known, served, model = known_with(max_entries=8, max_path_tokens=5000)
    for turn in range(500):
        ids = [draw.randrange(50) for _ in range(1000)]
        known.plan(served, ids)
        if turn % 2:
            known.keep(served, ids, torch.zeros(1, 4), ())
    nodes = all_below(known._tree.root)
    assert len(known) == 8
    assert sum(len(node.run) for node in nodes) <= WIDTH * (5000 + 8 * 1000)
    assert len(nodes) < 100
    assert len(known._queue) <= 2 * 8 + 64
    assert len(pack([1, 2])) == 2 * WIDTH
    del model
