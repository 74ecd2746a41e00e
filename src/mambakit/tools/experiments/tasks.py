"""Sequences whose answers are computed exactly: what a model has to learn, and how its answers are scored.

A sequence starts with one token that is always the same, so that there is something to write before the first symbol.
Targets stand wherever a value is complete; the answer that counts is the last one, but for recall, where all count.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mambakit.tools.experiments import expressions, permutations

IGNORE = -100
"""No target at this position; `cross_entropy` leaves it out by itself."""


class Batch(NamedTuple):
    ids_bs: Tensor
    targets_bs: Tensor


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    title: str
    vocab_size: int
    """Input tokens, the first one included."""
    classes: int
    n_layer: int
    generate: Callable[[int, int, random.Random], Batch]
    """`generate(count, length, rng)`: sequences of `length` symbols after the first token."""
    lengths: tuple[int, int, int] = (3, 8, 160)
    """Shortest, and the longest at the start and at the end of the training."""
    test_length: int = 256
    score_all: bool = False

    @property
    def valid_length(self) -> int:
        """Between the longest of the training and the test's: where a run is chosen.

        At training length there is nothing to choose by. A rotation that is off by a hundredth of a turn is without an
        error there, and says the opposite at twice the length.
        """
        return (self.lengths[2] + self.test_length) // 2

    def scored(self, targets_bs: Tensor) -> Tensor:
        """Which positions count."""
        wanted_bs = targets_bs != IGNORE
        if not self.score_all:
            wanted_bs = wanted_bs.clone()
            wanted_bs[:, :-1] = False
        return wanted_bs

    def scaled(self, accuracy: float) -> float:
        """Per cent, with guessing at 0 and no error at 100."""
        chance = 1 / self.classes
        return 100 * (accuracy - chance) / (1 - chance)


def parity(count: int, length: int, rng: random.Random) -> Batch:
    """Token 1 is a zero, token 2 a one; the target is how many ones there have been, modulo 2."""
    bits_bs = torch.randint(2, (count, length), generator=torch_rng(rng))
    return starting(bits_bs + 1, bits_bs.cumsum(1) % 2, start=0)


def modular_arithmetic(count: int, length: int, rng: random.Random) -> Batch:
    """`2 - 3 - 3 * 2` modulo 5, `*` before `+` and `-`; the target at a digit is the value up to there."""
    return expression_batch([expressions.flat(length, rng) for _ in range(count)])


def bracketed_arithmetic(count: int, length: int, rng: random.Random) -> Batch:
    """`((1 + 2) * (-4))` modulo 5; the target at a closing bracket is the value of what it closes."""
    return expression_batch([expressions.bracketed(length, rng) for _ in range(count)])


def expression_batch(made: list[expressions.Expression]) -> Batch:
    ids = torch.tensor([[expressions.TOKENS.index(token) for token in e.tokens] for e in made])
    targets = torch.tensor([[IGNORE if value is None else value for value in e.values] for e in made])
    return starting(ids, targets, start=len(expressions.TOKENS))


def alternating_group(count: int, length: int, rng: random.Random) -> Batch:
    """A word in two permutations that generate A5; the target is which of the 60 elements it has come to."""
    word_bs = torch.randint(len(permutations.GENERATORS), (count, length), generator=torch_rng(rng))
    table = torch.tensor(permutations.after_each())
    state_b = torch.zeros(count, dtype=torch.int64)
    states = []
    for letter_b in word_bs.unbind(1):
        state_b = table[state_b, letter_b]
        states.append(state_b)
    return starting(word_bs + 1, torch.stack(states, 1), start=0)


RECALL_WORDS = 32


def associative_recall(count: int, length: int, rng: random.Random) -> Batch:
    """Pairs of a key and a value, all keys different, then every key again in another order, each with its value."""
    pairs = length // 3
    if not 0 < pairs <= RECALL_WORDS:
        raise ValueError(f"recall at length {length} has {pairs} pairs, expected 1 to {RECALL_WORDS}")
    draw = torch_rng(rng)
    keys_bn = torch.rand(count, RECALL_WORDS, generator=draw).argsort(1)[:, :pairs]
    values_bn = torch.randint(RECALL_WORDS, (count, pairs), generator=draw)
    order_bn = torch.rand(count, pairs, generator=draw).argsort(1)
    told_bs = torch.stack([keys_bn + 1, values_bn + 1 + RECALL_WORDS], 2).flatten(1)
    asked_bs, answers_bs = keys_bn.gather(1, order_bn) + 1, values_bn.gather(1, order_bn)
    targets_bs = torch.cat([torch.full_like(told_bs, IGNORE), answers_bs], 1)
    return starting(torch.cat([told_bs, asked_bs], 1), targets_bs, start=0)


def starting(ids_bs: Tensor, targets_bs: Tensor, start: int) -> Batch:
    """With the first token before everything; nothing is asked of it."""
    first_b1 = torch.full((len(ids_bs), 1), start)
    return Batch(torch.cat([first_b1, ids_bs], 1), torch.cat([torch.full_like(first_b1, IGNORE), targets_bs], 1))


def torch_rng(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(63))


Arithmetic = partial(Task, vocab_size=len(expressions.TOKENS) + 1, classes=expressions.MODULUS, n_layer=3)
TASKS = {
    task.name: task
    for task in (
        Task(name="parity", title="parity", vocab_size=3, classes=2, n_layer=1, generate=parity),
        Arithmetic(name="arithmetic", title="arithmetic", generate=modular_arithmetic),
        Arithmetic(name="brackets", title="with brackets", generate=bracketed_arithmetic),
        Task(
            name="a5",
            title="words in A5",
            vocab_size=len(permutations.GENERATORS) + 1,
            classes=60,
            n_layer=2,
            generate=alternating_group,
        ),
        Task(
            name="recall",
            title="associative recall",
            vocab_size=2 * RECALL_WORDS + 1,
            classes=RECALL_WORDS,
            n_layer=2,
            generate=associative_recall,
            lengths=(6, 9, 48),
            test_length=48,
            score_all=True,
        ),
    )
}
