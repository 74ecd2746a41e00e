"""Forward = tokens one by one = any split, on any pathway: outputs, caches and every gradient."""

import pytest
import torch

from blocks import CONFIGS, make_block, random_cache, results, tensors_of, tokens
from compare import check
from mambakit import Mamba3, SsdPath
from mambakit.blocks import mamba3

LENGTH = 11
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def forward(block, x, cache):
    return block(x, cache)


def steps(block, x, cache):
    outputs = []
    for t in range(x.shape[1]):
        y, cache = block.step(x[:, t], cache)
        outputs.append(y)
    return torch.stack(outputs, 1), cache


def split_at(*cuts: int, paths=(None,), pathways=(None,)):
    def run(block, x, cache):
        outputs = []
        for i, (start, stop) in enumerate(zip((0, *cuts), (*cuts, x.shape[1]), strict=True)):
            pathway = pathways[i % len(pathways)]
            if pathway is not None:
                cache = (cache or block.fresh_cache(len(x))).with_pathway(pathway)
            y, cache = block(x[:, start:stop], cache, path=paths[i % len(paths)])
            outputs.append(y)
        return torch.cat(outputs, 1), cache

    return run


def mixed(block, x, cache):
    """A call, some steps, a call."""
    first, cache = block(x[:, :4], cache)
    middle, cache = steps(block, x[:, 4:7], cache)
    last, cache = block(x[:, 7:], cache)
    return torch.cat([first, middle, last], 1), cache


RUNS = {
    "steps": steps,
    "split": split_at(3),
    "many": split_at(1, 2, 6, 6),
    "at-the-ends": split_at(0, LENGTH),
    "mixed": mixed,
}


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_cut_anywhere(name, warm, dtype):
    block = make_block(name, dtype)
    x = tokens(block, 2, LENGTH)
    cache = random_cache(block, 2) if warm else None
    want = results(block, forward, x, cache)
    for run, function in RUNS.items():
        got = results(block, function, x, cache)
        try:
            check(TOLERANCE[dtype], got, want)
        except AssertionError as failure:
            raise AssertionError(f"{run}: {failure}") from None


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("mamba3")])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pathways(name, warm, dtype):
    """Single = double = steps on either = switching in the middle of a sequence."""
    block = make_block(name, dtype)
    x = tokens(block, 2, LENGTH)
    cache = random_cache(block, 2) if warm else None
    want = results(block, forward, x, cache)
    for pathways in (("single",), ("double",), ("single", "double"), ("double", "single")):
        for cuts in ((), (4,), (1, 7)):
            check(TOLERANCE[dtype], results(block, split_at(*cuts, pathways=pathways), x, cache), want)

    def double_steps(block, x, cache):
        return steps(block, x, (cache or block.fresh_cache(2)).with_pathway("double"))

    check(TOLERANCE[dtype], results(block, double_steps, x, cache), want)


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("mamba1")])
def test_every_path_and_chunk_length(name):
    block = make_block(name)
    x, cache = tokens(block, 2, LENGTH), random_cache(block, 2)
    want = results(block, forward, x, cache)
    for algorithm in ("minimal", "serial", "serial_recalculated"):
        for chunk_len in (1, 3, LENGTH, 64):
            got = results(block, split_at(paths=(SsdPath(algorithm, chunk_len),)), x, cache)
            check(1e-9, got, want)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_token_leaves_the_cache_as_it_is(name):
    block = make_block(name)
    cache = random_cache(block, 2)
    y, after = block(tokens(block, 2, 0), cache)
    assert y.shape == (2, 0, block.config.d_model)
    # Quaternions are normalised again, which may move the last digit.
    check(1e-15, tensors_of(after), tensors_of(cache))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("mamba3")])
def test_pieces_without_gradients(name, monkeypatch):
    """A long sequence is cut where memory would count; nothing else changes."""
    block = make_block(name)
    x = tokens(block, 2, 300)
    y, cache = block(x)
    monkeypatch.setattr(mamba3, "PIECE", 2000)
    with torch.no_grad():
        assert block.pieces(x) > 2
        y_pieces, cache_pieces = block(x)
    check(1e-9, {"y": y_pieces, **tensors_of(cache_pieces)}, {"y": y, **tensors_of(cache)})


def test_the_pathway_stays_with_the_cache():
    block = make_block("mamba3")
    assert isinstance(block, Mamba3)
    assert block(tokens(block, 2, 3))[1].pathway == "single"
    cache = block.fresh_cache(2, pathway="double")
    assert block(tokens(block, 2, 3), cache)[1].pathway == "double"
    assert block.step(tokens(block, 2, 1)[:, 0], cache)[1].pathway == "double"
    assert cache.with_pathway("single").pathway == "single"


@pytest.mark.parametrize("name", ["mamba2-learned", "mamba3-learned"])
def test_a_learned_state_counts_only_without_a_cache(name):
    block = make_block(name)
    x = tokens(block, 2, 3)
    with_fresh = block(x, block.fresh_cache(2))[0]
    assert torch.equal(block(x)[0], with_fresh)
    zero = block.fresh_cache(2)._replace(ssm_bhpr=torch.zeros_like(block.fresh_cache(2).ssm_bhpr))
    assert not torch.allclose(block(x, zero)[0], with_fresh)
    once = block(x, block(x)[1])
    again = block(torch.cat([x, x], 1))
    check(1e-12, {"y": once[0]}, {"y": again[0][:, 3:]})


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("mamba3")])
def test_step_infinite_is_where_steps_converge(name):
    """Values and gradients of 3000 steps with the same token; decays are kept fast enough for that."""
    block = make_block(name)
    assert isinstance(block, Mamba3)
    with torch.no_grad():
        block.dt_bias.fill_(1.0)
    heads = torch.randn(2, 8, dtype=torch.float64)

    def run(function):
        x = (0.5 * tokens(block, 2, 1)[:, 0]).requires_grad_()
        y = function(x)
        inputs = [x, block.in_proj.weight, block.B_bias, block.D]
        return {"y": y, **dict(zip("abcd", torch.autograd.grad((y * heads).sum(), inputs), strict=True))}

    def unrolled(x):
        y, _ = block(x[:, None].expand(-1, 3000, -1))
        return y[:, -1]

    check(1e-8, run(block.step_infinite), run(unrolled))


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_without_gradients(name, warm):
    """In float64 and so in torch's operators, which have a shorter way through a token then."""
    block = make_block(name)
    x, cache = tokens(block, 2, LENGTH), random_cache(block, 2) if warm else None
    want_y, want_cache = steps(block, x, cache)
    given = [] if cache is None else [t.clone() for t in tensors_of(cache).values()]
    with torch.no_grad():
        y, after = steps(block, x, cache)
    check(1e-9, {"y": y, **tensors_of(after)}, {"y": want_y, **tensors_of(want_cache)})
    if cache is not None:
        assert all(map(torch.equal, tensors_of(cache).values(), given)), "a cache that was given changed"
