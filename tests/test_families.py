"""A family is one record, and a block stays one whatever wraps, copies or derives its class."""

import copy
import json
import os
import pickle
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import mambakit as mk
from blocks import CONFIGS, FAMILIES, MAKE, make_block, random_cache, results, tensors_of, tokens
from compare import GRADIENT, VALUE, check
from mambakit.blocks.block import Block
from mambakit.blocks.config import BlockConfig, check_positive
from mambakit.blocks.family import FAMILIES as RECORDS
from mambakit.blocks.family import Family, FusedStep, family_of, presets, register
from mambakit.cli.main import main
from mambakit.inference.decoder import StepByStep, make_decoder
from mambakit.kernels.cpu.decode import PARTS, fields_of
from test_trainer_runs import forked_runs

F64 = torch.float64


# A toy family: this record is all that is added anywhere.


@dataclass(frozen=True, kw_only=True, slots=True)
class LeakyConfig(BlockConfig):
    d_model: int
    width: int = 8

    def __post_init__(self) -> None:
        check_positive(self, "d_model", "width")


class LeakyCache(NamedTuple):
    ssm_bi: Tensor


class Leaky(Block[LeakyConfig, LeakyCache]):
    """A leaky integrator per channel between two projections."""

    config_class, cache_class = LeakyConfig, LeakyCache

    def __init__(self, config: LeakyConfig | None = None, *, device: Any = None, dtype: Any = None, **fields: Any):
        super().__init__(config, **fields)
        d, i = self.config.d_model, self.config.width
        self.in_proj = nn.Linear(d, i, device=device, dtype=dtype)
        self.decay = nn.Parameter(torch.linspace(0, 2, i, device=device, dtype=dtype))
        self.out_proj = nn.Linear(i, d, device=device, dtype=dtype)

    def cache_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        return {"ssm_bi": (batch, self.config.width)}

    def fresh_cache(self, batch: int) -> LeakyCache:
        return LeakyCache(self.zeros(self.cache_shapes(batch)["ssm_bi"], like=self.decay))

    def run(self, x_bsd, cache, path, segments_bs, lengths_b):
        kept_i, state_bi, y = torch.sigmoid(self.decay.to(torch.promote_types(x_bsd.dtype, torch.float32))), *cache, []
        for t, x_bi in enumerate(self.in_proj(x_bsd).unbind(1)):
            entering_bi = state_bi
            if segments_bs is not None and t:
                new_b1 = (segments_bs[:, t] != segments_bs[:, t - 1])[:, None]
                entering_bi = state_bi.masked_fill(new_b1, 0)
            after_bi = kept_i * entering_bi + x_bi
            state_bi = after_bi if lengths_b is None else torch.where((t < lengths_b)[:, None], after_bi, state_bi)
            y.append(state_bi)
        return self.out_proj(torch.stack(y, 1).to(x_bsd.dtype)), LeakyCache(state_bi)


RECORD = Family(
    name="leaky",
    title="Leaky",
    block=Leaky,
    sizes={"width": ("decay", 0, "width")},
    variants={"leaky-wide": {"width": 32}},
    at_hand={"width": 12},
    example={"d_model": 6},
)


@pytest.fixture
def leaky():
    yield register(RECORD)
    del RECORDS["leaky"]


def small_model() -> mk.LanguageModel:
    torch.manual_seed(0)
    return mk.LanguageModel(mk.ModelConfig(block=LeakyConfig(d_model=6), n_layer=2, vocab_size=20))


