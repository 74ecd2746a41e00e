"""Sequences split over ranks: outputs, caches and gradients are those of one rank."""

import copy
import functools
import itertools
import math
import os
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import mambakit as mk
from mambakit.blocks.moe import balance_loss
from mambakit.compat.auto import MambakitForCausalLM
from mambakit.ops.boundary import Boundary, next_labels
from ranks import LENGTH, TIGHT, close, leaves, loss_of, on_ranks, options, positions, random, seeded

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")

D = 8

MAMBA1 = mk.Mamba1Config(d_model=D, state_rank=3, dt_b_c_norm=True)
MAMBA2 = mk.Mamba2Config(d_model=D, state_rank=4, per_head_dim=4, ngroups=2)
LEARNED2 = mk.Mamba2Config(d_model=D, state_rank=4, per_head_dim=4, learnable_init_states=True, conv_kernel=3)
SMALL3 = {"d_model": D, "state_rank": 8, "per_head_dim": 4}
MAMBA3 = mk.Mamba3Config(**SMALL3)
MIMO = mk.Mamba3Config(**SMALL3, is_mimo=True, mimo_rank=2, rope_fraction=1.0, is_outproj_norm=True)
QUATERNION = mk.Mamba3Config(**SMALL3, rotation="quaternion", learnable_init_states=True)
STILL = mk.Mamba3Config(**SMALL3, rope_fraction=0.0, learnable_init_states=True)
ATTENTION = mk.AttentionConfig(D, n_heads=4, n_kv_heads=2)
ROPE = mk.AttentionConfig(D, n_heads=2, rope_theta=100.0)
WINDOW = mk.AttentionConfig(D, n_heads=2, rope_theta=100.0, window=3)
MLP, MOE = mk.MLPConfig(D, 8), mk.MoEConfig(D, 8, n_experts=4, top_k=2)

STACKS = {
    "mamba1": {"block": MAMBA1, "n_layer": 2},
    "mamba2": {"block": MAMBA2, "n_layer": 2},
    "mamba2 learned": {"block": LEARNED2, "n_layer": 2},
    "mamba3": {"block": MAMBA3, "n_layer": 2},
    "mamba3 double": {"block": MAMBA3, "n_layer": 2},
    "mimo": {"block": MIMO, "n_layer": 2},
    "mimo double": {"block": MIMO, "n_layer": 1},
    "quaternion": {"block": QUATERNION, "n_layer": 2},
    "quaternion double": {"block": mk.Mamba3Config(**SMALL3, rotation="quaternion"), "n_layer": 1},
    "no rotation": {"block": STILL, "n_layer": 2},
    "attention": {"block": ATTENTION, "n_layer": 1},
    "rope": {"block": ROPE, "n_layer": 2},
    "window": {"block": WINDOW, "n_layer": 2},
    "hybrid": {"layers": ((MAMBA2, MLP), (ROPE, MOE), (mk.ParallelConfig(MAMBA3, WINDOW),), (MAMBA1,))},
}
SHARES = {2: ((6, 7), (0, 13), (12, 1), (13, 0)), 4: ((3, 3, 3, 4), (0, 6, 1, 6), (2, 0, 0, 11), (1, 1, 10, 1))}


def made(name, dtype=torch.float64):
    torch.manual_seed(0)
    stack = mk.Stack(mk.StackConfig(**STACKS[name]), dtype=dtype)
    with torch.no_grad():
        for i, parameter in enumerate(stack.parameters()):
            parameter += 0.3 * random(*parameter.shape, key=(i, 7), dtype=parameter.dtype)
    return stack


def cut(tensor, lengths, rank):
    start = sum(lengths[:rank])
    return tensor[:, start : start + lengths[rank]]


def pathway(stack, name, batch):
    """A fresh cache of the pathway that the name says, where it says one."""
    return tuple(part.with_pathway("double") for part in stack.fresh_cache(batch)) if "double" in name else None


