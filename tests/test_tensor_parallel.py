"""Heads and vocabulary divided among ranks: outputs, caches, losses and gradients are those of one rank."""

import copy
import functools
import itertools
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mambakit as mk
from mambakit.blocks.moe import balance_loss
from ranks import LENGTH, TIGHT, close, leaves, on_ranks, options, positions, random, seeded

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")

D = 8

MAMBA1 = mk.Mamba1Config(d_model=D, state_rank=3, dt_b_c_norm=True, bias=True)
SMALL2 = {"d_model": D, "state_rank": 4, "per_head_dim": 4}
GROUPS4 = mk.Mamba2Config(**SMALL2, ngroups=4, bias=True, norm_before_gate=True)
GROUPS2 = mk.Mamba2Config(**SMALL2, ngroups=2, D_has_hdim=True, learnable_init_states=True)
ONE_GROUP = mk.Mamba2Config(**SMALL2, ssm_multipliers=(1.0, 2.0, 0.5, 1.0, 1.5), in_scale=0.5, out_scale=2.0)
WITH_MLP = mk.Mamba2Config(**SMALL2, expand=3, d_ssm=16, norm_group_size=2)
# Heads of three groups on two ranks: one and a half each. Norms over all channels of two groups.
ODD = mk.Mamba2Config(d_model=D, d_inner=48, state_rank=4, per_head_dim=4, ngroups=3, norm_group_size=16)
SMALL3 = {"d_model": D, "state_rank": 8, "per_head_dim": 4}
MAMBA3 = mk.Mamba3Config(**SMALL3, ngroups=4)
MIMO = mk.Mamba3Config(**SMALL3, ngroups=2, is_mimo=True, mimo_rank=2, rope_fraction=1.0, is_outproj_norm=True)
QUATERNION = mk.Mamba3Config(**SMALL3, rotation="quaternion", learnable_init_states=True)
STILL = mk.Mamba3Config(**SMALL3, rope_fraction=0.0)
ATTENTION = mk.AttentionConfig(D, n_heads=4, n_kv_heads=2, bias=True)
WINDOW = mk.AttentionConfig(D, n_heads=4, rope_theta=100.0, head_dim=4, window=3)
MLP, PLAIN_MLP = mk.MLPConfig(D, 8, bias=True), mk.MLPConfig(D, 12, gated=False)
MOE = mk.MoEConfig(D, 8, n_experts=4, top_k=2, d_shared=8, d_latent=6, bias=True)
SIGMOID = mk.MoEConfig(D, 4, n_experts=4, top_k=2, router="sigmoid", groups=2, top_groups=1)

STACKS = {
    "mamba1": {"block": MAMBA1, "n_layer": 2},
    "mamba2, 4 groups": {"block": GROUPS4, "n_layer": 2},
    "mamba2, 2 groups": {"block": GROUPS2, "n_layer": 2},
    "mamba2, one group": {"block": ONE_GROUP, "n_layer": 2},
    "mamba2 with mlp": {"block": WITH_MLP, "n_layer": 1},
    "mamba2, 3 groups": {"block": ODD, "n_layer": 1},
    "mamba3": {"block": MAMBA3, "n_layer": 2},
    "mamba3 double": {"block": MAMBA3, "n_layer": 2},
    "mimo": {"block": MIMO, "n_layer": 2},
    "mimo double": {"block": MIMO, "n_layer": 1},
    "quaternion": {"block": QUATERNION, "n_layer": 2},
    "no rotation": {"block": STILL, "n_layer": 1},
    "attention": {"block": ATTENTION, "n_layer": 2},
    "window": {"block": WINDOW, "n_layer": 2},
    "hybrid": {
        "layers": ((GROUPS2, MLP), (ATTENTION, MOE), (mk.ParallelConfig(MAMBA3, WINDOW), PLAIN_MLP), (MAMBA1, SIGMOID))
    },
}


def made(name, dtype=torch.float64):
    torch.manual_seed(0)
    stack = mk.Stack(mk.StackConfig(**STACKS[name]), dtype=dtype)
    with torch.no_grad():
        for i, parameter in enumerate(stack.parameters()):
            parameter += 0.3 * random(*parameter.shape, key=(i, 7), dtype=parameter.dtype)
    return stack


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model):
    """Whole, by the names of a model that is not divided."""
    return mk.parallel.joined(model, {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None})


