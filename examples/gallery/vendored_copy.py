"""A modified copy of `mamba_ssm` beside the script: it stays, and what in it needs a GPU is filled in.

python -m mambakit.compat examples/gallery/vendored_copy.py
"""

# pyright: reportMissingImports=false
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "vendored"))

import torch
import torch.nn.functional as F
from mamba_ssm import Mamba

torch.manual_seed(0)


def scan_by_hand(u, delta, A, B, C, D, z, delta_bias):
    step = F.softplus(delta + delta_bias[:, None])
    state, outputs = 0, []
    for t in range(u.shape[-1]):
        at = step[..., t, None]
        state = torch.exp(at * A) * state + at * u[..., t, None] * B[:, None, :, t]
        outputs.append((state * C[:, None, :, t]).sum(-1) + D * u[..., t])
    return torch.stack(outputs, dim=-1) * F.silu(z)


for kind in ("none", "v1"):
    block = Mamba(8, bimamba_type=kind)
    x = torch.randn(2, 7, 8, requires_grad=True)
    results = []
    for options in ({}, {"scan": scan_by_hand}):
        out = block(x, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])])
    worst = max((a - b).abs().max().item() / (1 + b.abs().max().item()) for a, b in zip(*results, strict=True))
    assert worst < 1e-5, worst
    print(f"bimamba_type {kind}, with gradients: error {worst:.0e}")
