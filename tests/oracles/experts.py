"""A mixture of experts as plain loops in float64: token by token, expert by expert, written from the formulas alone."""

import math

import torch
from torch import Tensor


def act(name: str, x: Tensor) -> Tensor:
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    if name == "gelu_tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    positive = torch.where(x > 0, x, 0)
    return {"relu": positive, "relu2": positive * positive}[name]


def mlp(x_d: Tensor, first: Tensor, second: Tensor, gated: bool, activation: str, gate_scale: float = 1.0) -> Tensor:
    hidden = first @ x_d
    if not gated:
        return second @ act(activation, hidden)
    half = len(hidden) // 2
    return second @ (hidden[:half] * act(activation, gate_scale * hidden[half:]))


def best(values: list[float], count: int, among: list[int]) -> list[int]:
    return sorted(among, key=lambda i: -values[i])[:count]


def route(logits: Tensor, config, bias: Tensor | None) -> dict[int, Tensor]:
    """The weight of each expert that is chosen."""
    experts, k = list(range(len(logits))), config.top_k
    if config.router == "softmax_chosen":
        chosen = best(logits.tolist(), k, experts)
        total = sum(torch.exp(logits[e]) for e in chosen)
        return {e: config.scale * torch.exp(logits[e]) / total for e in chosen}
    if config.router == "softmax":
        scores = torch.exp(logits) / torch.exp(logits).sum()
        chosen = best(scores.tolist(), k, experts)
    else:
        assert bias is not None
        scores = 1 / (1 + torch.exp(-logits))
        liked = (scores + bias).tolist()
        size = len(experts) // config.groups
        groups = [experts[g * size : (g + 1) * size] for g in range(config.groups)]
        sums = [sum(liked[e] for e in best(liked, 2, group)) for group in groups]
        allowed = best(sums, config.top_groups, list(range(len(groups))))
        chosen = best(liked, k, [e for g in allowed for e in groups[g]])
    total = sum(scores[e] for e in chosen) if config.normalize else 1
    return {e: config.scale * scores[e] / total for e in chosen}


def moe(x_bsd: Tensor, config, weights: dict[str, Tensor]) -> Tensor:
    """`weights` are the parameters and buffers of a mixture, by name."""
    y = torch.zeros_like(x_bsd)
    kind = (config.gated, config.activation)
    for b in range(x_bsd.shape[0]):
        for s in range(x_bsd.shape[1]):
            x_d = x_bsd[b, s]
            total = torch.zeros(1, dtype=x_d.dtype)
            inner = weights["latent_in.weight"] @ x_d if config.d_latent else x_d
            for e, weight in route(weights["router.weight"] @ x_d, config, weights.get("correction_bias")).items():
                total = total + weight * mlp(inner, weights["experts_in"][e], weights["experts_out"][e], *kind)
            if config.d_latent:
                total = weights["latent_out.weight"] @ total
            if config.d_shared:
                total = total + mlp(x_d, weights["shared.fc1.weight"], weights["shared.fc2.weight"], *kind)
            y[b, s] = total
    return y


def balance(x_nd: Tensor, config, weights: dict[str, Tensor]) -> Tensor:
    """`n_experts sum_e fraction_e probability_e` of tokens."""
    fractions, probabilities = [0.0] * config.n_experts, torch.zeros(config.n_experts, dtype=x_nd.dtype)
    for x_d in x_nd:
        logits = weights["router.weight"] @ x_d
        scores = 1 / (1 + torch.exp(-logits)) if config.router == "sigmoid" else torch.exp(logits)
        probabilities = probabilities + scores / scores.sum() / len(x_nd)
        for e in route(logits, config, weights.get("correction_bias")):
            fractions[e] += 1 / (len(x_nd) * config.top_k)
    return config.n_experts * sum(f * p for f, p in zip(fractions, probabilities, strict=True))
