"""`SsdPath(lean=...)`: outputs, caches and gradients are those of an ordinary call, in little memory."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from blocks import CONFIGS, make_block, results, tokens
from compare import check
from mambakit import LanguageModel, Mamba1, Mamba2, Mamba2Config, Mamba3, Mamba3Config, ModelConfig, SsdPath
from mambakit.blocks import lean_backward
from mambakit.blocks.lean_plan import plan
from mambakit.blocks.shares import expand_for
from mambakit.kernels.cpu.library import why_missing
from mambakit.tools.measure import peak_bytes

NAMES = [name for name in CONFIGS if name.startswith(("mamba2", "mamba3"))]
LEAST = SsdPath(lean=1e-9)
"""As little memory as there can be, or hardly more."""


def of(block, how: dict, path: SsdPath | None, batch: int, s: int = 70) -> dict[str, Tensor]:
    rows = len(how["cu_seqlens"]) - 1 if "cu_seqlens" in how else batch
    x, dtype = tokens(block, batch, s), block.in_proj.weight.dtype
    with torch.no_grad():
        _, cache = block(tokens(block, rows, 5, seed=3).to(dtype))
    return results(block, lambda block, x, cache: block(x, cache, path=path, **how), x.to(dtype), cache)


def ways() -> dict[str, dict]:
    make = torch.Generator().manual_seed(1)
    mask_bs, reset_bs = torch.rand(2, 70, generator=make) < 0.8, torch.rand(2, 70, generator=make) < 0.1
    return {
        "whole": {},
        "masked resets": {"mask_bs": mask_bs, "reset_bs": reset_bs},
        "packed": {"cu_seqlens": torch.tensor([0, 1, 3, 60, 70])},
    }


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("name", NAMES)
def test_a_lean_call_is_an_ordinary_one(name, way):
    block, how = make_block(name), ways()[way]
    batch = 1 if way == "packed" else 2
    check(1e-11, of(block, how, LEAST, batch), of(block, how, None, batch))


@pytest.fixture
def wide(monkeypatch):
    """The name of a config as wide as is asked for, with the same heads."""

    def make(name: str, d_model: int = 400) -> str:
        config = CONFIGS[name]
        inner = getattr(config, "inner_width", None) or config.d_inner
        monkeypatch.setitem(CONFIGS, "wide", replace(config, d_model=d_model, expand=expand_for(inner, d_model)))
        return "wide"

    return make


@pytest.mark.parametrize("d_model", [150, 400])
@pytest.mark.parametrize("name", NAMES)
def test_wider_than_there_are_tokens(name, d_model, wide, monkeypatch):
    """What is projected then has room in a gradient that comes later, and beside it what is projected out, or not."""
    block = make_block(wide(name, d_model))
    # Small blocks need no more than one step then, so take those that there were without that room.
    monkeypatch.setattr(lean_backward, "plan", lambda *call: plan(*call[:5], False, 0, 0))
    for way, how in ways().items():
        batch = 1 if way == "packed" else 2
        check(1e-11, of(block, how, LEAST, batch), of(block, how, None, batch))
    monkeypatch.undo()
    check(1e-11, of(block, {}, SsdPath(lean=1e9), 1), of(block, {}, None, 1))


@pytest.mark.parametrize("name", ["mamba2", "mamba2-groups", "mamba3-mimo"])
@pytest.mark.parametrize("lean", [1e-9, 0.3, 1.0, 1e9])
def test_any_share_of_memory(name, lean):
    """One row goes in pieces of tokens, several short ones together."""
    block = make_block(name)
    for batch, s in ((1, 150), (5, 9), (3, 1)):
        check(1e-11, of(block, {}, SsdPath(lean=lean), batch, s), of(block, {}, None, batch, s))


def test_plans_differ():
    """So that the claims above are about all there are."""
    config = Mamba2Config(d_model=64, per_head_dim=16, state_rank=16)
    found = {plan(config, False, 1, 300, True, False, room, 0) for room in (0, 30_000, 60_000, 100_000, 10**9)}
    assert {made.size for made in found} >= {1, 8}
    assert len({made.piece for made in found}) > 2


@pytest.mark.skipif(why_missing() is not None, reason="no kernels")
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["mamba2", "mamba3", "mamba3-quaternion"])
def test_bfloat16(name, autocast, is_wide, wide):
    """Against float64 with the same rounded parameters, in the mean of every tensor: hardly more error."""
    name = wide(name) if is_wide else name
    exact = make_block(name)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    want = {name: t.detach() for name, t in of(exact, {}, None, 2).items()}

    def errors(path: SsdPath | None) -> dict[str, float]:
        block = make_block(name).float() if autocast else make_block(name, torch.bfloat16)
        with torch.no_grad():
            for mine, theirs in zip(block.parameters(), exact.parameters(), strict=True):
                mine.copy_(theirs)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = of(block, {}, path, 2)
        return {n: float((got[n].detach().double() - want[n]).abs().mean() / want[n].abs().mean()) for n in want}

    ordinary, lean = errors(None), errors(LEAST)
    bad = {n: (lean[n], ordinary[n]) for n in lean if lean[n] > 2 * ordinary[n] + 0.02}
    assert not bad


def train(block, x: Tensor, path: SsdPath):
    def run() -> None:
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        block(leaf, path=path)[0].square().mean().backward()

    return run


@pytest.mark.skipif(why_missing() is not None, reason="no kernels")
@pytest.mark.parametrize(("block", "most"), [(Mamba2, 4), (Mamba3, 6), (partial(Mamba3, is_mimo=True), 24)])
def test_memory(block, most, monkeypatch):
    """Bytes of input, output and parameters' gradients, and a share more; an ordinary call takes about twice that."""
    steps, go_back = [], lean_backward.Rank.go_back
    counted = lambda rank, piece, *rest: steps.append(piece) or go_back(rank, piece, *rest)  # noqa: E731
    monkeypatch.setattr(lean_backward.Rank, "go_back", counted)
    made = block(d_model=384, state_rank=64, per_head_dim=32)
    x = torch.randn(1, 256, 384)
    needed = sum(p.nbytes for p in made.parameters()) + 2 * x.nbytes
    assert peak_bytes(train(made, x, SsdPath())) > 1.75 * needed
    assert peak_bytes(train(made, x, SsdPath(lean=0.5))) < 1.5 * needed
    steps.clear()
    assert peak_bytes(train(made, x, SsdPath(lean=0.2))) < 1.25 * needed
    assert len(steps) <= 2 * most, "in two calls"