def check_gradients(what, got, wanted, tolerance=TIGHT):
    found = gradients(got)
    expected = {n: p.grad for n, p in wanted.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys(), what
    for name, grad in expected.items():
        close(f"{what}: gradient of {name}", found[name], grad, tolerance)


def start(stack, name, rows):
    """A fresh cache of the pathway that the name says, where it says one."""
    return tuple(part.with_pathway("double") for part in stack.fresh_cache(rows)) if "double" in name else None


def run_twice(stack, name, kind, dtype):
    """The second time with the cache of the first, and gradients through both calls: of the input, outputs, cache."""
    batch, given = (1 if "packed" in kind else 2), options(kind)
    rows = len(given["cu_seqlens"]) - 1 if "packed" in kind else batch
    x, weight = (random(batch, LENGTH, D, key=(key,), dtype=dtype) for key in (1, 2))
    y, carried = stack(x.requires_grad_(), start(stack, name, rows), **given)
    y, carried = stack(y, carried, **given)
    (y * weight).sum().backward()
    return x.grad, y.detach(), carried


@functools.cache
def expected(name, kind, dtype=torch.float64):
    """A stack with its gradients, and what one rank gives."""
    stack = made(name, dtype)
    return stack, *run_twice(stack, name, kind, dtype)


def compare(name, kind, mesh, *, dtype=torch.float64, tolerance=TIGHT, change=lambda stack: None):
    what = f"{name}, {kind or 'plain'}"
    whole, d_x, y, carried = expected(name, kind, dtype)
    split = mk.parallel.tensor_parallel(made(name, dtype), mesh)
    change(split)
    d_x_own, y_own, own = run_twice(split, name, kind, dtype)
    close(f"{what}: outputs", y_own, y, tolerance)
    close(f"{what}: gradient of x", d_x_own, d_x, tolerance)
    joined, cut = mk.parallel.whole_cache(split, own), mk.parallel.share_of_cache(split, carried)
    for i, (got, one) in enumerate(zip(leaves([joined, cut]), leaves([carried, own]), strict=True)):
        close(f"{what}: cache {i}", got, one, tolerance)
    for got, one in zip(positions(own), positions(carried), strict=True):
        assert got.tolist() == one.tolist(), what
    check_gradients(what, split, whole, tolerance)


def cases(ranks):
    kinds = itertools.cycle(("", "reset", "mask", "mask and reset", "packed", "packed with mask and reset"))
    for name in STACKS:
        if name == "mamba2, 3 groups" and ranks == 4:
            continue
        for _ in range(2):
            yield name, next(kinds)


def before(ranks):
    """What one rank gives is computed once, and not by every rank."""
    for name, kind in cases(ranks):
        expected(name, kind)


def every_family(mesh):
    for name, kind in cases(mesh.size()):
        compare(name, kind, mesh)


def one_sum_for_two(mesh):
    """Blocks side by side add up what they have before the ranks do: in either pass one sum more than one block has."""
    counted, inner = [], dist.all_reduce

    def count(tensor, *args, **named):
        counted.append(tensor.numel())
        return inner(tensor, *args, **named)

    x = random(2, LENGTH, D, key=(1,)).requires_grad_()
    side_by_side = mk.ParallelConfig(PLAIN_MLP, mk.ParallelConfig(PLAIN_MLP, PLAIN_MLP, out_scale=3.0), in_scale=2.0)
    for config in (PLAIN_MLP, side_by_side):
        torch.manual_seed(0)
        whole = mk.Layer(config, dtype=torch.float64)
        split = mk.parallel.tensor_parallel(copy.deepcopy(whole), mesh)
        wanted, _ = whole(x)
        dist.all_reduce = count
        try:
            y, _ = split(x)
            y.square().sum().backward()
        finally:
            dist.all_reduce = inner
        close("outputs", y, wanted)
        wanted.square().sum().backward()
        check_gradients("side by side", split, whole)
        assert counted == [x.numel()] * 2, counted
        counted.clear()


def other_stacks(mesh):
    """Two directions, weights used twice, learned rows: what is around blocks does not know that they are divided."""
    for make in (
        lambda: mk.BidirectionalStack(mk.BidirectionalConfig(block=ONE_GROUP, n_layer=2), dtype=torch.float64),
        lambda: mk.Stack(mk.StackConfig(block=MAMBA3, n_layer=2, virtual=mk.Cyclic(4)), dtype=torch.float64),
        lambda: mk.Stack(mk.StackConfig(block=MAMBA1, n_layer=2, stack_latents=(0,)), dtype=torch.float64),
    ):
        torch.manual_seed(1)
        whole = make()
        split = mk.parallel.tensor_parallel(copy.deepcopy(whole), mesh)
        x = random(2, LENGTH, D, key=(1,))
        outputs = [stack(x)[0] for stack in (whole, split)]
        close("outputs", outputs[1], outputs[0])
        for y in outputs:
            (y * random(*y.shape, key=(2,))).sum().backward()
        check_gradients("another stack", split, whole)


def words(tied=True, dtype=torch.float64, **fields):
    """A hybrid language model, some of whose vocabulary is padding."""
    torch.manual_seed(3)
    layers = ((MAMBA3, MOE), (ATTENTION, MLP), (ONE_GROUP,))
    config = mk.ModelConfig(layers=layers, vocab_size=11, tie_embeddings=tied, logits_scale=2.0, **fields)
    return mk.LanguageModel(config, dtype=dtype)


def of_tokens(mesh):
    """Embedding, head and losses; the balance of experts counts once."""
    ids = torch.randint(11, (2, LENGTH + 1), generator=seeded(4))
    wanted = ids[:, 1:].clone()
    wanted[0, :3] = -100
    for tied in (True, False):
        whole = words(tied)
        split = mk.parallel.tensor_parallel(copy.deepcopy(whole), mesh)
        found = []
        for model in (whole, split):
            loss_bs, _ = mk.parallel.token_losses(model, ids[:, :-1], wanted)
            total = loss_bs.sum() + 3 * balance_loss(model)
            total.backward()
            found.append((loss_bs, total))
        for got, one in zip(found[1], found[0], strict=True):
            close("loss", got, one)
        check_gradients("words", split, whole)
        logits_bsw, _ = whole(ids)
        close("losses", found[0][0], F.cross_entropy(logits_bsw[:, :-1].mT, wanted, reduction="none"))
        # Logits of all words for whoever asks, with gradients.
        for model in (whole, split):
            model.zero_grad()
            logits, _ = model(ids)
            close("logits", logits, logits_bsw)
            (logits * random(*logits.shape, key=(5,))).sum().backward()
        check_gradients("logits", split, whole)
        with torch.no_grad():
            cache_own, cache = None, None
            for token in ids.T:
                got, cache_own = split.step(token, cache_own)
                one, cache = whole.step(token, cache)
            close("steps", got, one)
        with pytest.raises(ValueError, match="the ids go from 0 to 99, but the vocabulary is 0 to 10"):
            split(torch.tensor([[0, 99]]))
        assert len({id(p) for p in (split.lm_head.weight, split.backbone.embedding.weight)}) == (1 if tied else 2)


def computed_again(mesh):
    def checkpointed(stack):
        stack.checkpoint_layers = True

    compare("hybrid", "reset", mesh, change=checkpointed)


def in_single_precision(mesh):
    for name, kind in (("mamba1", "mask"), ("mamba2, one group", "reset"), ("mimo", "packed"), ("window", "reset")):
        compare(name, kind, mesh, dtype=torch.float32, tolerance=1e-5)


def with_others(mesh):
    """Beside ranks with other shares of the sequences, and ranks with other rows and shares of the parameters."""
    ids = torch.randint(11, (4, LENGTH), generator=seeded(4))
    for context, sharded in ((1, False), (1, True), (2, False), (2, True)):
        tensor = 2 if mesh.size() == 4 else 1 if context == 2 else 2
        data = mesh.size() // (tensor * context)
        if data * context == 1 and sharded:
            continue
        names = ("data", "context", "tensor")
        all_ranks = init_device_mesh("cpu", (data, context, tensor), mesh_dim_names=names)
        what = f"data {data}, context {context}, tensor {tensor}, {'fsdp' if sharded else 'plain'}"
        whole = words(tied=sharded)
        split = mk.parallel.tensor_parallel(copy.deepcopy(whole), all_ranks["tensor"])
        if sharded:
            rest = all_ranks["data", "context"]._flatten()
            for layer in split.backbone.layers:
                fully_shard(layer, mesh=rest)
            fully_shard(split, mesh=rest)
        if context > 1:
            mk.parallel.context_parallel(split, all_ranks["context"])
        replica, place = all_ranks.get_coordinate()[:2]
        own = ids.chunk(data)[replica] if sharded else ids
        own = own.tensor_split(context, 1)[place]
        loss_bs, _ = mk.parallel.token_losses(split, own, own.flip(0))
        loss_bs.sum().backward()
        wanted = whole_losses(whole, ids, data if sharded else 1)
        wanted_own = (wanted.chunk(data)[replica] if sharded else wanted).tensor_split(context, 1)[place]
        close(f"{what}: losses", loss_bs, wanted_own)
        if sharded:
            # FSDP2 averages.
            for parameter in whole.parameters():
                parameter.grad /= data * context
        check_gradients(what, split, whole)
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        close(f"{what}: norm", norm.new_tensor(mk.parallel.clip_gradients(split, 0.1)), norm)
        check_gradients(what, split, whole, 1e-5)


def whole_losses(model, ids, data):
    loss_bs = torch.cat([mk.parallel.token_losses(model, own, own.flip(0))[0] for own in ids.chunk(data)])
    loss_bs.sum().backward()
    return loss_bs


def for_optimizers(mesh):
    """Every parameter is in the group that it is in before it is divided; a step there is a step of one rank."""
    whole = words()
    split = mk.parallel.tensor_parallel(copy.deepcopy(whole), mesh)
    for muon in (False, True):
        found = {}
        for model in (whole, split):
            groups = mk.param_groups(model, muon=muon)
            names = {p: n for n, p in model.named_parameters()}
            for group in groups:
                for parameter in group["params"]:
                    what = group["optimizer"], group["weight_decay"]
                    count = found.setdefault((model is split, *what), [0, 0])
                    count[0] += parameter.numel()
                    count[1] += 1 if muon and group["optimizer"] == "muon" else 0
            assert model is whole or sum(len(group["params"]) for group in groups) == len(names)
        assert {key[1:]: n for key, n in found.items() if key[0]} == {
            key[1:]: n for key, n in found.items() if not key[0]
        }
    mk.param_groups(whole)
    ids = torch.randint(11, (2, LENGTH), generator=seeded(4))
    for model in (whole, split):
        optimizer = torch.optim.AdamW(mk.param_groups(model), lr=0.01)
        mk.parallel.token_losses(model, ids, ids)[0].sum().backward()
        optimizer.step()
    stepped = mk.parallel.joined(split, {n: full(p.detach()) for n, p in split.named_parameters()})
    for name, parameter in whole.named_parameters():
        # AdamW divides by roots of gradients, of which some are next to nothing.
        close(name, stepped[name], parameter, 1e-7)
    back = mk.parallel.parted(split, stepped)
    assert back.keys() == dict(split.named_parameters()).keys()


def refusals(mesh):
    split, ranks = mk.parallel.tensor_parallel(made("mamba1"), mesh), mesh.size()
    with pytest.raises(ValueError, match="tensor parallel already"):
        mk.parallel.tensor_parallel(split, mesh)
    with pytest.raises(ValueError, match="no block"):
        mk.parallel.tensor_parallel(torch.nn.Linear(2, 2), mesh)
    for config, told in (
        (mk.Mamba1Config(d_model=3, expand=1), "d_inner = 3 in Mamba1Config"),
        (mk.Mamba2Config(d_model=D, d_inner=12, per_head_dim=4), "nheads = 3 in Mamba2Config"),
        (mk.Mamba2Config(d_model=D, d_inner=19, d_ssm=16, per_head_dim=4), "d_inner - d_ssm = 3 in Mamba2Config"),
        (mk.Mamba3Config(d_model=6, per_head_dim=4), "nheads = 3 in Mamba3Config"),
        (mk.AttentionConfig(6, n_heads=3), "n_heads = 3 in AttentionConfig"),
        (mk.MLPConfig(D, 7), "d_hidden = 7 in MLPConfig"),
        (mk.MoEConfig(D, 8, n_experts=2, top_k=1, d_shared=9), "d_shared = 9 in MoEConfig"),
    ):
        block = mk.Layer(config)
        with pytest.raises(ValueError, match=f"{told} cannot be divided among {ranks} tensor-parallel ranks; take 1, "):
            mk.parallel.tensor_parallel(block, mesh)
        assert not any(isinstance(parameter, DTensor) for parameter in block.parameters())
    with pytest.raises(ValueError, match=r"11 rows of the vocabulary .* make pad_vocab_size_multiple a multiple of"):
        mk.parallel.tensor_parallel(words(pad_vocab_size_multiple=1), mesh)
    hooked = made("mamba1")
    hooked.layers[0].mixer.in_proj.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="in_proj of a Mamba1 is a Linear, or hooks are on it"):
        mk.parallel.tensor_parallel(hooked, mesh)
    divided = mk.parallel.tensor_parallel(words(), mesh)
    for take in (
        lambda: mk.quantize(divided),
        lambda: mk.save_model(divided, "x"),
        lambda: mk.generate(divided, torch.ones(1, 1, dtype=torch.int64), max_new_tokens=1),
    ):
        with pytest.raises(ValueError, match="takes whole models, and parameters of this one are shares"):
            take()
    ids = torch.randint(11, (2, LENGTH), generator=seeded(4))
    close("a copy", copy.deepcopy(divided)(ids)[0], divided(ids)[0])
    with pytest.raises(ValueError, match="expected a DeviceMesh"):
        mk.parallel.tensor_parallel(made("mamba1"), None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(ranks, tmp_path):
    on_ranks(
        ranks,
        tmp_path,
        every_family,
        one_sum_for_two,
        other_stacks,
        of_tokens,
        computed_again,
        in_single_precision,
        with_others,
        for_optimizers,
        refusals,
    )
