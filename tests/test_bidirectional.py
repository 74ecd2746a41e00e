"""Stacks that read both ways: schedules, merges, and sequences that stay apart in both directions."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from blocks import CONFIGS
from compare import check, with_gradients
from mambakit import caches
from mambakit.models.bidirectional import BidirectionalConfig, BidirectionalStack
from mambakit.models.multi_gate import MultiGateConfig
from mambakit.models.schedules import (
    Custom,
    Cyclic,
    StridedCyclic,
    StridedStretched,
    SymmetricCyclic,
    SymmetricStretched,
)
from oracles import composition

OPTIONS = {
    "plain": {"block": CONFIGS["mamba1"], "n_layer": 4},
    "cat": {"block": CONFIGS["mamba2"], "n_layer": 4, "merge": "cat_linear", "virtual": Custom((2, 1, 0, 3))},
    "odd": {"block": CONFIGS["mamba3"], "n_layer": 3, "merge": "cat_linear", "virtual": StridedStretched(6)},
    "symmetric": {"block": CONFIGS["mamba3-learned"], "n_layer": 2, "virtual": SymmetricCyclic(6)},
    "alone": {"block": CONFIGS["mamba2"], "n_layer": 4, "ignore_first_residual": True, "ignore_last_residual": True},
    "gated": {"block": CONFIGS["mamba1"], "n_layer": 6, "multi_gate": MultiGateConfig(n_streams=2, init_bias=0.0)},
}
every = pytest.mark.parametrize("name", OPTIONS)


def make_stack(name: str, **more) -> BidirectionalStack:
    torch.manual_seed(0)
    stack = BidirectionalStack(BidirectionalConfig(**{**OPTIONS[name], **more}), dtype=torch.float64)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return stack


def tokens(stack: BidirectionalStack, batch: int, length: int) -> Tensor:
    make = torch.Generator().manual_seed(4)
    return torch.randn(batch, length, stack.d_model, generator=make, dtype=torch.float64)


def pairs_of(stack: BidirectionalStack) -> list:
    def layer(real):
        return lambda x_sd: stack.layers[real](x_sd[None])[0][0]

    def merge(straight_real):
        if stack.config.merge == "mean":
            return lambda a, b: 0.5 * a + 0.5 * b
        assert stack.merges is not None
        linear = stack.merges[straight_real // 2].linear
        width = stack.d_model
        return lambda a, b: a @ linear.weight[:, :width].T + b @ linear.weight[:, width:].T + linear.bias  # type: ignore

    order = stack.order
    return [(layer(order[q]), layer(order[q + 1]), merge(order[q])) for q in range(0, len(order), 2)]


@every
def test_both_directions_by_hand(name):
    stack = make_stack(name)
    config, pairs = stack.config, pairs_of(stack)

    def by_hand(stack, x):
        if name not in ("alone", "gated"):
            return composition.both_ways(pairs, x[0])[None]
        # The pairs as layers of a one-way stack.
        deltas = [lambda x_sd, pair=pair: composition.both_ways([pair], x_sd) - x_sd for pair in pairs]
        if config.multi_gate is None:
            return composition.sum_stack(deltas, x[0], True, True)[None]
        gates = [dict(stack.residual.gates[o].named_parameters()) for o in range(3)]
        return composition.gated_stack(deltas, gates, x[0], 2)[None]

    x = tokens(stack, 1, 6)
    want = with_gradients(stack, by_hand, x)
    check(1e-10, with_gradients(stack, lambda stack, x: stack(x)[0], x), want)
    stack.checkpoint_layers = True
    check(1e-10, with_gradients(stack, lambda stack, x: stack(x)[0], x), want)


def test_a_merge_and_a_gate_per_pair():
    stack = make_stack("odd", multi_gate=MultiGateConfig(n_streams=2))
    assert stack.merges is not None
    assert len(stack.merges) == len(stack.residual.gates) == 2


def test_every_output_sees_every_token():
    stack = make_stack("plain")
    x = tokens(stack, 1, 5).requires_grad_()
    y, _ = stack(x)
    for t in range(5):
        (grad,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        assert (grad[0].abs().sum(-1) > 1e-9).all()


@pytest.mark.parametrize(
    ("schedule", "n_layer", "order"),
    [
        (None, 4, (0, 1, 2, 3)),
        (StridedCyclic(8), 4, (0, 1, 2, 3, 0, 1, 2, 3)),
        (StridedCyclic(8), 5, (0, 1, 2, 3, 4, 1, 0, 3)),
        (StridedStretched(8), 4, (0, 1, 0, 1, 2, 3, 2, 3)),
        (StridedStretched(6), 3, (0, 1, 0, 1, 2, 1)),
        (SymmetricCyclic(6), 2, (0, 0, 1, 1, 0, 0)),
        (SymmetricStretched(8), 2, (0, 0, 0, 0, 1, 1, 1, 1)),
        (SymmetricStretched(6), 2, (0, 0, 0, 0, 1, 1)),
        (Custom((1, 0, 1, 1)), 2, (1, 0, 1, 1)),
    ],
)
def test_schedules(schedule, n_layer, order):
    config = BidirectionalConfig(block=CONFIGS["mamba1"], n_layer=n_layer, virtual=schedule, merge="cat_linear")
    assert config.order == order
    assert BidirectionalConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_layer": 3}, "odd"),
        ({"n_layer": 1}, "odd|per direction"),
        ({"virtual": StridedCyclic(3)}, "odd"),
        ({"virtual": SymmetricStretched(0)}, "no virtual layers"),
        ({"virtual": Custom((0, 1, 0))}, "even number"),
        ({"virtual": Custom((0, 4))}, r"\[4\]"),
        ({"virtual": Cyclic(4)}, "StridedCyclic"),
        ({"merge": "max"}, "cat_linear"),
        ({"d_intermediate": 8}, "no MLPs"),
        ({"layer_latents": ((), ("start",))}, "no MLPs and no latents"),
    ],
)
def test_configs_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        BidirectionalConfig(**{"block": CONFIGS["mamba1"], "n_layer": 2, **options})


def flags(text: str) -> Tensor:
    return torch.tensor([[mark == "1" for mark in row] for row in text.split()])


@every
@pytest.mark.parametrize("pattern", ["0001111 0000001", "1110000 1111111", "1011010 0111110", "0000000 1000001"])
def test_masked_tokens_are_as_if_deleted(name, pattern):
    stack, mask = make_stack(name), flags(pattern)
    x = tokens(stack, 2, 7)
    x[~mask] = math.nan

    def together(stack, x):
        return stack(x, mask_bs=mask)[0]

    def alone(stack, x):
        rows = []
        for i in range(2):
            y, _ = stack(x[i : i + 1, mask[i]])
            places = mask[i].nonzero().expand(-1, x.shape[2])
            rows.append(torch.zeros(7, x.shape[2], dtype=x.dtype).scatter(0, places, y[0]))
        return torch.stack(rows)

    check(1e-10, with_gradients(stack, together, x), with_gradients(stack, alone, x))


@every
@pytest.mark.parametrize("mask", [None, "11011110", "01101011"])
def test_sequences_in_one_row_stay_apart(name, mask):
    """Resets and packing equal separate sequences in both directions, absent tokens at boundaries included."""
    stack = make_stack(name)
    bounds = [0, 2, 3, 3, 8]
    mask_bs = None if mask is None else flags(mask)
    x = tokens(stack, 1, 8)
    resets = torch.tensor([[t in bounds for t in range(8)]])

    def alone(stack, x):
        cut = pairwise(bounds)
        return torch.cat([stack(x[:, i:j], mask_bs=None if mask_bs is None else mask_bs[:, i:j])[0] for i, j in cut], 1)

    want = with_gradients(stack, alone, x)
    check(1e-10, with_gradients(stack, lambda stack, x: stack(x, mask_bs=mask_bs, reset_bs=resets)[0], x), want)
    packed = torch.tensor(bounds)
    check(1e-10, with_gradients(stack, lambda stack, x: stack(x, mask_bs=mask_bs, cu_seqlens=packed)[0], x), want)


@every
def test_caches_of_both_directions(name):
    """Packed sequences have the caches they have alone, going in and coming out."""
    stack = make_stack(name)
    x = tokens(stack, 1, 6)
    _, entering = stack(tokens(stack, 2, 3))
    y, leaving = stack(x, entering, cu_seqlens=torch.tensor([0, 2, 6]))
    for i, piece in enumerate((x[:, :2], x[:, 2:])):
        want, last = stack(piece, caches.select(entering, [i]))
        check(1e-12, {"y": y[:, :2] if i == 0 else y[:, 2:]}, {"y": want})
        for got, slot in zip(caches.select(leaving, [i]), last, strict=True):
            for field, tensor in slot._asdict().items():
                if isinstance(tensor, Tensor):
                    check(1e-12, {field: getattr(got, field)}, {field: tensor})
    assert len(leaving) == len(stack.order)
    fresh, _ = stack(x, stack.fresh_cache(1))
    check(1e-14, {"y": fresh}, {"y": stack(x)[0]})
    with pytest.raises(ValueError, match="of 1 layers"):
        stack(x, leaving[:1])


def test_latents():
    """Rows stand in the sequence like any other token; absent ones do not move them."""
    stack = make_stack("cat", stack_latents=("end", "middle", "start", 9))
    assert stack.stack_latents is not None
    x, rows = tokens(stack, 1, 4), stack.stack_latents.weight[:, None]
    whole = torch.cat([rows[2], x[0, :2], rows[1], x[0, 2:], rows[0]])
    want = composition.both_ways(pairs_of(stack), whole)
    check(1e-12, {"y": stack(x)[0][0]}, {"y": want})
    mask = flags("1101")
    got = stack(x, mask_bs=mask)[0][0]
    there = [0, 1, 2, 3, 5, 6]
    check(1e-12, {"y": got[there]}, {"y": composition.both_ways(pairs_of(stack), whole[there])})
    assert not got[4].any()
    with pytest.raises(ValueError, match="row of its own"):
        stack(x, reset_bs=mask)


def test_muon_gets_the_merge():
    from mambakit.blocks.param_groups import param_groups

    stack = make_stack("cat")
    assert stack.merges is not None
    muon = [p for group in param_groups(stack, muon=True) if group["optimizer"] == "muon" for p in group["params"]]
    assert any(p is stack.merges[0].linear.weight for p in muon)
    param_groups(stack)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reset_bs": "x"}, "reset_bs has to be a tensor, got str"),
        ({"reset_bs": torch.ones(3, dtype=torch.bool)}, r"reset_bs has shape \(3,\), expected \(1, 3\)"),
        ({"cu_seqlens": 3}, "cu_seqlens has to be a tensor, got int"),
        ({"cu_seqlens": torch.tensor(3)}, "cu_seqlens has to be a vector of integers"),
    ],
    ids=str,
)
def test_what_cannot_be_turned_round(options, message):
    stack = BidirectionalStack(BidirectionalConfig(**OPTIONS["plain"]))
    with pytest.raises(ValueError, match=message):
        stack(torch.randn(1, 3, 6), **options)
