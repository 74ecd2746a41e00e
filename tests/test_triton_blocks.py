"""Whole blocks on Triton's kernels, in its interpreter; started by test_triton_interpreter.py."""

import pytest
import torch

from blocks import MAMBAS, make_block, random_cache, results, tokens
from cases import INTERPRETED
from compare import check
from mambakit.ops.backends import use_backend
from mambakit.ops.operation import explain
from test_kernel_step import wide

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs in the processes of test_triton_interpreter.py")
RESETS_BS = torch.tensor([[False, True, False, False, True], [False, False, False, True, False]])


def whole(block, x_bsd, cache):
    return block(x_bsd, cache, reset_bs=RESETS_BS)


def split(block, x_bsd, cache):
    """After two tokens, and again after one more."""
    outputs = []
    for start, stop in ((0, 2), (2, 3), (3, 5)):
        y_bsd, cache = block(x_bsd[:, start:stop], cache, reset_bs=RESETS_BS[:, start:stop])
        outputs.append(y_bsd)
    return torch.cat(outputs, dim=1), cache


@pytest.mark.parametrize("run", [whole, split])
@pytest.mark.parametrize("name", MAMBAS)
def test_triton_blocks(name, run):
    """Packed sequences, warm caches and splits: values, caches and all gradients as torch's operators in float64."""
    block = make_block(name, torch.float32)
    x_bsd, cache = tokens(block, 2, 5), random_cache(block, 2)
    got = {}
    with use_backend("triton"):
        choices = explain(lambda: got.update(results(block, run, x_bsd, cache)))
    assert "triton" in {choice.ran for choice in choices}
    want = results(wide(block), whole, x_bsd.double(), wide(cache))
    values, grads = ({n: t for n, t in want.items() if n.startswith("d ") is is_grad} for is_grad in (False, True))
    check(1e-5, got, values)
    check(1e-4, got, grads)
