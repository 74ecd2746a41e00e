"""Prompts on their way through a model, a piece at a time."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mambakit.blocks.caches import concat
from mambakit.inference.prefix_cache import Plan, Prefix, PrefixCache
from mambakit.inference.requests import Request
from mambakit.inference.rows import log_probabilities
from mambakit.models.language_model import LanguageModel

LOGITS = 128
"""Tokens of prompts whose logits are in memory at a time."""


class Known:
    """A prefix cache that serves a model."""

    def __init__(self, prefixes: PrefixCache, model: LanguageModel, passing: bool = False):
        self.prefixes, self.served = prefixes, prefixes.serve(model)
        self.passing = passing
        """Whether states between pieces are kept too, as long as there is room; prompts are read one by one then."""


class Reading:
    """One prompt, or several that are read together: from their starts, from a `cache`, or from states that are known.

    A prompt that is read alone is cut into pieces of `chunk` tokens and where its states are kept, whatever else goes
    on; so what is computed does not depend on that either.
    """

    def __init__(
        self,
        model: LanguageModel,
        requests: Sequence[Request],
        chunk: int,
        *,
        cache: Any = None,
        known: Known | None = None,
    ):
        self.requests, self.cache = requests, cache
        self.x_bd: Tensor | None = None
        """The residual stream at the last token of each that was read; `cache` is the one after it."""
        self._model, self._known = model, known
        self._plans = [plan_for(request, known) for request in requests]
        self._position = 0
        self._go_on_from([plan.prefix for plan in self._plans])
        pairs = zip(requests, self._plans, strict=True)
        rests = [request.ids[plan.reused : plan.cuts[-1] if plan.cuts else None] for request, plan in pairs]
        self._lengths = [len(rest) for rest in rests]
        longest = max(self._lengths)
        if known is not None and known.passing:
            (plan,) = self._plans
            self._ends = [end - plan.reused for end in plan.pieces(chunk)]
        else:
            cuts = [cut - self._plans[0].reused for cut in self._plans[0].cuts] if len(requests) == 1 else [longest]
            self._ends = sorted({end for end in (*cuts, *range(chunk, longest, chunk)) if end > 0})
        filled = [rest + [0] * (longest - len(rest)) for rest in rests]
        self._ids_bs = torch.tensor(filled, dtype=torch.int64, device=device_of(model))

    @property
    def is_done(self) -> bool:
        return not self._ends

    @property
    def left(self) -> int:
        """Tokens that are still to be read."""
        return sum(max(0, length - self._position) for length in self._lengths)

    @property
    def next_piece(self) -> int:
        """The number of tokens that `go_on` reads."""
        return 0 if self.is_done else len(self.requests) * (self._ends[0] - self._position)

    def go_on(self) -> None:
        """Read the next piece."""
        start, stop = self._position, self._ends.pop(0)
        here = [max(0, min(length, stop) - start) for length in self._lengths]
        here_b = mask_bs = None
        if min(here) < stop - start:
            here_b = torch.tensor(here, device=self._ids_bs.device)
            mask_bs = torch.arange(stop - start, device=here_b.device) < here_b[:, None]
        piece_bsd = self._model.embed(self._ids_bs[:, start:stop])
        x_bsd, self.cache = self._model.backbone(piece_bsd, self.cache, mask_bs=mask_bs)
        self._tell(x_bsd, [plan.reused + start for plan in self._plans], here)
        if here_b is None:
            x_bd = x_bsd[:, -1]
        else:
            x_bd = x_bsd[torch.arange(len(here), device=here_b.device), here_b - 1]
            x_bd = x_bd if self.x_bd is None else torch.where(here_b[:, None] > 0, x_bd, self.x_bd)
        self.x_bd, self._position = x_bd, stop
        self._keep(x_bd)

    def finish(self) -> tuple[Tensor, Any]:
        """Read all that is left; the residual stream at the last token of each prompt, and the cache after it."""
        while not self.is_done:
            self.go_on()
        assert self.x_bd is not None
        return self.x_bd, self.cache

    def _go_on_from(self, found: Sequence[Prefix | None]) -> None:
        if not any(found):
            return
        states = [self._model.fresh_cache(1) if one is None else one.cache for one in found]
        self.cache = states[0] if len(states) == 1 else concat(states)
        like_1d = next(one.x_1d for one in found if one is not None)
        # What stands before the first token of a prompt is never asked for.
        self.x_bd = torch.cat([torch.zeros_like(like_1d) if one is None else one.x_1d for one in found])
        self._tell(self.x_bd[:, None], [plan.reused - 1 for plan in self._plans], [one is not None for one in found])

    def _keep(self, x_bd: Tensor) -> None:
        if self._known is None or len(self.requests) > 1 or self.requests[0].echo:
            return
        upto = self._plans[0].reused + self._position
        passing = upto not in self._plans[0].cuts
        if self._known.passing or not passing:
            ids = self.requests[0].ids[:upto]
            self._known.prefixes.keep(self._known.served, ids, x_bd, self.cache, passing=passing)

    def _tell(self, x_bsd: Tensor, first: Sequence[int], here: Sequence[int]) -> None:
        """Log-probabilities by the residual stream at `here` tokens of each prompt from `first` on, of those after."""
        before, asked = [], []
        for row, request in enumerate(self.requests):
            if request.echo:
                place = max(0, request.echo - 1 - first[row])
                following = request.ids[first[row] + 1 + place : first[row] + 1 + here[row]]
                before.append(x_bsd[row, place : place + len(following)])
                asked += [(request, token) for token in following]
        top = max((request.top or 0) for request in self.requests)
        for start in range(0, len(asked), LOGITS):
            part = asked[start : start + LOGITS]
            logits_sw = self._model.logits(torch.cat(before)[start : start + LOGITS])
            told = log_probabilities(logits_sw, [token for _, token in part], top)
            for (request, _), one in zip(part, told, strict=True):
                own = dict(islice(one.likeliest.items(), request.top or 0))
                request.prompt_logprobs.append(one._replace(likeliest=own))


def plan_for(request: Request, known: Known | None) -> Plan:
    """From the longest state that its prompt can go on from."""
    plan, given = Plan(None, (len(request.ids),), ""), request.given_state
    if request.echo:
        # They need the residual stream at every token before.
        end = len(request.ids) - request.ends_with_prompt
        plan = Plan(None, (end,), "log-probabilities of the prompt were asked for")
    elif known is not None:
        plan = known.prefixes.plan(known.served, request.ids, request.ends)
    if given is not None and plan.reused < len(given.ids) <= (request.echo or len(request.ids)):
        plan = plan._replace(prefix=Prefix(len(given.ids), given.x_1d, given.cache, 0))
    request.reused_tokens, request.why_not_more = plan.reused, plan.why_not_more
    return plan


def device_of(model: LanguageModel) -> torch.device:
    return model.backbone.embedding.weight.device