def test_frozen_parameters_get_no_gradient(wide):
    block = make_block(wide("mamba2"))
    x = tokens(block, 1, 40)
    for name in ("out_proj", "in_proj"):
        getattr(block, name).weight.requires_grad_(False)
        found = []
        for path in (None, LEAST):
            block.zero_grad()
            block(x, path=path)[0].sum().backward()
            found.append({name: p.grad for name, p in block.named_parameters() if p.grad is not None})
        check(1e-11, found[1], found[0])
    block = make_block("mamba2")
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    block.A_log.requires_grad_()  # type: ignore[union-attr]
    x = tokens(block, 1, 40).requires_grad_()
    found = [torch.autograd.grad(block(x, path=path)[0].sum(), (x, block.A_log)) for path in (None, LEAST)]  # type: ignore[arg-type]
    check(1e-11, dict(enumerate(found[1])), dict(enumerate(found[0])))
    block(x.detach(), path=LEAST)[0].sum().backward()
    assert [name for name, p in block.named_parameters() if p.grad is not None] == ["A_log"]


def test_a_model():
    model = LanguageModel(
        ModelConfig(block=Mamba2Config(d_model=16, per_head_dim=8, state_rank=8), n_layer=2, vocab_size=9)
    )
    ids = torch.randint(9, (2, 40))
    found = []
    for path in (None, SsdPath(lean=0.2)):
        model.zero_grad()
        model(ids, path=path)[0].logsumexp(-1).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    check(1e-4, found[1], found[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, about its autograd functions
def test_compiled_calls_are_ordinary_ones():
    block = make_block("mamba2", torch.float32)
    x = tokens(block, 1, 40)
    got, _ = torch.compile(lambda x: block(x, path=LEAST), backend="eager")(x)
    check(1e-5, {"y": got}, {"y": block(x)[0]})


def test_what_cannot_be_lean_says_so():
    for wrong in (0, -1.0, True, "much", float("nan")):
        with pytest.raises(ValueError, match="lean is"):
            SsdPath(lean=wrong)  # type: ignore[arg-type]
    block = make_block("mamba2")
    x = tokens(block, 1, 40).requires_grad_()
    with pytest.raises(ValueError, match=r"torch.func's transforms"):
        torch.func.grad(lambda x: block(x, path=LEAST)[0].sum())(x)
    block.conv1d.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="cannot run this Mamba2: conv1d is wrapped or hooked; leave lean out"):
        block(x, path=LEAST)
    with torch.no_grad():
        block(x, path=LEAST)  # nothing is kept, so nothing to spare
    with pytest.raises(ValueError, match="Mamba-1 has one scan and takes no path"):
        Mamba1(d_model=8)(torch.randn(1, 5, 8), path=LEAST)

    class Own(Mamba3):
        pass

    own = Own(Mamba3Config(d_model=8, state_rank=8, per_head_dim=4))
    with pytest.raises(ValueError, match="it is a class of its own"):
        own(torch.randn(1, 5, 8), path=LEAST)


def test_a_backward_that_would_be_wrong_raises():
    block = make_block("mamba2")
    x = tokens(block, 1, 40).requires_grad_()
    y, _ = block(x, path=LEAST)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gone back through once"):
        y.sum().backward()
    y, _ = block(x, path=LEAST)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()
    y, _ = block(x, path=LEAST)
    (d_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        d_x.sum().backward()


def test_peak_does_not_count_what_was_there_before():
    """Memory of an earlier measurement is freed in the next."""
    kept: list[Tensor] = []

    def task() -> None:
        kept.clear()
        kept.append(torch.zeros(1_000_000))

    assert [peak_bytes(task) for _ in range(4)] == [4_000_000] * 4
