"""Attention as plain loops: one row, one head and one query after the other, nothing from `ops`."""

import math

import torch
from torch import Tensor


def attention(block, x_sd: Tensor, resets: tuple[int, ...] = ()) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Outputs of a row from its start, and the keys and values that the next token may see, oldest first."""
    config = block.config
    heads, groups, width = config.n_heads, config.n_kv_heads or config.n_heads, config.head_dim
    width = width or config.d_model // heads
    scale = (1 / math.sqrt(width) if config.scale is None else config.scale) * config.key_scale
    kept: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for t in range(len(x_sd)):
        if t in resets:
            kept = []
        position = t - max((r for r in resets if r <= t), default=0)
        projected = config.in_scale * (block.in_proj.weight @ x_sd[t])
        if config.bias:
            projected = projected + block.in_proj.bias
        rows = [projected[i * width : (i + 1) * width] for i in range(heads + 2 * groups)]
        queries = [turned(config, row, position) for row in rows[:heads]]
        keys = torch.stack([turned(config, row, position) for row in rows[heads : heads + groups]])
        kept = [*kept, (keys, torch.stack(rows[heads + groups :]))]
        if config.window is not None:
            kept = kept[-config.window :]
        read = []
        for head, query in enumerate(queries):
            group = head // (heads // groups)
            weights = [torch.exp(scale * (query * key[group]).sum()) for key, _ in kept]
            mixed = sum(w * value[group] for w, (_, value) in zip(weights, kept, strict=True))
            read.append(mixed / sum(weights))
        y_d = block.out_proj.weight @ torch.cat(read)
        if config.bias:
            y_d = y_d + block.out_proj.bias
        outputs.append(config.out_scale * y_d)
    return torch.stack(outputs), kept


def turned(config, row: Tensor, position: int) -> Tensor:
    if config.rope_theta is None:
        return row
    width = int(config.rope_fraction * len(row))
    half, entries = width // 2, list(row)
    for i in range(half):
        angle = position / config.rope_theta ** (2 * i / width)
        one, other = row[i], row[i + half]
        entries[i] = one * math.cos(angle) - other * math.sin(angle)
        entries[i + half] = other * math.cos(angle) + one * math.sin(angle)
    return torch.stack(entries)
