"""Gated residual streams. The recurrence over a whole stack is compared in test_stack.py."""

import math

import pytest
import torch

from compare import check
from mambakit import Mamba1Config
from mambakit.models.multi_gate import MultiGate, MultiGateConfig, depth_aware_bias
from mambakit.models.schedules import Cyclic
from mambakit.models.stack import Stack, StackConfig
from oracles import composition


def make_gate(**options) -> MultiGate:
    gate = MultiGate(MultiGateConfig(**options), 5, dtype=torch.float64)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter += torch.randn_like(parameter)
    return gate


def test_streams_fill_up_and_then_mix():
    """Three layers into two streams: one is appended, two are mixed in."""
    gate = make_gate(n_streams=2)
    x, deltas = torch.randn(4, 5, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    streams, y, sizes = x[:, None], x, []
    for delta in deltas:
        streams, y = gate(streams, delta)
        sizes.append(streams.shape[1])
    assert sizes == [2, 2, 2]
    layers = [lambda _, delta=delta: delta for delta in deltas]
    want = composition.gated_stack(layers, [dict(gate.named_parameters())] * 3, x, 2)
    check(1e-14, {"y": y}, {"y": want})


def test_initial_values():
    gate = MultiGate(MultiGateConfig(n_streams=3, init_bias=-2.0, init_bias_step=0.5), 4)
    assert not gate.w_alpha.any()
    assert not gate.w_beta.any()
    assert gate.b_beta.tolist() == [-2.0, -1.5, -1.0]
    x, delta = torch.randn(2, 3, 4), torch.randn(2, 4)
    streams, y = gate(x, delta)
    open_k = torch.sigmoid(gate.b_beta)
    torch.testing.assert_close(streams, x + open_k[:, None] * (delta[:, None] - x))
    torch.testing.assert_close(y, streams.mean(1))


def test_one_stream_is_a_gated_sum():
    gate = make_gate(n_streams=1)
    x, delta = torch.randn(2, 3, 1, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    streams, y = gate(x, delta)
    beta = torch.sigmoid(gate.score(x, gate.w_beta) + gate.b_beta)
    check(1e-14, {"y": y, "s": streams[:, :, 0]}, dict.fromkeys("ys", (1 - beta) * x[:, :, 0] + beta * delta))


def test_pooling_equal_streams_returns_them():
    """A class row enters all streams alike and has to come out as it is."""
    gate = make_gate(n_streams=4)
    row = torch.randn(2, 5, dtype=torch.float64)
    _, y = gate(row[:, None].expand(-1, 3, -1), row)
    check(1e-15, {"y": y}, {"y": row})


def test_gradients():
    gate = make_gate(n_streams=2)
    for k in (1, 2):
        x = torch.randn(2, k, 5, dtype=torch.float64, requires_grad=True)
        delta = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
        names = [name for name, _ in gate.named_parameters()]

        def run(x, delta, *weights, names=names):
            return torch.func.functional_call(gate, dict(zip(names, weights, strict=True)), (x, delta))

        assert torch.autograd.gradcheck(run, (x, delta, *gate.parameters()))


@pytest.mark.parametrize(("per_virtual_layer", "gates"), [(False, 2), (True, 5)])
def test_a_gate_per_layer_real_or_virtual(per_virtual_layer, gates):
    gate = MultiGateConfig(n_streams=2, per_virtual_layer=per_virtual_layer)
    stack = Stack(
        StackConfig(block=Mamba1Config(d_model=4, state_rank=2), n_layer=2, virtual=Cyclic(5), multi_gate=gate)
    )
    assert len(stack.residual.gates) == gates
    y, _ = stack(torch.randn(1, 3, 4))
    y.sum().backward()
    assert all(gate.w_alpha.grad is not None for gate in stack.residual.gates)


def test_depth_aware_bias():
    assert depth_aware_bias(21, 1) == pytest.approx(-3.0, abs=1e-12)
    assert depth_aware_bias(84, 2) == pytest.approx(-math.log(2 * (math.exp(3) + 1) - 2))
    assert depth_aware_bias(60, 4) < depth_aware_bias(20, 4)
    with pytest.raises(ValueError, match="fewer streams"):
        depth_aware_bias(1, 21)


def test_no_streams_are_refused():
    with pytest.raises(ValueError, match="n_streams = 0"):
        MultiGateConfig(n_streams=0)
