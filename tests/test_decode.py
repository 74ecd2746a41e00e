"""The whole-model step equals the model's own, for all families, options and weight formats; and what it refuses."""

import copy
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocks import CONFIGS
from calls import Wrapped
from compare import error
from mambakit import (
    AttentionConfig,
    LanguageModel,
    Mamba1Config,
    Mamba2Config,
    Mamba3Config,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    MultiGateConfig,
    ParallelConfig,
    PrefixCache,
    generate,
    quantize,
    stream,
)
from mambakit.blocks import caches
from mambakit.blocks.mlp import ACTIVATIONS
from mambakit.inference import decoder_states
from mambakit.inference.decoder import Decoder, StepByStep, make_decoder, why_not
from mambakit.kernels.cpu.library import library, why_missing
from mambakit.models.schedules import Cyclic
from mambakit.ops.backends import use_backend

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
VOCABULARY = 50
NAMES = list(CONFIGS)
MODELS = {
    "tied": {},
    "untied-mlp": {"tie_embeddings": False, "d_intermediate": 8},
    "layer-norm": {"rms_norm": False, "norm_eps": 1e-3, "residual_in_fp32": False},
    "virtual": {"virtual": Cyclic(5)},
    "scaled": {"embedding_scale": 3.0, "logits_scale": 0.4, "residual_scale": 0.7, "d_intermediate": 8},
}
M1, M2, M3 = CONFIGS["mamba1"], Mamba2Config(d_model=6, state_rank=4, per_head_dim=4), CONFIGS["mamba3"]
A = AttentionConfig(6, 4, 2, 5, rope_fraction=0.8)
MLPS = {
    **{name: MLPConfig(6, 10, activation=name) for name in ACTIVATIONS},
    **{f"{name}-ungated": MLPConfig(6, 11, gated=False, activation=name, bias=True) for name in ACTIVATIONS},
    "scaled": MLPConfig(6, 37, bias=True, gate_scale=1.7, in_scale=0.6, out_scale=-1.3),
}
EXPERTS = {
    "softmax": MoEConfig(6, 10, 5, 2),
    "bare": MoEConfig(6, 9, 7, 3, normalize=False, scale=1.7, gated=False, activation="relu2"),
    "chosen": MoEConfig(6, 10, 5, 2, "softmax_chosen", d_shared=11, in_scale=0.7, out_scale=1.4),
    "sigmoid": MoEConfig(6, 10, 8, 3, "sigmoid", scale=2.5, groups=4, top_groups=2, d_shared=5, d_latent=4, bias=True),
    "single": MoEConfig(6, 4, 3, 1, "sigmoid", normalize=False, groups=3, top_groups=2, activation="gelu"),
}
LAYERS = {
    **{f"moe-{name}": ((M1, experts), (experts,)) for name, experts in EXPERTS.items()},
    "moe-parallel": ((ParallelConfig(EXPERTS["sigmoid"], M1), ParallelConfig(M2, EXPERTS["chosen"], out_scale=0.6)),),
    **{f"mlp-{name}": ((M1, mlp),) for name, mlp in MLPS.items()},
    "mlp-first": ((MLPS["silu"],), (MLPS["relu2-ungated"], replace(M1, in_scale=1.2, out_scale=0.5)), (MLPS["gelu"],)),
    "attention": ((A, MLPS["silu"]), (replace(A, rope_theta=100.0, bias=True), M1)),
    "attention-window": ((M1, replace(A, window=5)), (replace(A, n_heads=9, n_kv_heads=3, rope_theta=7.0, window=11),)),
    "attention-wide": ((AttentionConfig(6, 14, 2, 70, key_scale=0.6, rope_theta=1e4, rope_fraction=0.6),),),
    "parallel": (
        (ParallelConfig(M2, replace(A, in_scale=0.7, out_scale=1.3), in_scale=0.8, out_scale=0.5), MLPS["silu"]),
        (ParallelConfig(MLPS["gelu"], M1), ParallelConfig(A, ParallelConfig(MLPS["relu"], M1, out_scale=2.0))),
        (ParallelConfig(MLPS["gelu"], MLPS["scaled"]),),
    ),
    "mambas": ((replace(M2, in_scale=0.3), M1, MLPS["scaled"], M2), (M1,)),
}
"""Hybrids, as the blocks of each layer."""
BLOCKS = {**CONFIGS, **LAYERS}
LONG = {
    "all": AttentionConfig(8, 6, 2, 20, rope_theta=50.0),
    "window": AttentionConfig(8, 5, 1, 33, window=300),
    "heads": AttentionConfig(8, 3, 3, 64, rope_theta=1e4),
}