@pytest.mark.usefixtures("leaky")
class TestOneRecord:
    def test_trains_and_generates_from_the_command_line(self, tmp_path, capsys):
        (tmp_path / "text").mkdir()
        for i in range(4):
            (tmp_path / "text" / f"{i}.txt").write_text("state and scan and gate " * (20 + i))
        sizes = [
            "--d-model=8",
            "--layers=2",
            "--steps=4",
            "--batch=2",
            "--seq-len=16",
            "--warmup=1",
            "--no-tensorboard",
        ]
        run = ["train", str(tmp_path / "text"), "--out", str(tmp_path / "run"), "--family=leaky", *sizes]
        assert main(run) == 0
        model = mk.load_model(tmp_path / "run" / "model")
        assert model.config.block == LeakyConfig(d_model=8, width=12)
        assert main(["generate", str(tmp_path / "run"), "--prompt=state", "--max-new-tokens=5", "--seed=1"]) == 0
        assert capsys.readouterr().out
        assert main([*run[:3], str(tmp_path / "other"), *run[4:], "--mimo-rank=2"]) == 2
        assert "--mimo-rank is for mamba3, and --family is leaky" in capsys.readouterr().err

    def test_generates_step_by_step(self):
        model = small_model()
        run = mk.stream(model, [[1, 2, 3], [4, 5]], max_new_tokens=4, temperature=0)
        given = torch.stack(list(run), 1)
        ids = torch.cat([torch.tensor([[1, 2, 3]]), given[:1]], 1)
        logits, _ = model(ids)
        assert torch.equal(logits[0, 2:-1].argmax(-1), given[0])
        assert isinstance(make_decoder(model, "auto"), StepByStep)
        with pytest.raises(ValueError, match="mixer is a Leaky"):
            mk.generate(model, [1], max_new_tokens=1, backend="cpu")

    def test_is_saved_and_loaded(self, tmp_path):
        model = small_model()
        mk.save_model(model, tmp_path / "model")
        loaded = mk.load_model(tmp_path / "model")
        assert loaded.config == model.config
        ids = torch.tensor([[1, 2, 3]])
        y, cache = model(ids)
        assert torch.equal(loaded(ids)[0], y)
        mk.caches.save(cache, tmp_path / "cache")
        restored = mk.caches.load(tmp_path / "cache")
        assert [type(one) for one in restored] == [LeakyCache] * 2
        assert torch.equal(loaded.step(ids[:, 0], restored)[0], model.step(ids[:, 0], cache)[0])

    def test_foreign_formats_do_not_know_it(self, tmp_path):
        for format in ("official", "transformers"):
            with pytest.raises(ValueError, match=f'the format "{format}" has no Leaky; "mambakit" has'):
                mk.save_model(small_model(), tmp_path / format, format=format)

    def test_a_size_that_does_not_fit_is_named(self, tmp_path):
        mk.save_model(small_model(), tmp_path)
        values = json.loads((tmp_path / "config.json").read_text())
        values["model"]["block"]["width"] = 9
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(ValueError, match="the tensors have width = 8, the config gives 9"):
            mk.load_model(tmp_path)

    @pytest.mark.parametrize("name", ["leaky", "leaky-wide"])
    def test_is_timed(self, capsys, name):
        sizes = ["--d-model=8", "--tokens=8", "--repeats=1", "--backends", "torch"]
        for what in ("block", "model"):
            assert main(["bench", "--family", name, "--what", what, "--vocabulary=20", *sizes, "--json"]) == 0
            assert len(json.loads(capsys.readouterr().out)["rows"]) == 3

    def test_is_checked_by_the_doctor(self, capsys):
        assert main(["doctor", "--json"]) == 0
        found = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["what"].startswith("leaky")]
        assert {check["what"] for check in found} == {
            f"{name}, {what}" for name in ("leaky", "leaky-wide") for what in ("forward = step", "gradients")
        }
        assert all(check["passed"] for check in found)

    def test_keeps_the_contract(self):
        block = Leaky(d_model=6, dtype=F64)
        x = tokens(block, 2, 7)
        y, _ = block(x)
        check(VALUE[F64], {"y": in_steps(block, x, None)[0]}, {"y": y})
        mask_bs = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]]).bool()
        masked, _ = block(x, mask_bs=mask_bs)
        alone, _ = block(x[:1, [0, 1, 3, 4, 5, 6]])
        check(VALUE[F64], {"y": masked[:1, [0, 1, 3, 4, 5, 6]]}, {"y": alone})

    def test_names_are_taken_once(self):
        with pytest.raises(ValueError, match="LeakyCache, LeakyConfig, leaky-wide belongs to a family already"):
            register(replace(RECORD, name="another"))


