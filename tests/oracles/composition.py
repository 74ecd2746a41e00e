"""What stacks are made of, as plain loops over tokens, streams and list items."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gated_layer(block: Callable, x_sd: Tensor, norm: Tensor, norm2: Tensor | None, fc1: Tensor, fc2: Tensor) -> Tensor:
    """A layer's delta: block, then an MLP whose first half is the value."""
    out_sd = block(norm_rows(x_sd) * norm)
    if norm2 is None:
        return out_sd
    hidden = fc2.shape[1]
    both = (norm_rows(x_sd + out_sd) * norm2) @ fc1.T
    value, gate = both[:, :hidden], both[:, hidden:]
    return out_sd + (value * gate / (1 + torch.exp(-gate))) @ fc2.T


def norm_rows(x: Tensor, eps: float = 1e-5) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def sum_stack(layers: Sequence[Callable], x: Tensor, ignore_first: bool = False, ignore_last: bool = False) -> Tensor:
    for q, layer in enumerate(layers):
        alone = (ignore_first and q == 0) or (ignore_last and q == len(layers) - 1)
        x = layer(x) if alone else x + layer(x)
    return x


def gated_stack(
    layers: Sequence[Callable],
    gates: Sequence[dict[str, Tensor]],
    x_sd: Tensor,
    n_streams: int,
    ignore_first: bool = False,
    ignore_last: bool = False,
) -> Tensor:
    """`gates[q]` has w_alpha, w_beta and b_beta for layer `q`. Streams are lists, one token after the other."""
    width = x_sd.shape[1]
    streams = [[token] for token in x_sd]
    for q, (layer, gate) in enumerate(zip(layers, gates, strict=True)):
        delta_sd = layer(x_sd)
        if ignore_last and q == len(layers) - 1:
            return delta_sd
        rows = []
        for t, delta in enumerate(delta_sd):
            if ignore_first and q == 0:
                streams[t] = [delta]
                rows.append(delta)
                continue
            if len(streams[t]) < n_streams:
                streams[t] = [*streams[t], delta]
            else:
                mixed = []
                for k, stream in enumerate(streams[t]):
                    score = (norm_rows(stream) * gate["w_beta"]).sum() / math.sqrt(width) + gate["b_beta"][k]
                    beta = 1 / (1 + torch.exp(-score))
                    mixed.append((1 - beta) * stream + beta * delta)
                streams[t] = mixed
            weights = [torch.exp((norm_rows(s) * gate["w_alpha"]).sum() / math.sqrt(width)) for s in streams[t]]
            rows.append(sum(w * s for w, s in zip(weights, streams[t], strict=True)) / sum(weights))
        x_sd = torch.stack(rows)
    return x_sd


def insert(tokens: Sequence, markers: Sequence[str | int], name: str) -> list:
    """A whole sequence with the rows of one level among its tokens; row `i` is `(name, i)`."""
    length = len(tokens)
    rank = {"start": 0, "middle": 1, "end": 2}
    at: dict[int, list[tuple[int, int]]] = {}
    for i, marker in enumerate(markers):
        position = {"start": 0, "middle": length // 2, "end": length}[marker] if isinstance(marker, str) else marker
        if position < length or marker == "end":
            at.setdefault(position, []).append((rank.get(marker, 3) if isinstance(marker, str) else 3, i))
    out = []
    for position in range(length + 1):
        out += [(name, i) for _, i in sorted(at.get(position, []))]
        out += tokens[position : position + 1]
    return out


def both_ways(pairs: Sequence[tuple[Callable, Callable, Callable]], x_sd: Tensor) -> Tensor:
    """Pairs of (straight, reverse, merge), each added; the reverse one reads a reversed list of tokens."""
    for straight, reverse, merge in pairs:
        backwards = reverse(torch.stack(list(x_sd)[::-1])) if len(x_sd) else x_sd
        backwards = torch.stack(list(backwards)[::-1]) if len(x_sd) else x_sd
        x_sd = x_sd + merge(straight(x_sd), backwards)
    return x_sd