def make_model(
    block: Any, *, bits: int = 32, dtype: torch.dtype = torch.float32, spread: float = 0.3, **options: Any
) -> LanguageModel:
    """Of one kind of block, or of the layers in a tuple; its weights are `spread` from where they start."""
    torch.manual_seed(1)
    blocks = {"layers": block} if isinstance(block, tuple) else {"block": block, "n_layer": 2}
    model = LanguageModel(ModelConfig(**blocks, vocab_size=VOCABULARY, **options), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += spread * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer += spread * torch.randn_like(buffer)
    # Rows as they are: rounded ones in float64 and float32 are sometimes one step apart.
    return model if bits == 32 else quantize(model, bits, activations="float32")


def tensors_of(cache: Any) -> list[Tensor]:
    if isinstance(cache, Tensor):
        return [cache]
    return [t for part in cache for t in tensors_of(part)] if isinstance(cache, tuple | list) else []


def apart(got: Any, want: Any) -> float:
    """The largest error of two caches; angles are compared as directions."""
    if isinstance(want, Tensor):
        assert got.shape == want.shape
        return error(got.double(), want.double()) if want.numel() else 0.0
    if not isinstance(want, tuple | list):
        assert got == want
        return 0.0
    assert type(got) is type(want) or not hasattr(want, "_fields")
    if hasattr(want, "rotation"):
        got, want = (c._replace(rotation=torch.stack((c.rotation.cos(), c.rotation.sin()))) for c in (got, want))
    return max((apart(a, b) for a, b in zip(got, want, strict=True)), default=0.0)


def check_steps(model: LanguageModel, rows: int = 3, steps: int = 12, lengths: Sequence[int] = (4,)) -> None:
    """Logits and caches token by token after prompts of some lengths, against the same model in float64.

    Some of these models magnify rounding: torch's own float32 step is measured too, and a cache may be off by a few
    times what that is off by.
    """
    make = torch.Generator().manual_seed(0)
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        ids_bs = torch.randint(VOCABULARY, (rows, max(lengths)), generator=make)
        length_b = torch.tensor((*lengths, *lengths * rows)[:rows])
        _, cache = model(ids_bs, mask_bs=torch.arange(max(lengths)) < length_b[:, None])
        before = [t.clone() for t in tensors_of(cache)]
        exact: Any = caches.to(cache, dtype=torch.float64)
        entering, decoder = cache, Decoder(model)
        decoder.load(cache)
        for _ in range(steps):
            ids_b = torch.randint(VOCABULARY, (rows,), generator=make)
            with use_backend("torch"):
                _, cache = model.step(ids_b, cache)
                want, exact = wide.step(ids_b, exact)
            assert error(decoder.step(ids_b), want, floor=1e-3) < 1e-5
    assert apart(decoder.cache(), exact) < max(1e-5, 4 * apart(cache, exact))
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(entering), before, strict=True)), "a public cache changed"


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_block(name, bits):
    check_steps(make_model(CONFIGS[name], bits=bits))


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3-mimo"])
def test_every_model(name, options):
    check_steps(make_model(CONFIGS[name], **options))


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(name, bits):
    check_steps(make_model(LAYERS[name], bits=bits))


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", ["mlp-first", "mambas", "attention", "attention-window", "parallel", "moe-parallel"])
def test_every_model_of_layers(name, options):
    check_steps(make_model(LAYERS[name], **{key: option for key, option in options.items() if key != "d_intermediate"}))


@pytest.mark.parametrize("name", ["attention-rope", "attention-window", "parallel"])
def test_rows_of_other_lengths(name, monkeypatch):
    """Some grow out of the room they had, and none of them at the same time."""
    monkeypatch.setattr(decoder_states, "ROOM", 3)
    check_steps(make_model(BLOCKS[name]), rows=4, steps=140, lengths=(61, 1, 40, 2))