class TestRecords:
    def test_every_name_on_the_command_line(self):
        assert list(presets()) == ["mamba1", "mamba2", "mamba3", "mamba3-mimo", "attention"]

    @pytest.mark.parametrize("name", CONFIGS)
    def test_the_family_of_configs_and_blocks(self, name):
        config = CONFIGS[name]
        family = family_of(config)
        assert name.startswith(family.name)
        assert family_of(make_block(name)) is family
        assert family_of(type("Mine", (type(config),), {"__slots__": ()}).from_dict(config.to_dict())) is family
        assert (family.config, family.block) == (type(config), MAKE[type(config)])

    def test_of_anything_else_it_says_what_is_expected(self):
        with pytest.raises(ValueError, match="block is a dict, expected one of Mamba1Config, Mamba2Config"):
            mk.StackConfig(block={}, n_layer=1)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", CONFIGS)
    def test_steps_are_told_in_the_words_of_the_kernels(self, name):
        block, family = make_block(name), family_of(CONFIGS[name])
        assert isinstance(family.step, FusedStep)
        _, struct = PARTS[family.name]
        fields = {**family.step.fields(block), **family.step.prepared(block)}
        carried = [*family.step.places.values(), *(["first", "slots"] if family.step.slots else [])]
        carried += ["notes"] if family.step.notes else []
        assert sorted(fields_of(struct())) == sorted([*fields, *family.step.projections, *carried])
        assert all(value is None or isinstance(value, Tensor | int | float | str) for value in fields.values())
        assert family.step.places.keys() >= block.cache_shapes(1).keys()

    @pytest.mark.parametrize("name", CONFIGS)
    def test_sizes_and_properties_are_there(self, name):
        block, family = make_block(name), family_of(CONFIGS[name])
        stored = block.state_dict()
        for tensor, axis, called in family.sizes.values():
            if tensor in stored:
                assert stored[tensor].shape[axis] == getattr(block.config, called)
        assert all(family.has(field) and hasattr(block.config, called) for field, called in family.resolved.items())


class TestShortForm:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_fields_as_keywords(self, name):
        config = CONFIGS[name]
        torch.manual_seed(0)
        want = MAKE[type(config)](config, dtype=F64).state_dict()
        given = {field: getattr(config, field) for field in type(config).__dataclass_fields__}
        torch.manual_seed(0)
        block = MAKE[type(config)](**given, dtype=F64)
        assert block.config == config
        assert all(torch.equal(tensor, want[key]) for key, tensor in block.state_dict().items())

    @pytest.mark.parametrize("block", [mk.Mamba1, mk.Mamba2, mk.Mamba3])
    def test_what_does_not_fit_is_named(self, block):
        config = block.__name__ + "Config"
        with pytest.raises(ValueError, match=rf"{config} has no field 'd_state' \(here: state_rank\)$"):
            block(d_model=8, d_state=4)
        with pytest.raises(ValueError, match=f"takes a {config}, or its fields as keywords, and got both: state_rank"):
            block(block.config_class(d_model=64), state_rank=4)
        with pytest.raises(ValueError, match=f"takes a {config}, or its fields as keywords, got int"):
            block(8)
        with pytest.raises(ValueError, match=f"takes a {config}, or its fields as keywords, got neither"):
            block()


