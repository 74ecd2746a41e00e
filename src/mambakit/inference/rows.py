"""Requests that are decoded together: their next tokens chosen by each one's own rules, and computed in one call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mambakit.inference.constraints import constrained
from mambakit.inference.requests import LogProbs, Request
from mambakit.inference.sampling import Sampler, uniform
from mambakit.inference.speculation import Speculation


class Group:
    """Rows that are computed in one call of a decoder, each with its request."""

    def __init__(self, decoder: Any, room: int = 0, speculation: Speculation | None = None):
        self.requests: list[Request] = []
        self.room = room
        """How many may join."""
        self.logits_bw = torch.empty(0, 0)
        """After the tokens that were taken in last."""
        self.best: list[int] | None = None
        """Each row's likeliest next token, where a decoder tells; see there."""
        self._decoder, self._speculation = decoder, speculation

    def load(self, requests: Sequence[Request], cache: Any) -> None:
        """These rows and no others, in their order."""
        self._decoder.load(cache)
        self.requests = list(requests)

    def join(self, request: Request, cache: Any) -> None:
        if self.requests:
            self._decoder.join(cache)
        else:
            self._decoder.load(cache)
        self.requests.append(request)

    def leave(self, request: Request) -> None:
        """The last row takes the place of this one."""
        row, last = self.requests.index(request), self.requests.pop()
        self._decoder.leave(row)
        if last is not request:
            self.requests[row] = last
            if len(self.logits_bw) > len(self.requests):
                self.logits_bw[row] = self.logits_bw[len(self.requests)]
        self.logits_bw, self.best = self.logits_bw[: len(self.requests)], None

    def row(self, request: Request) -> Any:
        """A copy of its cache."""
        return self._decoder.row(self.requests.index(request))

    def cache(self) -> Any:
        """A copy of the caches of all rows."""
        return self._decoder.cache()

    def take_in(self) -> None:
        """The newest token of every row. One that is alone may be guessed ahead."""
        if self._speculation is not None and len(self.requests) == 1:
            (request,) = self.requests
            self.logits_bw, self.best = self._speculation.step(request.ids, request.tokens), None
            return
        self.logits_bw = self._decoder.step([request.tokens[-1] for request in self.requests])
        self.best = self._decoder.best


def choose(requests: Sequence[Request], logits_bw: Tensor, best: Sequence[int] | None = None) -> list[str | None]:
    """Give each request its next token; why that was its last, if it was. `best` are the likeliest, if known.

    One that cannot go on fails alone: it is done then, with its error.
    """
    reasons: list[str | None] = [None] * len(requests)
    rules: dict[Sampler, list[int]] = {}
    for row, request in enumerate(requests):
        if best is not None and best[row] >= 0 and request.takes_best:
            reasons[row] = give(request, best[row], logits_bw, row)
        elif request.constraint is not None and request.constraint.only is not None:
            # Nothing is left to choose.
            reasons[row] = give(request, request.constraint.only, logits_bw, row)
        else:
            rules.setdefault(request.sampler, []).append(row)
    for sampler, rows in rules.items():
        own_bw = logits_bw if len(rows) == len(requests) else logits_bw[rows]
        chosen = [requests[row] for row in rows]
        may_bw = constrained(biased(own_bw, chosen), [request.constraint for request in chosen])
        for row, token in zip(rows, sample(sampler, chosen, may_bw), strict=True):
            if token is not None:
                reasons[row] = give(requests[row], token, logits_bw, row)
    return reasons


def biased(logits_bw: Tensor, requests: Sequence[Request]) -> Tensor:
    """With what each request adds to its own."""
    if all(request.bias is None for request in requests):
        return logits_bw
    logits_bw = logits_bw.to(torch.promote_types(logits_bw.dtype, torch.float32), copy=True)
    for logits_w, request in zip(logits_bw, requests, strict=True):
        if request.bias is not None:
            logits_w += request.bias.after(request.tokens).to(logits_w.device)
    return logits_bw


def sample(sampler: Sampler, requests: Sequence[Request], logits_bw: Tensor) -> list[int | None]:
    """A token of each; None for those that fail."""
    draws_b = seen_bw = None
    if sampler.temperature:
        draws_b = uniform([request.seed for request in requests], [len(request.tokens) for request in requests])
    if sampler.repetition_penalty is not None:
        seen_bw = torch.stack([request.seen(logits_bw.shape[1]) for request in requests])
    try:
        return sampler.choose(logits_bw, seen_bw, draws_b).tolist()
    except Exception as error:  # of these requests alone: the others go on
        if len(requests) == 1:
            requests[0].finish("error", error)
            return [None]
        rows = zip(requests, logits_bw.split(1), strict=True)
        return [token for request, own_1w in rows for token in sample(sampler, [request], own_1w)]


def give(request: Request, token: int, logits_bw: Tensor, row: int) -> str | None:
    try:
        token = request.settle(token)
    except Exception as error:  # of its constraint
        request.finish("error", error)
        return None
    request.tokens.append(token)
    if request.top is not None:
        request.logprobs += log_probabilities(logits_bw[row : row + 1], [token], request.top)
    reason = request.ends_by()
    if reason is None:
        request.tell()
    return reason


def log_probabilities(logits_sw: Tensor, tokens: Sequence[int], top: int) -> list[LogProbs]:
    """Of each token under the logits before it, and of the `top` most likely ones."""
    all_sw = logits_sw.to(torch.promote_types(logits_sw.dtype, torch.float32)).log_softmax(-1)
    own = all_sw.gather(1, torch.tensor(tokens, device=all_sw.device)[:, None])[:, 0].tolist()
    if not top:
        return [LogProbs(one, {}) for one in own]
    best, ids = (part.tolist() for part in all_sw.topk(min(top, all_sw.shape[1]), -1))
    return [LogProbs(one, dict(zip(i, b, strict=True))) for one, b, i in zip(own, best, ids, strict=True)]
