"""An MLP equals the formula and transformers' activations, and treats every token by itself."""

from dataclasses import replace

import pytest
import torch

import mambakit as mk
from blocks import tokens
from compare import check, with_gradients
from mambakit.blocks.family import from_dict, to_dict
from mambakit.blocks.mlp import ACTIVATIONS
from mambakit.blocks.param_groups import param_groups
from oracles import experts as oracle

F64 = torch.float64
THEIRS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}


def make(**fields) -> mk.MLP:
    torch.manual_seed(0)
    return mk.MLP(mk.MLPConfig(**{"d_model": 8, "d_hidden": 12, **fields}), dtype=F64)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_transformers(activation):
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 101, dtype=F64)
    check(1e-12, {"y": ACTIVATIONS[activation](x)}, {"y": ACT2FN[THEIRS[activation]](x)})
    check(1e-12, {"y": ACTIVATIONS[activation](x)}, {"y": oracle.act(activation, x)})


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "fields", [{}, {"gated": False}, {"gate_scale": 1.6}, {"in_scale": 0.7, "out_scale": 1.4}], ids=str
)
def test_equals_the_formula(fields, activation):
    """Values and every gradient."""
    block = make(activation=activation, **fields)
    config = block.config

    def plain(block, x):
        weights = (block.fc1.weight, block.fc2.weight, config.gated, activation, config.gate_scale)
        rows = [oracle.mlp(config.in_scale * row, *weights) for row in x.flatten(0, 1)]
        return config.out_scale * torch.stack(rows).unflatten(0, x.shape[:2])

    x = tokens(block, 2, 4)
    check(1e-10, with_gradients(block, lambda m, x: m(x)[0], x), with_gradients(block, plain, x))


def test_bias():
    block = make(bias=True, gated=False, activation="relu2")
    x = tokens(block, 2, 4)
    hidden = torch.relu(x @ block.fc1.weight.T + block.fc1.bias) ** 2
    check(1e-12, {"y": block(x)[0]}, {"y": hidden @ block.fc2.weight.T + block.fc2.bias})
    decaying, constant = param_groups(block)
    assert {id(p) for p in decaying["params"]} == {id(block.fc1.weight), id(block.fc2.weight)}
    assert constant["weight_decay"] == 0


def test_every_token_by_itself():
    block = make()
    x = tokens(block, 2, 5)
    y, cache = block(x)
    steps = torch.stack([block.step(x[:, t], cache)[0] for t in range(5)], 1)
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0]]).bool()
    got = {
        "steps": steps,
        "infinite": block.step_infinite(x[:, 3]),
        "masked": block(x, mask_bs=mask)[0],
        "reset": block(x, reset_bs=mask)[0],
        "packed": block(x.reshape(1, 10, 8), cu_seqlens=torch.tensor([0, 3, 10]))[0].reshape(2, 5, 8),
    }
    want = {**dict.fromkeys(got, y), "infinite": y[:, 3], "masked": y.masked_fill(~mask[..., None], 0)}
    check(1e-12, got, want)
    for shape in ((0, 3), (2, 0)):
        assert block(torch.zeros(*shape, 8, dtype=F64))[0].shape == (*shape, 8)


def test_muon_takes_value_and_gate_apart():
    block = make()
    muon, *others = param_groups(block, muon=True)
    assert [tuple(p.shape) for p in muon["params"]] == [(12, 8), (12, 8), (8, 12)]
    assert not others


def test_configs():
    config = make().config
    assert from_dict(to_dict(config)) == config
    for fields, message in {
        ("d_hidden", 0): "d_hidden = 0 has to be positive",
        ("activation", "tanh"): "activation = 'tanh' is unknown; choose one of silu, gelu, gelu_tanh, relu, relu2",
    }.items():
        with pytest.raises(ValueError, match=message):
            replace(config, **dict([fields]))
    with pytest.raises(ValueError, match=r"gate_scale = 2\.0 is for a gated MLP"):
        mk.MLPConfig(8, 12, gated=False, gate_scale=2.0)
