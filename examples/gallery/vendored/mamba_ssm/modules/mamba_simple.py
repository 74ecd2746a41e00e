"""A block with an option that the official one does not have."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import torch
import torch.nn as nn
from causal_conv1d import causal_conv1d_fn

from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.triton.layernorm import RMSNorm


class Mamba(nn.Module):
    def __init__(self, d_model, d_state=4, d_conv=4, dt_rank=2, bimamba_type="none"):
        super().__init__()
        self.bimamba_type, self.dt_rank, self.d_state = bimamba_type, dt_rank, d_state
        inner = 2 * d_model
        self.norm = RMSNorm(d_model)
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, d_conv, groups=inner)
        self.x_proj = nn.Linear(inner, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, d_model, bias=False)

    def direction(self, x, z, scan):
        # The activation comes fourth, as in the first version of the convolution.
        x = causal_conv1d_fn(x, self.conv1d.weight[:, 0], self.conv1d.bias, "silu")
        dt, B, C = self.x_proj(x.mT).split((self.dt_rank, self.d_state, self.d_state), dim=-1)
        delta = (dt @ self.dt_proj.weight.t()).mT
        return scan(x, delta, -torch.exp(self.A_log), B.mT, C.mT, self.D, z, self.dt_proj.bias)

    def forward(self, hidden_states, scan=selective_scan_fn):
        x, z = self.in_proj(self.norm(hidden_states)).mT.chunk(2, dim=1)
        y = self.direction(x, z, scan)
        if self.bimamba_type == "v1":
            y = y + self.direction(x.flip(-1), z.flip(-1), scan).flip(-1)
        return self.out_proj(y.mT)
