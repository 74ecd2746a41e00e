"""States of Mamba-2 in bfloat16 between tokens: what is stored, that nothing drifts to one side, what is refused."""

import os
import subprocess
import sys

import pytest
import torch

from mambakit import (
    AttentionConfig,
    LanguageModel,
    Mamba1Config,
    Mamba2Config,
    Mamba3Config,
    ModelConfig,
    generate,
    stream,
)
from mambakit.inference import Engine
from mambakit.inference.decoder import Decoder
from mambakit.kernels.cpu.library import library, why_missing

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
BLOCKS = {
    "whole vectors": Mamba2Config(d_model=16, state_rank=32, per_head_dim=8),
    "odd sizes": Mamba2Config(d_model=12, state_rank=21, per_head_dim=6, ngroups=2, norm_before_gate=True),
    "beside a gated MLP": Mamba2Config(d_model=16, state_rank=5, per_head_dim=4, d_ssm=8, D_has_hdim=True),
}


def make_model(*blocks, **options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(layers=tuple((block,) for block in blocks), vocab_size=50, **options))


def loaded(model, cache, states):
    decoder = Decoder(model, "cpu", states)
    decoder.load(cache)
    return decoder


def warm_cache(model, rows: int):
    """After some tokens, its states such that bfloat16 holds them."""
    ids_bs = torch.randint(50, (rows, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        _, cache = model(ids_bs)
    return tuple(one._replace(ssm_bhpr=one.ssm_bhpr.bfloat16().float()) for one in cache)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_step_computes_in_float32_and_stores_a_neighbour(name):
    model = make_model(BLOCKS[name])
    cache = warm_cache(model, 3)
    exact, narrow = (loaded(model, cache, states) for states in ("float32", "bfloat16"))
    ids_b = torch.tensor([4, 8, 15])
    assert torch.equal(exact.step(ids_b), narrow.step(ids_b))
    (want,), (got,) = exact.cache(), narrow.cache()
    assert torch.equal(want.conv_bvk, got.conv_bvk)
    assert got.ssm_bhpr.dtype == torch.float32
    assert torch.equal(got.ssm_bhpr, got.ssm_bhpr.bfloat16().float())
    # Of the two bfloat16 numbers around each, the lower or the upper one in size.
    steps = (got.ssm_bhpr.view(torch.int32) >> 16) - (want.ssm_bhpr.view(torch.int32) >> 16)
    assert {*steps.flatten().tolist()} == {0, 1}


def test_long_texts_do_not_drift_to_one_side():
    # Every token takes a few ten-thousandths away: the nearest number would never change.
    model = make_model(Mamba2Config(d_model=16, state_rank=16, per_head_dim=8, A_init_range=(0.2, 0.3)))
    with torch.no_grad():
        model.backbone.layers[0].mixer.dt_bias.fill_(-6.5)
        ids_bs = torch.randint(50, (2, 3000), generator=torch.Generator().manual_seed(2))
        _, cache = model(ids_bs[:, :1])
    cache = tuple(one._replace(ssm_bhpr=torch.full_like(one.ssm_bhpr, 3.0)) for one in cache)
    exact, narrow = (loaded(model, cache, states) for states in ("float32", "bfloat16"))
    for ids_b in ids_bs.T:
        exact.step(ids_b)
        narrow.step(ids_b)
    (want,), (got,) = exact.cache(), narrow.cache()
    assert want.ssm_bhpr.mean() < 2.0  # most of it is gone
    difference = got.ssm_bhpr - want.ssm_bhpr
    assert abs(float(difference.mean())) < 0.01
    assert float(difference.std()) < 0.2


def test_rows_do_not_depend_on_others_and_results_repeat():
    model = make_model(BLOCKS["odd sizes"], BLOCKS["odd sizes"])
    ids = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    options = {"max_new_tokens": 20, "seed": [1, 2, 3], "states": "bfloat16"}
    together = generate(model, ids, **options)
    assert torch.equal(together, generate(model, ids, **options))
    for row, prompt in enumerate(ids):
        alone = generate(model, [prompt], **{**options, "seed": [row + 1]})
        assert torch.equal(together[row], alone[0])


def test_the_engine_and_hybrids():
    model = make_model(BLOCKS["odd sizes"], AttentionConfig(12, n_heads=2, head_dim=6))
    engine = Engine(model, states="bfloat16", speculate="auto")
    requests = [engine.add([1, 2, 3], 12, seed=1), engine.add([4], 5, seed=2), engine.add([5, 6], 9, seed=3)]
    engine.run()
    for request, (ids, seed) in zip(requests, (([1, 2, 3], 1), ([4], 2), ([5, 6], 3)), strict=True):
        want = generate(model, [ids], max_new_tokens=len(request.tokens), seed=[seed], states="bfloat16")
        assert request.tokens == want[0].tolist()


def test_what_is_refused():
    model = make_model(BLOCKS["odd sizes"])
    with pytest.raises(ValueError, match="states is 'int8', expected one of 'float32', 'bfloat16'"):
        generate(model, [1], max_new_tokens=1, states="int8")
    with pytest.raises(ValueError, match='states="bfloat16": backend="torch" steps module by module'):
        stream(model, [1], max_new_tokens=1, states="bfloat16", backend="torch")
    with pytest.raises(ValueError, match="computed one by one"):
        stream(model, [1], max_new_tokens=1, states="bfloat16", speculate="ngram")
    with pytest.raises(ValueError, match="computed one by one"):
        Engine(model, states="bfloat16", speculate="ngram")
    for block in (Mamba1Config(d_model=12), Mamba3Config(d_model=12, per_head_dim=6, state_rank=8)):
        with pytest.raises(ValueError, match="it is for Mamba-2, and there is Mamba-"):
            Engine(make_model(BLOCKS["odd sizes"], block), states="bfloat16")
    with pytest.raises(ValueError, match="one by one"):
        loaded(model, warm_cache(model, 1), "bfloat16").chains([[1, 2]])
    double = make_model(BLOCKS["odd sizes"]).double()
    with pytest.raises(ValueError, match='states="bfloat16"'):
        generate(double, [1], max_new_tokens=1, states="bfloat16")


@pytest.mark.parametrize("isa", ["plain", "avx2"])
def test_other_instruction_sets(isa):
    if isa not in library().usable or library().instruction_set == isa:
        pytest.skip(f"{isa} is in use, or this machine does not have it")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-k", "step or rows", __file__]
    environment = {**os.environ, "MAMBAKIT_ISA": isa, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