class Doubled(nn.Module):
    """A parametrization that changes the values."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


def derived(block: Any) -> Any:
    mine = type("Mine", (type(block),), {})(block.config, dtype=block.out_proj.weight.dtype)
    mine.load_state_dict(block.state_dict())
    return mine


def parametrized(names: set[str]) -> Any:
    def change(block: Any) -> Any:
        block = copy.deepcopy(block)
        for name in names & dict(block.named_parameters()).keys():
            owner, _, leaf = name.rpartition(".")
            parametrize.register_parametrization(block.get_submodule(owner), leaf, Doubled())
        return block

    return change


WRAPPED = {
    "subclass": derived,
    "deepcopy": copy.deepcopy,
    "pickle": lambda block: pickle.loads(pickle.dumps(block)),
    "parametrized-projection": parametrized({"in_proj.weight", "out_proj.weight"}),
    "parametrized-parameters": parametrized({"A_log", "D", "conv1d.weight"}),
}


def in_steps(block: Any, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
    y = []
    for t in range(x.shape[1]):
        y_bd, cache = block.step(x[:, t], cache)
        y.append(y_bd)
    return torch.stack(y, 1), cache


def whole(block: Any, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
    return block(x, cache)


def plain_names(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by the parameters' own names: that of an original is half the gradient of what is doubled."""
    mended = {}
    for name, tensor in found.items():
        plain = name.replace("parametrizations.", "").removesuffix(".original")
        mended[plain] = tensor if plain == name else tensor / 2
    return mended


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("run", [whole, in_steps])
@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrapped_block_is_the_plain_one(name, how, run, dtype):
    block = make_block(name, dtype)
    wrapped = WRAPPED[how](block)
    x, cache = tokens(block, 2, 5), random_cache(block, 2)
    want, got = results(block, run, x, cache), plain_names(results(wrapped, run, x, cache))
    check(GRADIENT[dtype], got, want)
    with torch.no_grad():
        # Without gradients a step may be one fused kernel.
        y, after = run(wrapped, x, random_cache(wrapped, 2))
        y_plain, after_plain = run(block, x, cache)
    check(VALUE[dtype], {"y": y, **tensors_of(after)}, {"y": y_plain, **tensors_of(after_plain)})
    assert type(wrapped.fresh_cache(1)) is type(cache)
    with pytest.raises(ValueError, match=f"needs a {type(cache).__name__}, got tuple"):
        wrapped(x, tuple(cache))


@pytest.mark.parametrize("run", [whole, in_steps])
@pytest.mark.parametrize("name", FAMILIES)
def test_functional_calls(name, run):
    block = make_block(name)
    x, cache = tokens(block, 2, 5), random_cache(block, 2)
    names = [name for name, _ in block.named_parameters()]

    class Run(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return run(self.block, x, cache)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        y, after = torch.func.functional_call(Run(), {f"block.{n}": t for n, t in parameters.items()}, (x,))
        return y.square().sum() + sum(t.square().sum() for t in tensors_of(after).values())

    moved = {n: p.detach() + 0.1 for n, p in block.named_parameters()}
    leaves = {n: t.clone().requires_grad_() for n, t in moved.items()}
    got = dict(zip(names, torch.autograd.grad(loss(leaves), [leaves[n] for n in names]), strict=True))
    twin = copy.deepcopy(block)
    twin.load_state_dict(moved)
    y, after = run(twin, x, cache)
    total = y.square().sum() + sum(t.square().sum() for t in tensors_of(after).values())
    want = dict(zip(names, torch.autograd.grad(total, list(twin.parameters())), strict=True))
    check(GRADIENT[F64], got, want)


CONSTANT = ("A_log", "D", "in_proj.bias")
"""Parameters that do not decay."""


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "attention-window"])
def test_param_groups_of_parametrized_blocks(name):
    """Every parameter once, and decays as it would without."""
    block = make_block(name)
    constant = next(name for name in CONSTANT if name in dict(block.named_parameters()))
    owner, _, leaf = constant.rpartition(".")
    parametrize.register_parametrization(block.get_submodule(owner), leaf, Doubled())
    groups = block.param_groups(muon=True)
    found = [p for group in groups for p in group["params"]]
    assert sum(p.numel() for p in found) == sum(p.numel() for p in block.parameters())
    constant = [p for group in groups if group["weight_decay"] == 0 for p in group["params"]]
    original = next(p for n, p in block.named_parameters() if n.endswith("original"))
    assert any(p is original for p in constant)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forked")
def test_a_sharded_block_is_the_whole_one(tmp_path):
    """Two ranks, `fully_shard(block)`: what they find is compared there, see `shards` in forked_runs.py."""
    told = forked_runs("shards", tmp_path)
    for name in FAMILIES:
        assert f"{name}: forward, step, cache and gradients are those of the whole block" in told
    assert "init_states is a share of a parameter until the block runs" in told
    assert "generate takes whole models, and parameters of this one are shares" in told
