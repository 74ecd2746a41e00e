"""Two blocks side by side keep the contract of each: calls, steps, cuts, masks, resets, packing, caches, gradients."""

import copy
import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import mambakit as mk
from compare import check
from mambakit.blocks.family import from_dict, to_dict
from mambakit.blocks.moe import balance_loss
from mambakit.blocks.param_groups import param_groups

F64 = torch.float64
M1 = mk.Mamba1Config(d_model=8, state_rank=3)
M2 = mk.Mamba2Config(d_model=8, state_rank=4, per_head_dim=4, out_scale=0.7)
M3 = mk.Mamba3Config(d_model=8, state_rank=8, per_head_dim=4)
MLP = mk.MLPConfig(8, 12)
MOE = mk.MoEConfig(8, 6, 5, 2, "sigmoid", d_shared=4)
CONFIGS = {
    "mamba2 mamba1": mk.ParallelConfig(M2, M1),
    "scaled": mk.ParallelConfig(M1, M3, in_scale=1.5, out_scale=0.6),
    "mlp": mk.ParallelConfig(replace(M2, learnable_init_states=True), MLP),
    "nested": mk.ParallelConfig(mk.ParallelConfig(M1, MOE, in_scale=0.5), mk.ParallelConfig(M3, M2)),
    "stateless": mk.ParallelConfig(MLP, MOE),
}


def make(name: str) -> mk.Parallel:
    torch.manual_seed(0)
    block = mk.Parallel(CONFIGS[name], dtype=F64)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return block


@pytest.fixture(params=CONFIGS)
def block(request) -> mk.Parallel:
    return make(request.param)


def flat(cache, name: str = "cache") -> dict[str, Tensor]:
    """Tensors by name, angles as the directions they stand for."""
    if isinstance(cache, Tensor):
        is_angle = name.endswith("rotation") and cache.dim() == 3
        return {f"{name} cos": cache.cos(), f"{name} sin": cache.sin()} if is_angle else {name: cache}
    if not isinstance(cache, tuple):
        return {}
    labels = getattr(cache, "_fields", range(len(cache)))
    return {n: t for label, part in zip(labels, cache, strict=True) for n, t in flat(part, f"{name}.{label}").items()}


def tokens(rows: int, length: int, seed: int = 4) -> Tensor:
    return torch.randn(rows, length, 8, generator=torch.Generator().manual_seed(seed), dtype=F64)


def warm(block: mk.Parallel, rows: int):
    with torch.no_grad():
        return block(tokens(rows, 3, 9))[1]


def results(block: mk.Parallel, run, x: Tensor, cache) -> dict[str, Tensor]:
    """Outputs, cache and every gradient: of input, entering cache and parameters."""
    x = x.clone().requires_grad_()
    entering = mk.caches.clone(mk.caches.detach(cache))
    for tensor in raw(entering).values():
        tensor.requires_grad_()
    y, after = run(x, entering)
    out = {"y": y, **flat(after)}
    seeds = torch.Generator().manual_seed(5)
    loss = sum((t * torch.randn(t.shape, generator=seeds, dtype=F64)).sum() for t in out.values())
    inputs = {"x": x, **dict(block.named_parameters()), **raw(entering)}
    grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)  # type: ignore[arg-type]
    return out | {
        f"d {n}": torch.zeros_like(t) if g is None else g for (n, t), g in zip(inputs.items(), grads, strict=True)
    }


def raw(cache, name: str = "entering") -> dict[str, Tensor]:
    if isinstance(cache, Tensor):
        return {name: cache}
    parts = enumerate(cache) if isinstance(cache, tuple) else ()
    return {n: t for i, part in parts for n, t in raw(part, f"{name}.{i}").items()}


def test_is_the_sum(block):
    x, config = tokens(2, 5), block.config
    y, cache = block(x)
    a, b = block.a(config.in_scale * x), block.b(config.in_scale * x)
    check(1e-12, {"y": y, **flat(cache)}, {"y": config.out_scale * (a[0] + b[0]), **flat(mk.ParallelCache(a[1], b[1]))})


