"""The modules blocks are made of compute what torch's own do."""

import pytest
import torch
from torch import nn

from compare import check
from mambakit.blocks.modules import CausalConv1d, Linear


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [1, 2, 7, 64])
@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (4,), (5,), (2, 1), (2, 2), (2, 3), (0, 3)], ids=str)
def test_linear(shape, outputs, bias, dtype):
    """With gradients and without, few rows and many."""
    ours = Linear(24, outputs, bias=bias, dtype=dtype)
    theirs = nn.Linear(24, outputs, bias=bias, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(*shape, 24, dtype=dtype)
    want, tolerance = {"y": theirs(x).detach()}, 2e-2 if dtype == torch.bfloat16 else 1e-6
    check(tolerance, {"y": ours(x)}, want)
    with torch.no_grad():
        check(tolerance, {"y": ours(x)}, want)
        check(tolerance, {"y": ours(x.mT.contiguous().mT)}, want)


def test_decoding_takes_the_fast_way():
    """One row without gradients, and nothing else that torch would treat differently."""
    layer, row = Linear(8, 6), torch.randn(1, 8)
    assert not layer.is_decoding(row)
    with torch.no_grad():
        assert layer.is_decoding(row)
        assert layer.is_decoding(torch.randn(2, 2, 8))
        assert not layer.is_decoding(torch.randn(5, 8))
        assert not layer.is_decoding(row.double())
        assert not Linear(8, 5).is_decoding(row)
        with torch.autocast("cpu", torch.bfloat16):
            assert not layer.is_decoding(row)
            assert layer(row).dtype == torch.bfloat16


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("length", [4, 5, 11])
def test_causal_conv1d_is_a_conv1d(length, grad):
    """Depthwise on either side of the decoding length, and dense as adapters make it."""
    x = torch.randn(2, 6, length, dtype=torch.float64)
    for options in ({"groups": 6}, {"groups": 6, "bias": False}, {"groups": 1}, {"groups": 6, "padding": 3}):
        ours = CausalConv1d(6, 6, 4, **options, dtype=torch.float64)
        theirs = nn.Conv1d(6, 6, 4, **options, dtype=torch.float64)
        theirs.load_state_dict(ours.state_dict())
        with torch.set_grad_enabled(grad):
            check(1e-12, {"y": ours(x)}, {"y": theirs(x)})