class Expected(NamedTuple):
    """Of one rank."""

    stack: mk.Stack
    """With its gradients."""
    x: Tensor
    z: Tensor
    cache: Any


@functools.cache
def expected(name, kind, dtype=torch.float64):
    """A stack called twice, the second time with the cache of the first, and gradients through both calls."""
    stack = made(name, dtype)
    x, _, given, rows = inputs(kind, dtype)
    y, carried = stack(x.requires_grad_(), pathway(stack, name, rows), **given)
    z, carried = stack(y, carried, **given)
    loss_of(z, carried, inputs(kind, dtype)[1]).backward()
    return Expected(stack, x, z.detach(), carried)


def inputs(kind, dtype):
    batch, given = (1 if "packed" in kind else 2), options(kind)
    rows = len(given["cu_seqlens"]) - 1 if "packed" in kind else batch
    x, weight = (random(batch, LENGTH, D, key=(key,), dtype=dtype) for key in (1, 2))
    return x, weight, given, rows


def compare(name, kind, lengths, mesh, *, dtype=torch.float64, tolerance=TIGHT, change=lambda stack: None):
    """The same on this rank's share."""
    what, rank = f"{name}, {kind or 'plain'}, {lengths}", mesh.get_local_rank()
    whole, x, z, cache = expected(name, kind, dtype)
    shared = mk.parallel.context_parallel(made(name, dtype), mesh)
    change(shared)
    _, weight, given, rows = inputs(kind, dtype)
    own = {n: flag if n == "cu_seqlens" else cut(flag, lengths, rank) for n, flag in given.items()}
    mine = cut(x.detach(), lengths, rank).clone().requires_grad_()
    y_own, cache_own = shared(mine, pathway(shared, name, rows), **own)
    z_own, cache_own = shared(y_own, cache_own, **own)
    loss_of(z_own, cache_own, cut(weight, lengths, rank), 1 / mesh.size()).backward()
    close(f"{what}: outputs", z_own, cut(z, lengths, rank), tolerance)
    for i, (got, wanted) in enumerate(zip(leaves(cache_own), leaves(cache), strict=True)):
        close(f"{what}: cache {i}", got, wanted, tolerance)
    for got, wanted in zip(positions(cache_own), positions(cache), strict=True):
        assert got.tolist() == wanted.tolist(), what
    close(f"{what}: gradient of x", mine.grad, cut(x.grad, lengths, rank), tolerance)
    for (n, got), (_, wanted) in zip(shared.named_parameters(), whole.named_parameters(), strict=True):
        close(f"{what}: gradient of {n}", got.grad, wanted.grad, tolerance)
    assert not torch.isnan(z_own).any()