def test_any_cut(block):
    """One call, steps, and pieces: outputs, caches, gradients."""
    x, cache = tokens(2, 7), warm(block, 2)

    def steps(x, cache):
        y = []
        for t in range(7):
            y_bd, cache = block.step(x[:, t], cache)
            y.append(y_bd)
        return torch.stack(y, 1), cache

    def pieces(x, cache):
        y = []
        for part in x.split([3, 0, 4], 1):
            y_bsd, cache = block(part, cache)
            y.append(y_bsd)
        return torch.cat(y, 1), cache

    want = results(block, block, x, cache)
    check(1e-10, results(block, steps, x, cache), want)
    check(1e-10, results(block, pieces, x, cache), want)


def test_masks_resets_and_packing(block):
    x, cache, bounds = tokens(1, 9), warm(block, 3), [0, 4, 4, 9]

    def packed(x, cache):
        return block(x, cache, cu_seqlens=torch.tensor(bounds))

    def alone(x, cache):
        runs = [block(x[:, i:j], mk.caches.select(cache, [n])) for n, (i, j) in enumerate(pairwise(bounds))]
        return torch.cat([y for y, _ in runs], 1), mk.caches.concat([c for _, c in runs])

    check(1e-10, results(block, packed, x, cache), results(block, alone, x, cache))

    x, cache = tokens(3, 6), warm(block, 3)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()

    def masked(x, cache):
        return block(x, cache, mask_bs=mask)

    def deleted(x, cache):
        y, caches = torch.zeros_like(x), []
        for n in range(3):
            y_row, after = block(x[n : n + 1, mask[n]], mk.caches.select(cache, [n]))
            y = y.index_put((torch.full((int(mask[n].sum()),), n), mask[n].nonzero()[:, 0]), y_row[0])
            caches.append(after)
        return y, mk.caches.concat(caches)

    check(1e-10, results(block, masked, x, cache), results(block, deleted, x, cache))

    reset = torch.zeros(3, 6).bool()
    reset[0, 2] = reset[2, 0] = True

    def afresh(x, cache):
        head, after = block(x[:, :2], block.restarted(cache, torch.tensor([False, False, True])))
        tail, after = block(x[:, 2:], block.restarted(after, torch.tensor([True, False, False])))
        return torch.cat([head, tail], 1), after

    def resetting(x, cache):
        return block(x, cache, reset_bs=reset)

    want = results(block, afresh, x, cache)
    check(1e-10, results(block, resetting, x, cache), want)
    y, _ = block.step(x[:, 0], cache, reset_b=torch.tensor([False, False, True]))
    check(1e-10, {"y": y}, {"y": want["y"][:, 0]})


def test_caches(block, tmp_path):
    cache = warm(block, 3)
    mk.caches.save(cache, tmp_path / "cache")
    loaded = mk.caches.load(tmp_path / "cache")
    assert str(loaded) == str(cache)
    rows = [mk.caches.select(cache, [n]) for n in range(3)]
    check(0, flat(mk.caches.concat(rows)), flat(cache))
    check(0, flat(mk.caches.clone(cache)), flat(cache))
    assert {t.dtype for t in flat(mk.caches.to(cache, dtype=torch.float32)).values()} <= {torch.float32}
    history = mk.caches.History(2)
    history.push(cache)
    history.push(block.step(tokens(3, 1)[:, 0], cache)[1])
    check(0, flat(history.rollback(1)), flat(cache))
    check(0, flat(block.fresh_cache(2)), flat(block.restarted(mk.caches.select(cache, [0, 1]), torch.ones(2).bool())))