@pytest.mark.parametrize("block", LONG.values(), ids=LONG)
def test_long_contexts(block):
    """More tokens in sight than one piece has room for."""
    check_steps(make_model(block), rows=3, steps=3, lengths=(700, 254, 3))


def test_a_late_position():
    """Angles count modulo a turn, however far a token is from the first."""
    model = make_model(((AttentionConfig(8, 2, rope_theta=1e4, window=3),),))
    with torch.no_grad():
        _, cache = model(torch.tensor([[1, 2, 3]]))
        late = tuple(c._replace(position_b=c.position_b + 3_000_000) for c in cache)
        fused = Decoder(model)
        fused.load(late)
        want, _ = model.double().step(torch.tensor([1]), caches.to(late, dtype=torch.float64))
    assert error(fused.step(torch.tensor([1])), want) < 1e-5


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 16, 19])
@pytest.mark.parametrize(
    "name", ["mamba1", "mamba2-mlp", "mamba3-mimo", "mambas", "attention", "attention-window", "parallel"]
)
def test_rows_do_not_matter(name, rows):
    """Each row to the last digit as it would be alone."""
    model = make_model(BLOCKS[name], bits=4)
    with torch.no_grad():
        ids_b, (_, cache) = torch.randint(VOCABULARY, (rows,)), model(torch.randint(VOCABULARY, (rows, 3)))
        together, alone = Decoder(model), Decoder(model)
        together.load(cache)
        logits_bw = together.step(ids_b)
        for row in range(rows):
            alone.load(caches.select(cache, [row]))
            assert torch.equal(alone.step(ids_b[row : row + 1])[0], logits_bw[row])


def random_block(draw: random.Random) -> Any:
    """Sizes that are multiples of nothing."""
    if draw.random() < 0.25:
        kv, group, p = draw.randint(1, 3), draw.randint(1, 9), draw.randint(1, 40)
        theta = {} if p % 2 else {"rope_theta": 10.0}
        return AttentionConfig(draw.randint(1, 70), kv * group, kv, p, window=draw.choice([None, 1, 6]), **theta)
    heads, p, groups = draw.choice([2, 4, 6]), draw.choice([1, 3, 7, 20]), draw.choice([1, 2])
    if draw.random() < 0.3:
        return Mamba1Config(d_model=draw.randint(1, 70), state_rank=draw.randint(1, 19), conv_kernel=draw.randint(1, 5))
    shared = {"d_model": heads * p, "expand": 1, "per_head_dim": p, "ngroups": groups}
    if draw.random() < 0.5:
        before = draw.random() < 0.5
        return Mamba2Config(
            **shared, state_rank=draw.randint(1, 40), conv_kernel=draw.randint(1, 5), norm_before_gate=before
        )
    rope, rank = draw.choice([0.0, 0.5, 1.0]), draw.randint(1, 6)
    state_rank, turns = 2 * draw.randint(1, 20), {}
    if draw.random() < 0.3:
        state_rank, turns = 8 * draw.randint(1, 5), {"rotation": "quaternion"}
    return Mamba3Config(**shared, state_rank=state_rank, rope_fraction=rope, is_mimo=rank > 1, mimo_rank=rank, **turns)


@pytest.mark.parametrize("seed", range(40))
def test_odd_sizes(seed):
    draw = random.Random(seed)
    mlp = {"d_intermediate": 8} if draw.random() < 0.2 else {}
    model = make_model(random_block(draw), bits=draw.choice([32, 16, 8, 4]), **mlp)
    check_steps(model, rows=draw.randint(1, 10), steps=4)


