"""A vision model that scans feature maps in four directions with `selective_scan_fn`, as VMamba and its relatives do.

python -m mambakit.compat examples/gallery/vision_cross_scan.py
"""

# pyright: reportMissingImports=false
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn


class SS2D(nn.Module):
    """Row by row, column by column, and both backwards: four sequences, each with projections of its own."""

    def __init__(self, d_model, d_state=8, expand=2, dt_rank=4):
        super().__init__()
        self.d_inner, self.d_state, self.dt_rank = expand * d_model, d_state, dt_rank
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=False)
        self.conv2d = nn.Conv2d(self.d_inner, self.d_inner, 3, padding=1, groups=self.d_inner)
        self.x_proj_weight = nn.Parameter(torch.randn(4, dt_rank + 2 * d_state, self.d_inner) / math.sqrt(self.d_inner))
        self.dt_projs_weight = nn.Parameter(torch.randn(4, self.d_inner, dt_rank) / math.sqrt(dt_rank))
        self.dt_projs_bias = nn.Parameter(torch.rand(4, self.d_inner) - 4.0)
        self.A_logs = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(4 * self.d_inner, 1))
        self.Ds = nn.Parameter(torch.ones(4 * self.d_inner))
        self.out_norm = nn.LayerNorm(self.d_inner)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def scan(self, x):
        B, C, H, W = x.shape
        L = H * W
        both = torch.stack([x.view(B, -1, L), x.transpose(2, 3).contiguous().view(B, -1, L)], dim=1)
        xs = torch.cat([both, both.flip(-1)], dim=1)  # (b, 4, d, l)
        x_dbl = torch.einsum("b k d l, k c d -> b k c l", xs, self.x_proj_weight)
        dts, Bs, Cs = x_dbl.split([self.dt_rank, self.d_state, self.d_state], dim=2)
        dts = torch.einsum("b k r l, k d r -> b k d l", dts, self.dt_projs_weight)
        ys = selective_scan_fn(
            xs.reshape(B, -1, L),
            dts.reshape(B, -1, L),
            -torch.exp(self.A_logs),
            Bs,
            Cs,
            self.Ds,
            z=None,
            delta_bias=self.dt_projs_bias.view(-1),
            delta_softplus=True,
            return_last_state=False,
        ).view(B, 4, -1, L)
        forth = ys[:, :2] + ys[:, 2:].flip(-1)
        across = forth[:, 1].view(B, -1, W, H).transpose(2, 3).contiguous().view(B, -1, L)
        return (forth[:, 0] + across).view(B, C, H, W)

    def forward(self, x):
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv2d(x.permute(0, 3, 1, 2).contiguous()))
        y = self.scan(x).permute(0, 2, 3, 1)
        return self.out_proj(self.out_norm(y) * F.silu(z))


class TinyVision(nn.Module):
    def __init__(self, width=32, classes=2, depth=2):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), SS2D(width)) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patch_embed(images).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(dim=(1, 2)))


def make_batch(n):
    """Horizontal or vertical stripes in noise."""
    labels = torch.randint(2, (n,))
    stripes = (torch.arange(16) // 2 % 2).float() * 2 - 1
    images = torch.where(labels[:, None, None].bool(), stripes[:, None], stripes[None, :])
    return images[:, None] + 0.5 * torch.randn(n, 1, 16, 16), labels


if __name__ == "__main__":
    torch.manual_seed(0)
    model = TinyVision()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(30):
        images, labels = make_batch(16)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    images, labels = make_batch(64)
    accuracy = (model(images).argmax(-1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.2f}")
    assert accuracy > 0.9