def test_what_it_refuses():
    block = make("mamba2 mamba1")
    x, cache = tokens(2, 3), warm(block, 2)
    with pytest.raises(ValueError, match="Parallel needs a ParallelCache, got Mamba2Cache"):
        block(x, cache.a)
    with pytest.raises(ValueError, match="Mamba2 needs a Mamba2Cache, got Mamba1Cache"):
        block(x, mk.ParallelCache(cache.b, cache.a))
    with pytest.raises(ValueError, match=r"cache\.conv_bvk has shape"):
        block(tokens(3, 3), cache)
    with pytest.raises(ValueError, match=r"cache\.conv_bvk has shape"):
        block.check_cache(cache, 3, x)
    with pytest.raises(ValueError, match="x_bsd is 5 wide"):
        block(x[..., :5])
    with pytest.raises(ValueError, match=r"a\.d_model = 8, but b\.d_model = 9"):
        mk.ParallelConfig(M1, mk.MLPConfig(9, 4))
    with pytest.raises(ValueError, match="b = None is of the wrong type, expected an object with the fields of"):
        mk.Parallel(a=M1)
    with pytest.raises(ValueError, match="block is a int, expected one of"):
        mk.ParallelConfig(3, M1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a\.family is 'mamba9'"):
        mk.ParallelConfig.from_dict({"a": {"family": "mamba9"}, "b": to_dict(M1)})


def test_configs_as_json(block):
    config = block.config
    assert from_dict(to_dict(config)) == config == mk.ParallelConfig.from_json(config.to_json())
    assert mk.Parallel(a=config.a, b=config.b).config == mk.ParallelConfig(config.a, config.b)
    assert config.d_model == 8


def test_parts_are_called_as_modules(block):
    """So that hooks and whatever wraps a block take part."""
    called = []
    for name in ("a", "b"):
        getattr(block, name).register_forward_hook(lambda *_, name=name: called.append(name))
    block(tokens(1, 2))
    block.step(tokens(1, 1)[:, 0])
    assert called == ["a", "b"] * 2


# Stacks of them.

LAYERS = ((M2, MLP), (MOE,), (mk.ParallelConfig(M2, M1),), (mk.ParallelConfig(MLP, MOE), M3))
MODEL = mk.ModelConfig(layers=LAYERS, vocab_size=20, residual_scale=0.8)


@pytest.fixture
def model() -> mk.LanguageModel:
    torch.manual_seed(0)
    return mk.LanguageModel(MODEL, dtype=F64)


IDS = torch.arange(24).reshape(2, 12) % 20


def test_stack_forward_is_steps(model):
    logits, after = model(IDS)
    cache, found = model.fresh_cache(2), []
    for t in range(12):
        step, cache = model.step(IDS[:, t], cache)
        found.append(step)
    check(1e-10, {"logits": torch.stack(found, 1), **flat(cache)}, {"logits": logits, **flat(after)})
    head, middle = model(IDS[:, :5])
    tail, cache = model(IDS[:, 5:], middle)
    check(1e-10, {"logits": torch.cat([head, tail], 1), **flat(cache)}, {"logits": logits, **flat(after)})


def test_stack_masked_and_packed(model):
    mask = torch.ones(2, 12).bool()
    mask[0, :3] = mask[1, 4:6] = False
    logits, cache = model(IDS, mask_bs=mask)
    for n in range(2):
        alone, after = model(IDS[n : n + 1, mask[n]])
        got = {"logits": logits[n : n + 1, mask[n]], **flat(mk.caches.select(cache, [n]))}
        check(1e-10, got, {"logits": alone, **flat(after)})
    packed, cache = model(IDS.reshape(1, 24), cu_seqlens=torch.tensor([0, 7, 24]))
    for n, part in enumerate(IDS.reshape(1, 24).split([7, 17], 1)):
        alone, after = model(part)
        got = {"logits": packed.split([7, 17], 1)[n], **flat(mk.caches.select(cache, [n]))}
        check(1e-10, got, {"logits": alone, **flat(after)})


def test_stack_trains(model):
    """Every parameter has a gradient, in any grouping, and the loss falls."""
    for muon in (False, True):
        groups = param_groups(model, muon=muon)
        assert sum(p.numel() for g in groups for p in g["params"]) == sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(param_groups(model), 3e-2)
    losses = []
    for _ in range(8):
        logits, _ = model(IDS[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + 0.01 * balance_loss(model)).backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_stack_is_copied_configured_and_generates(model, tmp_path):
    logits, cache = model(IDS)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check(0, {"logits": copied(IDS)[0]}, {"logits": logits})
    assert mk.ModelConfig.from_dict(MODEL.to_dict()) == MODEL == mk.ModelConfig.from_json(MODEL.to_json())
    mk.caches.save(cache, tmp_path / "cache")
    check(0, flat(mk.caches.load(tmp_path / "cache")), flat(cache))
    new = mk.generate(model, IDS, max_new_tokens=4, temperature=0)
    greedy = IDS
    for _ in range(4):
        greedy = torch.cat([greedy, model(greedy)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(new, greedy[:, 12:])