def larger_model(name: str) -> LanguageModel:
    """Enough work for a second thread to take part everywhere.

    Its sums are over 256 entries rather than 6: with the spread of the small models Mamba-3 would turn by 30 radians a
    token, and the rounding of a sum by that much more.
    """
    blocks = {
        "mamba1": Mamba1Config(d_model=256),
        "mamba2": Mamba2Config(d_model=256, state_rank=64, per_head_dim=32),
        "mamba3": Mamba3Config(d_model=256, state_rank=64, per_head_dim=32),
        "attention": AttentionConfig(256, 8, 2, rope_theta=1e4),
    }
    return make_model(blocks[name], d_intermediate=256, spread=0.05)


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3", "attention"])
def test_threads_and_repeats_change_nothing(name, bits):
    model = larger_model(name) if bits == 32 else quantize(larger_model(name), bits, activations="float32")
    check_steps(model, rows=2, steps=2)
    with torch.no_grad():
        _, cache = model(torch.ones(2, 600 if name == "attention" else 1, dtype=torch.int64))

    def run() -> list[Tensor]:
        decoder = Decoder(model)
        decoder.load(cache)
        return [decoder.step(torch.tensor([3, t])) for t in range(3)] + tensors_of(decoder.cache())

    want = run()
    torch.set_num_threads(2)
    try:
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3", "attention"])
def test_any_number_of_rows(name, bits):
    """A row's logits and states are those of the row alone, to the last digit, and near those of a step by modules."""
    model = larger_model(name) if bits == 32 else quantize(larger_model(name), bits)
    rows, tokens = 37, torch.arange(3 * 37).view(3, 37) % VOCABULARY
    with torch.no_grad():
        _, cache = model(torch.arange(4 * rows).view(rows, 4) % VOCABULARY)
        decoder = make_decoder(model, "auto")
        assert isinstance(decoder, Decoder)
        decoder.load(cache)
        together = [decoder.step(ids_b) for ids_b in tokens]
        states = tensors_of(decoder.cache())
        for row in (0, 17, 36):
            decoder.load(caches.select(cache, [row]))
            assert all(
                torch.equal(decoder.step(ids_b[row : row + 1])[0], want[row])
                for ids_b, want in zip(tokens, together, strict=True)
            )
            for own, all_rows in zip(tensors_of(decoder.cache()), states, strict=True):
                assert torch.equal(own[0], all_rows[row])
        by_modules = StepByStep(model, "auto")
        by_modules.load(cache)
        want = torch.stack([by_modules.step(ids_b) for ids_b in tokens])
        off = (torch.stack(together) - want).norm() / want.norm()
    assert off < {32: 1e-4}.get(bits, 2e-2)


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3", "attention"])
def test_half_precision(name):
    """As near to the same weights in float64 as a step by modules, with caches of the model's own dtypes."""
    model = larger_model(name).to(torch.bfloat16)
    wide, ids = copy.deepcopy(model).double(), torch.arange(2 * 9).view(2, 9) % VOCABULARY
    with torch.no_grad():
        cache = model(ids)[1]
        decoders = [make_decoder(model, backend) for backend in ("auto", "torch")]
        assert [type(decoder) for decoder in decoders] == [Decoder, StepByStep]
        errors = []
        want, _ = wide.step(ids[:, 0], caches.to(cache, dtype=torch.float64))
        for decoder in decoders:
            decoder.load(cache)
            logits = decoder.step(ids[:, 0])
            errors.append(float((logits.double() - want).norm() / want.norm()))
            assert [t.dtype for t in tensors_of(decoder.cache())] == [t.dtype for t in tensors_of(cache)]
        assert errors[0] <= 1.1 * errors[1], errors
        decoders[0].load(cache)
        before = decoders[0].step(ids[:, 0])
        model.backbone.norm_f.weight *= 2  # seen from the next load on
        decoders[0].load(cache)
        assert error(decoders[0].step(ids[:, 0]), 2 * before) < 1e-2


