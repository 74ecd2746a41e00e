"""From logits to the next token: penalty, temperature, filters, and draws that depend on a row's seed alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from mambakit.arguments import check_count, check_number, shown
from mambakit.ops.shapes import check_readable

INT64 = 1 << 63
BITS = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """How the next token is chosen. The steps run in the order of the fields; see docs/generation.md for each."""

    repetition_penalty: float | None = None
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        # Further from 1 it would make infinities of logits.
        check_number("repetition_penalty", self.repetition_penalty, above=0, least=1e-6, most=1e6, optional=True)
        check_number("temperature", self.temperature, least=0)
        check_count("top_k", self.top_k, least=1, optional=True)
        check_number("top_p", self.top_p, above=0, most=1, optional=True)
        check_number("min_p", self.min_p, least=0, most=1, optional=True)

    @property
    def takes_best(self) -> bool:
        """Whether it is the likeliest token as the model has it."""
        return self.temperature == 0 and self.repetition_penalty is None

    def choose(self, logits_bw: Tensor, seen_bw: Tensor | None, uniform_b: Tensor | None) -> Tensor:
        """One token per row. `seen_bw` says which tokens the penalty is for; `uniform_b` in [0, 1) decides the draw.

        At temperature 0 nothing is drawn, and it may be None.
        """
        # MPS has no float64, which `draw` needs.
        logits_bw = logits_bw.cpu() if logits_bw.device.type == "mps" else logits_bw
        logits_bw = logits_bw.to(torch.promote_types(logits_bw.dtype, torch.float32))
        if self.repetition_penalty is not None and seen_bw is not None:
            logits_bw = penalise(logits_bw, seen_bw.to(logits_bw.device), self.repetition_penalty)
        best_b, greedy_b = logits_bw.max(-1)
        if not all(map(math.isfinite, best_b.tolist())):
            raise ValueError("the model's logits are not finite; its weights or its cache hold a NaN or an infinity")
        if self.temperature == 0:
            return greedy_b
        assert uniform_b is not None
        # What float32 holds, and 1 / temperature too: beyond, nothing changes any more.
        temperature = min(max(float(self.temperature), 1e-37), 1e37)
        # Relative to the largest first: a low temperature would otherwise overflow.
        return draw(self.filtered((logits_bw - best_b[:, None]) / temperature), uniform_b)

    def filtered(self, logits_bw: Tensor) -> Tensor:
        """The logits that may be drawn, minus infinity in the place of the others."""
        if self.top_k is not None and self.top_k < logits_bw.shape[-1]:
            logits_bw = keep_top_k(logits_bw, self.top_k)
        if self.top_p is not None and self.top_p < 1:
            logits_bw = keep_top_p(logits_bw, self.top_p)
        return keep_min_p(logits_bw, self.min_p) if self.min_p else logits_bw


def penalise(logits_bw: Tensor, seen_bw: Tensor, penalty: float) -> Tensor:
    """Seen tokens made less likely by a penalty above 1: positive logits divided by it, negative ones multiplied."""
    return torch.where(seen_bw, torch.where(logits_bw > 0, logits_bw / penalty, logits_bw * penalty), logits_bw)


def keep_top_k(logits_bw: Tensor, k: int) -> Tensor:
    """The `k` most likely tokens, and whatever is as likely as the last of them."""
    return logits_bw.masked_fill(logits_bw < logits_bw.topk(k, -1).values[:, -1:], -math.inf)


def keep_top_p(logits_bw: Tensor, p: float) -> Tensor:
    """The fewest of the most likely tokens that together have probability `p`; of equals the lower id goes first."""
    sorted_bw, order_bw = logits_bw.sort(dim=-1, descending=True, stable=True)
    probability_bw = sorted_bw.softmax(-1, dtype=torch.float64)
    before_bw = probability_bw.cumsum(-1) - probability_bw
    drop_bw = torch.empty_like(before_bw, dtype=torch.bool).scatter_(-1, order_bw, before_bw >= p)
    return logits_bw.masked_fill(drop_bw, -math.inf)


def keep_min_p(logits_bw: Tensor, min_p: float) -> Tensor:
    """Tokens at least `min_p` times as likely as the most likely one."""
    return logits_bw.masked_fill(logits_bw < logits_bw.amax(-1, keepdim=True) + math.log(min_p), -math.inf)


def draw(logits_bw: Tensor, uniform_b: Tensor) -> Tensor:
    """The token under which the cumulative probability passes `uniform_b`."""
    # In float64, where `uniform`'s 52 bits times the sum stay below the sum: no draw falls past the last likely token.
    sum_bw = logits_bw.softmax(-1, dtype=torch.float64).cumsum(-1)
    level_b1 = sum_bw[:, -1:] * uniform_b.to(sum_bw.device)[:, None]
    return torch.searchsorted(sum_bw, level_b1, right=True)[:, 0]


def uniform(seed_b: Tensor | Sequence[int], position: int | Sequence[int]) -> Tensor:
    """A float64 in [0, 1) for every seed: the `position`-th of the seed's own sequence."""
    # By Python's numbers: a few rows take less time than torch needs for one of these operations.
    seeds = seed_b.tolist() if isinstance(seed_b, Tensor) else seed_b
    positions = repeat(position) if isinstance(position, int) else position
    bits = [
        mixed(mixed(seed) + 0x9E3779B97F4A7C15 * (place + 1)) for seed, place in zip(seeds, positions, strict=False)
    ]
    return torch.tensor([(one >> 12) * 2.0**-52 for one in bits], dtype=torch.float64)


def mixed(x: int) -> int:
    """splitmix64's finaliser: every bit of the result depends on each of the lowest 64 of `x`."""
    x &= BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & BITS
    return x ^ (x >> 31)


def wrapped(number: int) -> int:
    """Its lowest 64 bits, as an int64 has them."""
    return (number + INT64) % (2 * INT64) - INT64


def row_seeds(seed: int | Sequence[int] | None, rows: int) -> Tensor:
    """One seed per row. A number is row 0's, and later rows' follow from it; None draws from torch's global one."""
    if seed is None:
        return torch.randint(INT64 - 1, (rows,))
    if isinstance(seed, int) and not isinstance(seed, bool):
        # Not seed + row: the rows of neighbouring seeds would then share their draws.
        return torch.tensor([wrapped(seed + 0xD1342543DE82EF95 * row) for row in range(rows)])
    if isinstance(seed, Tensor):
        check_readable("seed", seed)
        seed = seed.tolist()
    if not isinstance(seed, list | tuple) or not all(type(one) is int for one in seed):
        raise ValueError(f"seed is {shown(seed)}, expected a number, one number per row, or None")
    if len(seed) != rows:
        raise ValueError(f"seed has {len(seed)} numbers for {rows} rows; give one for each, or a single one for all")
    return torch.tensor([wrapped(one) for one in seed])
