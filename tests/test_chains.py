"""Tokens that follow one another in one call: to the last digit as single steps, and taken back without a trace."""

import random

import pytest
import torch
from torch import Tensor

from mambakit import AttentionConfig, LanguageModel
from mambakit.blocks import caches
from mambakit.inference import decoder_states
from mambakit.inference.decoder import Decoder
from mambakit.kernels.cpu.library import why_missing
from test_decode import BLOCKS, LAYERS, NAMES, VOCABULARY, larger_model, make_model, random_block, tensors_of

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))


class Alone:
    """A row that is stepped token by token."""

    def __init__(self, model: LanguageModel, cache):
        self.decoder = Decoder(model)
        self.decoder.load(cache)

    def ahead(self, ids: list[int]) -> Tensor:
        """Logits after each of the tokens, of which only the first stays."""
        logits_1w = self.decoder.step(torch.tensor(ids[:1]))
        before = self.decoder.cache()
        rest = [self.decoder.step(torch.tensor([token])) for token in ids[1:]]
        self.decoder.load(before)
        return torch.cat([logits_1w, *rest])

    def take(self, ids: list[int]) -> None:
        for token in ids:
            self.decoder.step(torch.tensor([token]))


def same(a, b) -> bool:
    return all(torch.equal(one, other) for one, other in zip(tensors_of(a), tensors_of(b), strict=True))


def check_chains(
    model: LanguageModel,
    rows: int = 2,
    calls: int = 6,
    longest: int = 5,
    lengths: tuple[int, ...] = (4,),
    seed: int = 0,
) -> None:
    """Chains of any lengths and steps, any part of them counted, while rows come and go: each as if it were alone."""
    draw = random.Random(seed)

    def some(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    def read(length: int):
        with torch.no_grad():
            return model(torch.tensor([some(length)]))[1]

    together, alone = Decoder(model), []
    for row in range(rows):
        cache = read(lengths[row % len(lengths)])
        together.join(cache)
        alone.append(Alone(model, cache))
    for call in range(calls):
        ids = [some(draw.randint(1, longest)) for _ in alone]
        if call % 3 == 2:
            ids = [own[:1] for own in ids]
            logits_tw = together.step(torch.tensor(ids)[:, 0])
        else:
            logits_tw = together.chains(ids)
        want = [one.ahead(own) for one, own in zip(alone, ids, strict=True)]
        assert torch.equal(logits_tw, torch.cat(want))
        if call % 2:
            more = [some(draw.randint(0, 3)) for _ in alone]
            if any(more):
                ids = [own + guesses for own, guesses in zip(ids, more, strict=True)]
                logits_tw = together.chains(more, on=True)
                for one, own, guesses, of_row in zip(
                    alone, ids, more, logits_tw.split([len(m) for m in more]), strict=True
                ):
                    before = one.decoder.cache()
                    one.take(own[1 : len(own) - len(guesses)])
                    if guesses:
                        assert torch.equal(of_row, one.ahead(guesses))
                    one.decoder.load(before)
        for row, (one, own) in enumerate(zip(alone, ids, strict=True)):
            together.accept(row, draw.randint(1, len(own)))
            counted = draw.randint(1, len(own))
            together.accept(row, counted)
            one.take(own[1:counted])
            if call % 3 == 1:
                assert same(together.row(row), one.decoder.cache())
        if call == calls // 2 and rows > 1:
            together.leave(0)
            alone[0] = alone[-1]
            alone.pop()
            cache = read(3)
            together.join(cache)
            alone.append(Alone(model, cache))
    assert same(together.cache(), caches.concat([one.decoder.cache() for one in alone]))


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("name", [*NAMES, *LAYERS])
def test_every_block(name, bits):
    check_chains(make_model(BLOCKS[name], bits=bits))


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("name", ["mambas", "parallel", "moe-parallel"])
def test_every_format(name, bits):
    check_chains(make_model(BLOCKS[name], bits=bits), rows=1, longest=9)


@pytest.mark.parametrize("seed", range(12))
def test_odd_sizes(seed):
    draw = random.Random(seed)
    model = make_model(random_block(draw), bits=draw.choice([32, 16, 8, 4]))
    check_chains(model, rows=draw.randint(1, 4), calls=3, longest=9, seed=seed)


@pytest.mark.parametrize("name", ["attention-rope", "attention-window", "parallel"])
def test_tokens_that_are_kept(name, monkeypatch):
    """They are copied to where there is room for more, at other times for every row."""
    monkeypatch.setattr(decoder_states, "ROOM", 3)
    check_chains(make_model(BLOCKS[name]), rows=3, calls=40, lengths=(61, 1, 40))


def test_longer_than_a_piece():
    block = AttentionConfig(8, 6, 2, 20, rope_theta=50.0, window=300)
    check_chains(make_model(block), rows=2, calls=4, lengths=(600, 254))


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3", "attention"])
def test_two_threads(name):
    torch.set_num_threads(2)
    try:
        check_chains(larger_model(name), calls=4, lengths=(300,) if name == "attention" else (2,))
    finally:
        torch.set_num_threads(1)


def test_what_does_not_fit():
    decoder = Decoder(make_model(BLOCKS["attention"]))
    with pytest.raises(ValueError, match="0 rows was loaded"):
        decoder.chains([[1]])
    decoder.load(make_model(BLOCKS["attention"]).fresh_cache(2))
    for bad in ([[1]], [[1], []]):
        with pytest.raises(ValueError, match="2 rows was loaded; each needs one"):
            decoder.chains(bad)
    with pytest.raises(ValueError, match="outside 0 to 55"):
        decoder.chains([[1], [2, 56]])
    decoder.chains([[1, 2, 3], [4]])
    for row, tokens in ((0, 0), (0, 4), (1, 2)):
        with pytest.raises(ValueError, match=f"{tokens} tokens count, expected 1 to the {(3, 1)[row]}"):
            decoder.accept(row, tokens)
    with pytest.raises(ValueError, match="goes on for at most 16 tokens"):
        decoder.chains([[1] * 600, []], on=True)