@pytest.mark.parametrize("isa", ["plain", "avx2"])
def test_every_instruction_set(isa):
    if isa not in library().usable or library().instruction_set == isa:
        pytest.skip(f"this machine has no {isa}, or this is it")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "every_block or every_layer or odd_sizes or threads or long_contexts"]
    environment = {**os.environ, "MAMBAKIT_ISA": isa, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize(
    "name", ["mamba1", "mamba2", "mamba3", "mamba3-mimo", "attention", "attention-window", "parallel"]
)
def test_generation_is_the_same(name, bits):
    model = make_model(BLOCKS[name], bits=bits)
    prompts = [[1, 2, 3], [4], [5, 6]]
    for options in ({"temperature": 0}, {"seed": 3}, {"seed": 1, "stop": [7, 8, [9, 9]]}):
        runs = {b: stream(model, prompts, max_new_tokens=50, backend=b, **options) for b in ("auto", "torch", "cpu")}
        tokens = {b: torch.stack(list(run), 1) for b, run in runs.items()}
        assert torch.equal(tokens["auto"], tokens["torch"])
        assert torch.equal(tokens["auto"], tokens["cpu"])
        assert apart(runs["auto"].cache, runs["torch"].cache) < 1e-4
        more = [generate(model, [[3]] * 3, max_new_tokens=5, cache=run.cache, temperature=0) for run in runs.values()]
        assert torch.equal(more[0], more[1])


@pytest.mark.parametrize("name", ["attention", "attention-window", "parallel", "moe-sigmoid"])
def test_known_prefixes_of_hybrids(name):
    model, known = make_model(BLOCKS[name]), PrefixCache()
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7], [1, 2]]
    options: Any = {"max_new_tokens": 20, "temperature": 0}
    want = generate(model, prompts, backend="torch", **options)
    for _ in range(2):
        assert torch.equal(generate(model, prompts, prefix_cache=known, prefill_chunk=2, **options), want)


def test_weights_are_read_anew_by_every_generation():
    model = make_model(CONFIGS["mamba1"])
    first = generate(model, [1, 2], max_new_tokens=20, temperature=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    again = generate(model, [1, 2], max_new_tokens=20, temperature=0)
    assert not torch.equal(again, first)
    assert torch.equal(again, generate(model, [1, 2], max_new_tokens=20, temperature=0, backend="torch"))


@pytest.mark.parametrize("name", [*NAMES, "mambas", "parallel", "moe-sigmoid"])
def test_training_shows_after_the_next_load(name):
    model, ids_b = make_model(BLOCKS[name]), torch.tensor([1, 2])
    decoder = Decoder(model)
    decoder.load(model.fresh_cache(2))
    before = decoder.step(ids_b)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.arange(9)[None])[0].square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        _, cache = model(torch.tensor([[3, 4], [5, 6]]))
    decoder.load(cache)
    anew = Decoder(model)
    anew.load(cache)
    with torch.no_grad(), use_backend("torch"):
        want, _ = model.step(ids_b, cache)
    assert error(decoder.step(ids_b), want, floor=1e-3) < 1e-5
    decoder.load(cache)
    assert torch.equal(decoder.step(ids_b), anew.step(ids_b))
    assert error(before, want) > 1e-2


@pytest.mark.parametrize("name", [*NAMES, "mambas", "parallel", "moe-sigmoid"])
def test_memory_outlives_the_parameter(name):
    """Weights that are replaced do not show, none of them: a part of them would make a model that nobody trained."""
    model, ids_b = make_model(BLOCKS[name]), torch.tensor([1])
    with torch.no_grad():
        _, cache = model(torch.tensor([[3, 4]]))
    decoder = Decoder(model)
    decoder.load(cache)
    want = decoder.step(ids_b)
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, float("nan"))
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            module._parameters[key] = None if parameter is None else nn.Parameter(torch.full_like(parameter, 9.0))
    decoder.load(cache)
    assert torch.equal(decoder.step(ids_b), want)
    assert want.isfinite().all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocabulary", [5, 257, 20_011])
