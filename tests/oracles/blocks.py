"""Whole blocks as plain loops over their tokens, from the formulas alone; parameters by their official names."""

import torch
from torch import Tensor

from oracles.elementwise import conv_loop, norm_loop
from oracles.selective_scan import selective_scan_loop
from oracles.ssd import mamba2

Weights = dict[str, Tensor]


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def project(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def mamba1_block(weights: Weights, x_bsd: Tensor, norm_eps: float | None) -> Tensor:
    """With RMS norms on dt, B and C where there is an epsilon; they have weights where there are any."""
    channels, r = weights["A_log"].shape
    x_bsi, z_bsi = project(weights, "in_proj", x_bsd).split(channels, dim=-1)
    x_bsi = silu(conv_loop(x_bsi, weights["conv1d.weight"][:, 0], weights["conv1d.bias"])[0])
    dt_b_c_bsX = project(weights, "x_proj", x_bsi)
    rank = dt_b_c_bsX.shape[-1] - 2 * r
    parts = {"dt": dt_b_c_bsX[..., :rank], "B": dt_b_c_bsX[..., rank : rank + r], "C": dt_b_c_bsX[..., rank + r :]}
    if norm_eps is not None:
        parts = {n: norm_loop(part, None, weights.get(f"{n}_norm.weight"), norm_eps) for n, part in parts.items()}
    dt_bsi = torch.log1p(torch.exp(project(weights, "dt_proj", parts["dt"])))
    b_c = (parts[name][:, :, None] for name in ("B", "C"))
    y_bsi, _ = selective_scan_loop(x_bsi, dt_bsi, -torch.exp(weights["A_log"]), *b_c)
    return project(weights, "out_proj", (y_bsi + weights["D"] * x_bsi) * silu(z_bsi))


def mamba2_block(weights: Weights, x_bsd: Tensor, ngroups: int, multipliers: tuple[float, ...], eps: float) -> Tensor:
    """Gate, then norm per group. Channels beyond those of the heads are a gated MLP, which is not multiplied."""
    heads, width = len(weights["A_log"]), weights["norm.weight"].shape[0]
    mlp = weights["out_proj.weight"].shape[1] - width
    gr = (weights["conv1d.weight"].shape[0] - width) // 2
    projected = project(weights, "in_proj", x_bsd)
    z_mlp, x_mlp, *parts = projected.split((mlp, mlp, width, width, gr, gr, heads), dim=-1)
    z_bsi, x_bsi, b_bsG, c_bsG, dt_bsh = (part * factor for part, factor in zip(parts, multipliers, strict=True))
    xbc_bsv = torch.cat([x_bsi, b_bsG, c_bsG], -1)
    xbc_bsv = silu(conv_loop(xbc_bsv, weights["conv1d.weight"][:, 0], weights["conv1d.bias"])[0])
    x_bsi, b_bsG, c_bsG = xbc_bsv.split((width, gr, gr), dim=-1)
    x_bshp = x_bsi.unflatten(-1, (heads, -1))
    b_bsgr, c_bsgr = (t.unflatten(-1, (ngroups, -1)) for t in (b_bsG, c_bsG))
    dt_bsh = torch.log1p(torch.exp(dt_bsh + weights["dt_bias"]))
    start = x_bshp.new_zeros(len(x_bsd), heads, x_bshp.shape[-1], b_bsgr.shape[-1])
    y_bshp, _ = mamba2(x_bshp, dt_bsh, -torch.exp(weights["A_log"]), b_bsgr, c_bsgr, weights["D"][:, None], start)
    y_bsi = norm_loop(y_bshp.flatten(-2), z_bsi, weights["norm.weight"], eps, width // ngroups)
    return project(weights, "out_proj", torch.cat([silu(z_mlp) * x_mlp, y_bsi], -1))