def cases(ranks):
    """Over the stacks, every kind of call with all of the shares."""
    kinds = itertools.cycle(("", "reset", "mask", "mask and reset", "packed", "packed with mask and reset"))
    shares = itertools.cycle(SHARES[ranks])
    for name in STACKS:
        for _ in range(8 // ranks):
            yield name, next(kinds), next(shares)
        next(kinds)


def before(ranks):
    """What one rank gives is computed once, and not by every rank."""
    for name, kind, _ in cases(ranks):
        expected(name, kind)


def every_family(mesh):
    for name, kind, shares in cases(mesh.size()):
        compare(name, kind, shares, mesh)


def in_single_precision(mesh):
    for name, kind in (("mamba1", "mask and reset"), ("mamba2", "reset"), ("mimo", "packed"), ("window", "reset")):
        compare(name, kind, SHARES[mesh.size()][0], mesh, dtype=torch.float32, tolerance=1e-5)


def results(stack, kind, lengths, rank, share=1.0):
    """Of a rank's share of the tokens: outputs, gradients of the input, then of parameters."""
    dtype = next(stack.parameters()).dtype
    given = {n: cut(flag, lengths, rank) for n, flag in options(kind).items()}
    whole = (random(2, LENGTH, D, key=(key,), dtype=torch.float32).to(dtype) for key in (1, 2))
    x, weight = (cut(tensor, lengths, rank).clone() for tensor in whole)
    y, cache = stack(x.requires_grad_(), None, **given)
    y, cache = stack(y, cache, **given)
    loss_of(y, cache, weight, share).backward()
    return [y.detach(), x.grad, *(p.grad for p in stack.parameters())]


def no_worse_than_rounding(mesh):
    """A deep hybrid loses digits in float32 on one rank too: where it does, ranks may lose three times as much."""
    lengths, rank = SHARES[mesh.size()][0], mesh.get_local_rank()
    for kind in ("", "reset", "mask"):
        single = made("hybrid").float()
        exact = copy.deepcopy(single).double()
        shared = mk.parallel.context_parallel(copy.deepcopy(single), mesh)
        wanted, one = (results(stack, kind, (LENGTH,), 0) for stack in (exact, single))
        got = results(shared, kind, lengths, rank, 1 / mesh.size())
        for i, (a, b, c) in enumerate(zip(got, one, wanted, strict=True)):
            b, c = (cut(t, lengths, rank) if i < 2 else t for t in (b, c))
            off, rounding = (float((t - c).abs().max() / c.abs().max().clamp(min=1e-3)) for t in (a, b))
            assert off <= max(1e-5, 3 * rounding), f"{kind} {i}: off by {off:.1e}, rounding by {rounding:.1e}"


def computed_again(mesh):
    """Layers that the backward pass computes again send again, in the same order on all ranks."""

    def checkpointed(stack):
        stack.checkpoint_layers = True

    compare("hybrid", "reset", SHARES[mesh.size()][1], mesh, change=checkpointed)


def accumulated(mesh):
    """Gradients of two backward passes add up, each summed over the ranks once; frozen parameters have none."""
    whole = made("mamba2")
    whole.layers[0].mixer.D.requires_grad_(False)
    shared = mk.parallel.context_parallel(copy.deepcopy(whole), mesh)
    for seed in range(2):
        x = random(2, 8, D, key=(seed, 5))
        whole(x)[0].square().sum().backward()
        shared(x.chunk(mesh.size(), 1)[mesh.get_local_rank()])[0].square().sum().backward()
    for (n, got), (_, wanted) in zip(shared.named_parameters(), whole.named_parameters(), strict=True):
        if wanted.requires_grad:
            close(n, got.grad, wanted.grad)
    assert shared.layers[0].mixer.D.grad is None
    assert all(type(parameter) is torch.nn.Parameter for parameter in shared.parameters())


def of_tokens(mesh):
    """A language model with tied embeddings; experts are balanced over all ranks' tokens."""
    torch.manual_seed(3)
    config = mk.ModelConfig(layers=((MAMBA3, MOE), (ATTENTION, MLP)), vocab_size=11)
    whole = mk.LanguageModel(config, dtype=torch.float64)
    shared = mk.parallel.context_parallel(copy.deepcopy(whole), mesh)
    rank, lengths = mesh.get_local_rank(), SHARES[mesh.size()][0]
    ids = torch.randint(11, (2, LENGTH + 1), generator=seeded(4))

    def loss(model, inputs, targets, share):
        logits_bsw, _ = model(inputs)
        return F.cross_entropy(logits_bsw.mT, targets, reduction="sum") + share * balance_loss(model)

    wanted = loss(whole, ids[:, :-1], ids[:, 1:], 1.0)
    got = loss(shared, cut(ids[:, :-1], lengths, rank), cut(ids[:, 1:], lengths, rank), 1 / mesh.size())
    wanted.backward()
    got.backward()
    total = got.detach().clone()
    dist.all_reduce(total)
    close("loss", total, wanted.detach())
    for (n, own), (_, one) in zip(shared.named_parameters(), whole.named_parameters(), strict=True):
        close(n, own.grad, one.grad)
    with torch.no_grad(), mk.parallel.whole_sequences():
        close("on each rank by itself", shared(ids)[0], whole(ids)[0])
        close("a step", copy.deepcopy(shared).step(ids[:, 0])[0], whole.step(ids[:, 0])[0])
        greedy = {"max_new_tokens": 5, "temperature": 0}
        assert mk.generate(shared, ids, **greedy).tolist() == mk.generate(whole, ids, **greedy).tolist()
    with torch.no_grad():
        close("without gradients", shared(cut(ids, lengths, rank))[0], cut(whole(ids[:, :-1])[0], lengths, rank))


def labels_of_next(mesh):
    """The label of the next token may be another rank's, beyond ranks that have none."""
    labels = torch.randint(11, (2, LENGTH), generator=seeded(6))
    labels[0, 5] = -100
    wanted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    for lengths in SHARES[mesh.size()]:
        own = cut(labels, lengths, mesh.get_local_rank())
        got, count = next_labels(Boundary(mesh.get_group()), own, ignored=-100)
        assert got.tolist() == cut(wanted, lengths, mesh.get_local_rank()).tolist()
        assert int(count) == int((wanted != -100).sum())


def labels_of_transformers(mesh):
    """Through the wrapper: the ranks' losses add up to that of the whole sequence, and so do gradients.

    To the digits of float32, in which transformers computes losses.
    """
    torch.manual_seed(3)
    model = mk.LanguageModel(mk.ModelConfig(block=MAMBA3, n_layer=1, vocab_size=11), dtype=torch.float64)
    whole = MambakitForCausalLM.wrap(model)
    ids, labels = (torch.randint(11, (2, LENGTH), generator=seeded(key)) for key in (4, 6))
    labels[0, 5] = -100
    wanted = whole(ids, labels=labels).loss
    plain = F.cross_entropy(whole(ids).logits[:, :-1].mT, labels[:, 1:])
    close("one rank", wanted, plain, 1e-6)
    wanted.backward()
    for lengths in SHARES[mesh.size()]:
        shared = mk.parallel.context_parallel(copy.deepcopy(whole), mesh)
        shared.zero_grad()
        own, its = (cut(tensor, lengths, mesh.get_local_rank()) for tensor in (ids, labels))
        loss = shared(own, labels=its).loss
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        close(f"{lengths}: loss", total, wanted, 1e-6)
        for (n, got), (_, one) in zip(shared.named_parameters(), whole.named_parameters(), strict=True):
            close(f"{lengths}: {n}", got.grad, one.grad, 1e-5)
    shared = copy.deepcopy(whole)
    mk.parallel.context_parallel(shared.language_model.backbone, mesh)
    with pytest.raises(ValueError, match="call it with the MambakitForCausalLM itself"):
        shared(ids, labels=labels)
    with mk.parallel.whole_sequences():
        close("whole", shared(ids, labels=labels).loss, wanted, 1e-6)


def sent(mesh, name, length):
    """Bytes that a rank hands to collectives in a forward and a backward pass."""
    counted = []

    def count(inner, which):
        def call(*args, **named):
            counted.append(args[which].numel() * args[which].element_size())
            return inner(*args, **named)

        return call

    stack = mk.parallel.context_parallel(made(name), mesh)
    inner = dist.all_gather, dist.all_reduce
    dist.all_gather, dist.all_reduce = count(inner[0], 1), count(inner[1], 0)
    try:
        stack(random(1, length, D, key=(1,)))[0].sum().backward()
    finally:
        dist.all_gather, dist.all_reduce = inner
    return counted


def bytes_sent(mesh):
    for name in ("mamba1", "mamba2", "mimo", "quaternion"):
        short, long = sent(mesh, name, 4), sent(mesh, name, 40)
        assert short == long, name
        # What is said about the call and its rows; then per layer the state, or the convolution's window and the state.
        per_layer = 1 if name in ("mimo", "quaternion") else 2
        in_each_pass = 2 * per_layer
        # As benchmarks/parallel_arithmetic.py counts: what a cache holds, and decays.
        block = made(name).layers[0].mixer
        kept = sum(math.prod(shape) for shape in block.cache_shapes(1).values())
        decays = block.A_log.numel() if name == "mamba1" else block.config.nheads * (1 if name == "mamba2" else 2)
        assert sum(short[2 : 2 + per_layer]) == 8 * (kept + decays), name
        assert len(short) == 2 + 2 * in_each_pass + len(("gradients of all parameters",)), name
    assert sum(sent(mesh, "window", 40)) > sum(sent(mesh, "window", 4))


def kept(stack, length):
    """Bytes that a forward pass keeps for the backward pass, parameters apart."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in stack.parameters()}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stack(random(1, length, D, key=(1,), dtype=next(stack.parameters()).dtype))
    return sum(size for size, _ in found.values())


def bytes_kept(mesh):
    """What grows with the sequence is divided: of 256 tokens, at most 0.6 on each of two ranks.

    Mamba-1 keeps next to nothing else, with kernels as without.
    """
    for name, dtype in itertools.product(
        ("mamba1", "mamba2", "mamba3", "mimo", "quaternion"), (torch.float64, torch.float32)
    ):
        whole = kept(made(name, dtype), 256)
        share = kept(mk.parallel.context_parallel(made(name, dtype), mesh), 256 // mesh.size())
        beyond = 0.06 if name == "mamba1" else 0.1
        assert share <= (beyond + 1 / mesh.size()) * whole, f"{name}, {dtype}: {share / whole:.3f}"


def refusals(mesh):
    stack = mk.parallel.context_parallel(made("mamba2"), mesh)
    rank = mesh.get_local_rank()
    with pytest.raises(ValueError, match="step takes one token"):
        stack.step(torch.zeros(1, D))
    with pytest.raises(ValueError, match="context parallel already"):
        mk.parallel.context_parallel(stack, mesh)
    with pytest.raises(ValueError, match="the ranks differ in rows"):
        stack(torch.zeros(1 + rank, 3, D, dtype=torch.float64))
    with pytest.raises(ValueError, match="segments are parts of whole sequences"):
        mk.run_in_segments(stack, torch.zeros(1, 4, D, dtype=torch.float64), segment_len=2)
    with mk.parallel.whole_sequences(), torch.no_grad():
        x = random(1, 4, D, key=(1,))
        close("segments", mk.run_in_segments(stack, x, segment_len=2)[0], stack(x)[0])
    mask = {"mask_bs": torch.ones(1, 3, dtype=torch.bool)} if rank else {}
    with pytest.raises(ValueError, match="the ranks differ in mask_bs"):
        stack(torch.zeros(1, 3, D, dtype=torch.float64), **mask)
    with pytest.raises(ValueError, match="cu_seqlens ends at 3, and the ranks' shares have"):
        stack(torch.zeros(1, 3, D, dtype=torch.float64), cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="expected a DeviceMesh"):
        mk.parallel.context_parallel(made("mamba2"), dist.group.WORLD)
    with pytest.raises(ValueError, match="no block"):
        mk.parallel.context_parallel(torch.nn.Linear(2, 2), mesh)
    both = mk.BidirectionalStack(mk.BidirectionalConfig(block=MAMBA2, n_layer=2))
    with pytest.raises(ValueError, match="both ends"):
        mk.parallel.context_parallel(both, mesh)
    marked = mk.Stack(mk.StackConfig(block=MAMBA2, n_layer=1, stack_latents=(0,)))
    with pytest.raises(ValueError, match="class tokens"):
        mk.parallel.context_parallel(marked, mesh)
    assert type(next(iter(stack.parameters()))) is torch.nn.Parameter


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(ranks, tmp_path):
    checks = (
        every_family,
        in_single_precision,
        no_worse_than_rounding,
        computed_again,
        accumulated,
        of_tokens,
        labels_of_next,
        labels_of_transformers,
        bytes_sent,
        bytes_kept,
        refusals,
    )
    on_ranks(ranks, tmp_path, *checks)
