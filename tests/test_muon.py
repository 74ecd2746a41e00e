"""Muon's steps are those of torch, and of a plain loop where torch would round."""

import math
import pickle

import numpy
import pytest
import torch
from torch import nn

from mambakit.blocks.param_groups import MUON
from mambakit.parallel.pieces import Box, Pieces, pieces_of
from mambakit.training.muon import Map, Muon
from mambakit.training.shares import METADATA, Stored

SHAPES = ((12, 5), (4, 9), (6, 6))


def run(make, dtype, steps=3):
    generator = torch.Generator().manual_seed(1)
    weights = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizer = make(weights)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
        optimizer.step()
    return weights


def ours(weights):
    maps = [Map(tuple(weight.shape), [weight], [pieces_of(weight).boxes]) for weight in weights]
    return Muon(maps, {**MUON, "weight_decay": 0.1}, lr=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_bits(dtype):
    wanted = run(lambda weights: torch.optim.Muon(weights, lr=0.02, weight_decay=0.1, **MUON), dtype)
    for got, want in zip(run(ours, dtype), wanted, strict=True):
        assert torch.equal(got, want)


class PlainLoop:
    def __init__(self, weights):
        self.weights, self.momenta = weights, [numpy.zeros(weight.shape) for weight in weights]

    @torch.no_grad()
    def step(self):
        a, b, c = MUON["ns_coefficients"]
        for weight, momentum in zip(self.weights, self.momenta, strict=True):
            grad = weight.grad.numpy()
            momentum += 0.05 * (grad - momentum)
            x = 0.05 * grad + 0.95 * momentum
            x = x / math.sqrt((x * x).sum())
            for _ in range(MUON["ns_steps"]):
                # From the other side than in the code: (X X^T) X = X (X^T X).
                gram = x.T @ x
                x = a * x + x @ (b * gram + c * gram @ gram)
            weight *= 1 - 0.02 * 0.1
            weight -= torch.from_numpy(0.02 * 0.2 * math.sqrt(max(weight.shape)) * x)


def test_in_double_precision():
    for got, want in zip(run(ours, torch.float64), run(PlainLoop, torch.float64), strict=True):
        torch.testing.assert_close(got, want, atol=1e-13, rtol=0)


def test_rows_of_pieces():
    """Of rows 2 to 7 of ten, a rank that has 4 to 9 has 2 to 5 of these; one that has none has nothing."""
    whole = torch.arange(30).view(10, 3)
    pieces = Pieces((10, 3), (Box((4, 0), (6, 3)),), (whole[4:],))
    found = pieces.rows(2, 6)
    assert found.shape == (6, 3)
    assert found.boxes == (Box((2, 0), (4, 3)),)
    assert torch.equal(found.own[0], whole[4:8])
    assert found.own[0].data_ptr() == whole[4].data_ptr()
    assert torch.equal(found.boxes[0].of(whole[2:8]), found.own[0])
    assert pieces.rows(0, 4) == Pieces((4, 3), (), ())


class Harm:
    def __reduce__(self):
        return print, ("this should not be printed",)


@pytest.mark.parametrize("content", [pickle.dumps(Harm()), pickle.dumps(3), b"", b"junk"])
def test_a_description_that_is_none_is_refused(content, tmp_path, capsys):
    """It is a pickle, of which nothing is called that has no place in it."""
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(ValueError, match="is not what describes a checkpoint"):
        Stored(tmp_path)
    assert "printed" not in capsys.readouterr().out
