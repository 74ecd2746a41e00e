"""Stacks of all kinds of blocks: forward = steps = any split = masked = packed = reset, with every gradient."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from blocks import CONFIGS
from compare import check
from mambakit import AttentionConfig, MLPConfig, MoEConfig, ParallelConfig, caches
from mambakit.models.schedules import Cyclic
from mambakit.models.stack import Stack, StackConfig
from test_masks import MASKS, RESETS, flags
from test_parity import RUNS, forward, steps
from test_stack import flat, moved, results, tokens

M1 = replace(CONFIGS["mamba1-normed"], d_model=8)
M2, M3 = CONFIGS["mamba2-groups"], CONFIGS["mamba3"]
CHOSEN = MoEConfig(8, 6, 4, 2, router="softmax_chosen", d_shared=5)
GROUPS = MoEConfig(
    *(8, 6, 8, 3, "sigmoid"), scale=1.7, groups=4, top_groups=2, gated=False, activation="relu2", d_shared=5, d_latent=4
)
STACKS = {
    # In the manner of Nemotron-H: one block in each layer.
    "single": StackConfig(
        layers=((M2,), (GROUPS,), (AttentionConfig(8, 4, 2, 6),), (MLPConfig(8, 12, False, "relu2"),), (M1,), (M3,))
    ),
    # Granite: a mixer and a mixture of experts, and a scale for both.
    "pairs": StackConfig(
        layers=((M2, CHOSEN), (AttentionConfig(8, 2, scale=0.3, rope_theta=100.0), CHOSEN), (M3, CHOSEN)),
        residual_scale=0.4,
    ),
    # Falcon-H1: attention beside each of the Mambas, with scales everywhere.
    "parallel": StackConfig(
        layers=(
            (
                ParallelConfig(
                    replace(CONFIGS["mamba2-multipliers"], in_scale=1.2, out_scale=0.8),
                    replace(CONFIGS["attention-rope"], in_scale=0.9, out_scale=1.1),
                    out_scale=0.7,
                ),
                MLPConfig(8, 12, gate_scale=0.7, out_scale=1.4),
            ),
            (ParallelConfig(CONFIGS["mamba3-learned"], CONFIGS["attention-window"], in_scale=0.6),),
            (ParallelConfig(M1, ParallelConfig(GROUPS, CONFIGS["attention"])),),
        ),
    ),
    # Jamba with weights that come twice, more than one block with a state in a layer, windows, and LayerNorm.
    "virtual": StackConfig(
        layers=(
            (replace(M1, out_scale=0.9), CONFIGS["attention-window"], MLPConfig(8, 12, activation="gelu")),
            (CONFIGS["mamba3-mimo"], MoEConfig(8, 6, 3, 2, normalize=False), CONFIGS["mamba2-learned"]),
        ),
        virtual=Cyclic(3),
        rms_norm=False,
        residual_scale=0.7,
    ),
}
every = pytest.mark.parametrize("name", STACKS)
warmth = pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])


def make_stack(name: str) -> Stack:
    torch.manual_seed(0)
    stack = moved(Stack(STACKS[name], dtype=torch.float64))
    assert isinstance(stack, Stack)
    for buffer in stack.buffers():
        buffer += 0.1 * torch.randn_like(buffer)
    return stack


def warm_cache(stack: Stack, batch: int) -> Any:
    """After so many tokens that a few more make keys and values grow, and rows of different lengths."""
    there = torch.ones(batch, 62, dtype=torch.bool)
    there[0, :5] = there[-1, 7:50] = False
    return caches.detach(stack(tokens(stack, batch, 62, seed=8), mask_bs=there)[1])


def by_rows(*pieces: tuple[int, int, list[int]], fresh: frozenset[int] = frozenset()):
    """Each piece `(row of x, row of the cache, places)` in a call of its own, its cache from the piece before it.

    The pieces whose numbers are in `fresh` start with nothing seen.
    """

    def run(stack, x, cache):
        rows = 1 + max(row for _, row, _ in pieces)
        entering = stack.fresh_cache(rows) if cache is None else cache
        after = [caches.select(entering, [row]) for row in range(rows)]
        y = torch.zeros_like(x)
        for number, (i, row, places) in enumerate(pieces):
            last = stack.fresh_cache(1) if number in fresh else after[row]
            at = torch.tensor(places, dtype=torch.long)
            y_1sd, after[row] = stack(x[i : i + 1, at], last)
            y = y.index_put((torch.full_like(at, i), at), y_1sd[0])
        return y, caches.concat(after)

    return run


def pieces_of(mask: Tensor, resets: Tensor) -> Any:
    """What is to be run alone: in each row the tokens that are there, from each reset to the next."""
    pieces, fresh = [], set()
    for i in range(len(mask)):
        bounds = [0, *(t for t in range(mask.shape[1]) if resets[i, t]), mask.shape[1]]
        for number, (start, stop) in enumerate(pairwise(bounds)):
            if number:
                fresh.add(len(pieces))
            pieces.append((i, i, [t for t in range(start, stop) if mask[i, t]]))
    return by_rows(*pieces, fresh=frozenset(fresh))


@every
@warmth
def test_cut_anywhere(name, warm):
    stack = make_stack(name)
    x, cache = tokens(stack, 2, 11), warm_cache(stack, 2) if warm else None
    want = results(stack, forward, x, cache)
    idle = [n for n, t in want.items() if n.startswith("d ") and not t.any()]
    assert all(warm and n.endswith("init_states") for n in idle), idle
    for run in RUNS.values():
        check(1e-10, results(stack, run, x, cache), want)


@every
@torch.no_grad()
def test_steps_without_gradients(name):
    """Which may take another way than those with."""
    stack = make_stack(name)
    x, cache = tokens(stack, 3, 9), warm_cache(stack, 3)
    y, last = forward(stack, x, cache)
    stepped, after = steps(stack, x, cache)
    check(1e-10, {"y": stepped, **flat(after)}, {"y": y, **flat(last)})


@every
@warmth
@pytest.mark.parametrize("pattern", MASKS)
def test_masked_tokens_are_as_if_deleted(name, warm, pattern):
    stack, mask = make_stack(name), flags(MASKS[pattern])
    x, cache = tokens(stack, 3, 8), warm_cache(stack, 3) if warm else None

    def together(stack, x, cache):
        return stack(x, cache, mask_bs=mask)

    alone = pieces_of(mask, torch.zeros_like(mask))
    check(1e-10, results(stack, together, x, cache), results(stack, alone, x, cache))


@every
@warmth
@pytest.mark.parametrize("pattern", RESETS)
def test_resets(name, warm, pattern):
    stack, resets = make_stack(name), flags(RESETS[pattern])
    x, cache = tokens(stack, 3, 8), warm_cache(stack, 3) if warm else None

    def together(stack, x, cache):
        return stack(x, cache, reset_bs=resets)

    alone = pieces_of(torch.ones_like(resets), resets)
    check(1e-10, results(stack, together, x, cache), results(stack, alone, x, cache))


@every
def test_resets_and_masks_together(name):
    stack, mask, resets = make_stack(name), flags(MASKS["mixed"]), flags("00100010 01000001 00010100")
    x, cache = tokens(stack, 3, 8), warm_cache(stack, 3)

    def together(stack, x, cache):
        return stack(x, cache, mask_bs=mask, reset_bs=resets)

    check(1e-10, results(stack, together, x, cache), results(stack, pieces_of(mask, resets), x, cache))


@every
@warmth
def test_packed_sequences_with_their_own_caches(name, warm):
    stack, bounds = make_stack(name), [0, 3, 3, 4, 11, 12]
    x, cache = tokens(stack, 1, 12), warm_cache(stack, 5) if warm else None

    def together(stack, x, cache):
        return stack(x, cache, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))

    alone = by_rows(*((0, row, list(range(start, stop))) for row, (start, stop) in enumerate(pairwise(bounds))))
    check(1e-10, results(stack, together, x, cache), results(stack, alone, x, cache))


@every
def test_checkpointed_layers(name):
    stack = make_stack(name)
    x, cache = tokens(stack, 2, 5), warm_cache(stack, 2)
    want = results(stack, forward, x, cache)
    stack.checkpoint_layers = True
    check(1e-10, results(stack, forward, x, cache), want)
