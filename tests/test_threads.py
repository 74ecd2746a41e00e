"""What several threads share stays right: the prefix cache, and generations of one model."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from mambakit.inference.prefix_cache import PrefixCache

THREADS = 8


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
