"""What several threads share stays right: the prefix cache, and generations of one model."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from blocks import CONFIGS
from mambakit import LanguageModel, ModelConfig, generate
from mambakit.inference.prefix_cache import PrefixCache
from mambakit.kernels.cpu.library import why_missing

THREADS = 8
GENERATIONS = int(os.environ.get("MAMBAKIT_GENERATIONS", "20"))
"""Of every thread; 500 is the long form, which takes minutes."""
EACH_ROUND = 5


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """`work(thread)` in all threads; raises what one of them raises."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(THREADS)))


@pytest.mark.parametrize("limits", [{"max_entries": 3}, {"max_entries": None, "max_bytes": 400}], ids=str)
def test_prefix_cache_counts_exactly(limits):
    model, known = nn.Linear(2, 2), PrefixCache(**limits)

    def work(thread: int) -> None:
        for turn in range(200):
            served = known.serve(model)
            ids = [turn % 7, thread % 3]
            known.longest(served, ids)
            known.keep(served, ids, torch.zeros(1, 5), (torch.zeros(1, 1 + turn % 7),))
            if turn % 50 == thread:
                known.clear()

    at_once(work)
    assert known.hits + known.misses == THREADS * 200
    assert known.nbytes == sum(prefix.x_1d.nbytes + prefix.cache[0].nbytes for prefix in known._kept.values())
    assert 0 < len(known) <= 15


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
def test_generations_of_one_model(name):
    """One model and one PrefixCache, all backends, other weights every round: as one thread alone without a cache."""
    draw = random.Random(0)
    torch.manual_seed(1)
    model = LanguageModel(ModelConfig(block=CONFIGS[name], n_layer=2, vocab_size=50, tie_embeddings=False))
    initial = [parameter.detach().clone() for parameter in model.parameters()]
    shared = [draw.randrange(50) for _ in range(20)]
    prompts = [
        shared[:length] + [draw.randrange(50) for _ in range(tail)] for length, tail in product((9, 20), range(4))
    ]
    backends = ("auto", "torch") if why_missing() else ("auto", "torch", "cpu")
    settings = [{"temperature": 0.0}, {"seed": 3, "top_k": 9, "stop": [7]}]
    jobs = list(product(prompts, backends, settings))
    known = PrefixCache(max_entries=9)

    def run(job: int, **options: Any) -> list[int]:
        prompt, backend, setting = jobs[job]
        options |= {"max_new_tokens": 10, "prefill_chunk": 8, "backend": backend, **setting}
        return generate(model, [prompt], **options)[0].tolist()

    for turn in range(0, GENERATIONS, EACH_ROUND):
        for parameter, value in zip(model.parameters(), initial, strict=True):
            # By `data`, which moves no counter.
            parameter.data.copy_(value + 0.5 * torch.randn_like(value))
        chosen = [[draw.randrange(len(jobs)) for _ in range(EACH_ROUND)] for _ in range(THREADS)]
        want = {job: run(job) for jobs_of_one in chosen for job in jobs_of_one}
        got = at_once(lambda thread: [run(job, prefix_cache=known) for job in chosen[thread]])  # noqa: B023
        assert got == [[want[job] for job in jobs_of_one] for jobs_of_one in chosen], f"round {turn // EACH_ROUND}"
    assert known.hits + known.misses == THREADS * GENERATIONS
    assert known.hits > THREADS
    assert known.nbytes == sum(prefix.nbytes for prefix in known._kept.values())