def test_the_likeliest_token_is_told(vocabulary, threads):
    """The first of the largest logits, whoever of the threads has computed it; none where they are not finite."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(block=CONFIGS["mamba2"], n_layer=1, vocab_size=vocabulary))
    decoder, before = Decoder(model), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for spoilt in (None, "twins", "nan", "inf"):
            with torch.no_grad():
                weight_wd = model.backbone.embedding.weight
                if spoilt == "twins":
                    weight_wd[3:] = weight_wd[3]
                elif spoilt is not None:
                    weight_wd[4, 0] = float(spoilt)
            decoder.load(model.fresh_cache(3))
            logits_bw = decoder.step([1, 2, 0])
            best_b, place_b = logits_bw.max(-1)
            assert decoder.best == [
                p if f else -1 for p, f in zip(place_b.tolist(), best_b.isfinite().tolist(), strict=True)
            ]
            assert spoilt != "nan" or decoder.best == [-1] * 3
    finally:
        torch.set_num_threads(before)


def with_hook(model: LanguageModel) -> LanguageModel:
    model.backbone.layers[1].mixer.in_proj.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    return model


def with_plain_linear(model: LanguageModel) -> LanguageModel:
    model.lm_head = nn.Linear(8, 56, bias=False)  # type: ignore[assignment]
    return model


def with_step(model: LanguageModel) -> LanguageModel:
    model.step = model.step  # type: ignore[method-assign]
    return model


def with_replaced(name: str, *shape: int) -> LanguageModel:
    model = make_model(BLOCK, d_intermediate=8, tie_embeddings=False)
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, nn.Parameter(torch.zeros(shape)))
    return model


class Other(LanguageModel):
    pass


BLOCK = CONFIGS["mamba2"]
REFUSED = {
    "has hooks": lambda: with_hook(make_model(BLOCK)),
    "lm_head is a Linear": lambda: with_plain_linear(make_model(BLOCK)),
    "method replaced": lambda: with_step(make_model(BLOCK)),
    "it is a Other": lambda: Other(ModelConfig(block=BLOCK, n_layer=1, vocab_size=9)),
    "MultiGate": lambda: make_model(BLOCK, multi_gate=MultiGateConfig(n_streams=2)),
    "leaves out a residual": lambda: make_model(BLOCK, ignore_first_residual=True),
    "in_proj has weights of torch.float64": lambda: make_model(BLOCK, dtype=torch.float64),
    "weights of torch.int8 in a form": lambda: quantize(make_model(BLOCK), 8).to(torch.bfloat16),
    "in_proj has weights of torch.uint8": lambda: quantize(make_model(BLOCK), 4, group_size=8),
    "carry nothing": lambda: make_model(((MLPS["silu"],),)),
    "in_proj.weight is (7, 8), expected (44, 8)": lambda: with_replaced("backbone.layers.1.mixer.in_proj.weight", 7, 8),
    "D is (3,), expected (4,)": lambda: with_replaced("backbone.layers.0.mixer.D", 3),
    "conv1d.weight is (24, 1, 3)": lambda: with_replaced("backbone.layers.0.mixer.conv1d.weight", 24, 1, 3),
    "fc2.weight is (8, 3)": lambda: with_replaced("backbone.layers.0.mlp.fc2.weight", 8, 3),
    "norm2.weight is (4,)": lambda: with_replaced("backbone.layers.0.norm2.weight", 4),
    "norm_f.weight is (4,)": lambda: with_replaced("backbone.norm_f.weight", 4),
    "embedding.weight is (9, 8)": lambda: with_replaced("backbone.embedding.weight", 9, 8),
    "lm_head.weight is (56, 9)": lambda: with_replaced("lm_head.weight", 56, 9),
}
BAD_SIZES = [reason for reason in REFUSED if ".weight is" in reason or "D is" in reason]


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused(reason):
    model = REFUSED[reason]()
    assert reason in (why_not(model) or "")
    assert isinstance(make_decoder(model, "auto"), StepByStep)
    with pytest.raises(ValueError, match=r'cannot be decoded in one call \(backend "cpu"\)'):
        generate(model, [1], max_new_tokens=1, backend="cpu")
    if not isinstance(model, Other) and reason not in BAD_SIZES:
        generate(model, [1], max_new_tokens=3)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3-mimo"])
def test_parameters_of_other_sizes(name, bits):
    """Kernels would read beyond their ends."""
    model = make_model(CONFIGS[name], d_intermediate=12)
    model = model if bits is None else quantize(model, bits)
    owners = [(m, key, p) for m in model.modules() for key, p in m._parameters.items() if p is not None]
    for module, key, parameter in owners:
        assert why_not(model) is None
        module._parameters[key] = nn.Parameter(parameter[: len(parameter) // 2])
        assert re.search(r" is \(.*, expected \(", why_not(model) or ""), key
        module._parameters[key] = parameter


def test_backends_by_name():
    model = make_model(BLOCK)
    assert isinstance(make_decoder(model, "auto"), Decoder)
    assert isinstance(make_decoder(model, "cpu"), Decoder)
    assert isinstance(make_decoder(model, "torch"), StepByStep)
    with pytest.raises(ValueError, match="backend 'gpu' is unknown"):
        generate(model, [1], max_new_tokens=1, backend="gpu")


def test_calls_that_do_not_fit():
    model = make_model(BLOCK)
    decoder = Decoder(model)
    with pytest.raises(ValueError, match="cache of 0 rows"):
        decoder.step(torch.tensor([1]))
    cache = model.fresh_cache(2)
    with pytest.raises(ValueError, match="cache is of 1 layers"):
        decoder.load(cache[:1])
    with pytest.raises(ValueError, match=r"cache\.ssm_bhpr"):
        decoder.load([c._replace(ssm_bhpr=c.ssm_bhpr.double()) for c in cache])
    decoder.load(cache)
    for bad in (torch.tensor([1]), torch.tensor([1, 2, 3])):
        with pytest.raises(ValueError, match="2 rows"):
            decoder.step(bad)
    for bad in (torch.tensor([1, 56]), torch.tensor([-1, 1])):
        with pytest.raises(ValueError, match="outside 0 to 55"):
            decoder.step(bad)
    with pytest.raises(ValueError, match="expected int64"):
        decoder.step(torch.tensor([1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="ids_b is a Wrapped on cpu, expected a plain tensor"):
        decoder.step(Wrapped(torch.tensor([1, 2])))


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3", "mamba3-mimo"])
def test_step_by_step_overwrites_its_own_states_only(name):
    model = make_model(CONFIGS[name])
    ids_b = torch.tensor([1, 2])
    with torch.no_grad():
        _, loaded = model(torch.randint(VOCABULARY, (2, 4)))
        decoder = StepByStep(model, "torch")
        decoder.load(loaded)
        entering = [t.clone() for t in tensors_of(loaded)]
        places = [cache._asdict().get("ssm_bhpr", cache[1]).data_ptr() for cache in decoder._cache]
        with use_backend("torch"):
            want, after = model.step(ids_b, loaded)
        assert error(decoder.step(ids_b), want) < 1e-6
        snapshot = decoder.cache()
        with use_backend("torch"):
            want, _ = model.step(ids_b, after)
        assert error(decoder.step(ids_b), want) < 1e-6
    if name != "mamba1":
        assert [cache.ssm_bhpr.data_ptr() for cache in decoder._cache] == places
    assert all(map(torch.equal, tensors_of(loaded), entering))
    assert apart(snapshot, after) < 1e-6
    # Ordinary tensors, which a step with gradients takes and leaves as they are.
    before = [t.clone() for t in tensors_of(snapshot)]
    logits_bw, _ = model.step(ids_b, snapshot)
    logits_bw.sum().backward()
    with torch.no_grad(), use_backend("torch"):
        model.step(ids_b, snapshot)
    assert all(map(torch.equal, tensors_of(snapshot), before))


def test_step_by_step_leaves_the_caches_of_another_step_alone():
    """It may call the model twice with one cache."""

    class Twice(LanguageModel):
        def step(self, ids_b, cache=None, *, reset_b=None):
            super().step(ids_b, cache)
            return super().step(ids_b, cache)

    model = make_model(CONFIGS["mamba2"])
    twice = Twice(model.config)
    twice.load_state_dict(model.state_dict())
    want = generate(model, [1, 2], max_new_tokens=8, temperature=0, backend="torch")
    assert torch.equal(generate(twice, [1, 2], max_new_tokens=8, temperature=0, backend="torch"), want)


def test_large_states_begin_where_large_pages_do():
    """And keep what they held as they grow, with zeros or room behind it."""
    held = torch.randn(3, 1 << 19)
    made = [decoder_states.copied(held), decoder_states.with_length(held, 0, 5), decoder_states.with_places(held, 5)]
    made.append(decoder_states.with_length(held, 1, 1 << 20)[:, : 1 << 19])
    for one in made:
        assert one.data_ptr() % decoder_states.PAGE == 0
        assert torch.equal(one[:3], held)
    assert made[1][3:].eq(0).all()
    assert decoder_states.with_length(held, 0, 2) is decoder_states.with_places(held, 2) is held
