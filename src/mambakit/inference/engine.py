"""Many requests through one model: rows that come and go at any step, prompts read in pieces in between.

What a request gets does not depend on who else is there. Its prompt is read by itself; its tokens are computed together
with others' by kernels whose rows do not touch one another; its draws are those of its own seed.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mambakit.inference.constraints import Constraint, constrained
from mambakit.inference.decoder import Decoder, StepByStep, make_decoder
from mambakit.inference.prefix_cache import PrefixCache, check_prefix_cache
from mambakit.inference.prompts import Stop, check_language_model, read_ids, read_stops
from mambakit.inference.requests import LogProbs, Request, State, Stops, Tokenizer
from mambakit.inference.sampling import Sampler, check_count, row_seeds, uniform
from mambakit.models.language_model import LanguageModel
from mambakit.ops import few_rows
from mambakit.ops.backends import check_backend, use_backend
from mambakit.ops.shapes import check_flag


class Engine:
    """`request = engine.add(ids, max_new_tokens=...)`, then `engine.step()` until `request.done`; see docs/serving.md.

    At most `max_rows` requests are computed at a time; others wait. `add` and `cancel` may be called from any thread,
    and one thread steps. The model's weights stay as they are while an engine uses them.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_rows: int = 64,
        prefix_cache: PrefixCache | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        prefill_chunk: int = 512,
        backend: str = "auto",
    ):
        check_count("max_rows", max_rows, least=1)
        check_count("prefill_chunk", prefill_chunk, least=1)
        check_model(model)
        check_backend(backend)
        check_prefix_cache(prefix_cache)
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise ValueError(f"tokenizer is a {type(tokenizer).__name__}, expected one with decode(ids)")
        self.model, self.tokenizer, self.max_rows = model, tokenizer, max_rows
        self._chunk, self._backend = prefill_chunk, backend
        self._known, self._served = prefix_cache, 0 if prefix_cache is None else prefix_cache.serve(model)
        self._waiting: deque[Request] = deque()
        self._reading: Reading | None = None
        self._groups: list[Group] = []
        self._fresh: list[tuple[Request, Tensor, Any]] = []
        """Prompts just read, with the logits after them and their caches."""
        self._stepping = threading.Lock()

    @property
    def waiting(self) -> int:
        """Requests whose prompts have not been read to their ends."""
        return len(self._waiting) + (self._reading is not None)

    @property
    def active(self) -> int:
        """Requests that get a token with every step."""
        return len(self._fresh) + sum(len(group.requests) for group in self._groups)

    def add(
        self,
        ids: Sequence[int] | Tensor,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Stop | str | Sequence[int | str | Sequence[int]] | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        ends: Sequence[int] = (),
        keep_state: bool = False,
        state: State | None = None,
        constraint: dict[str, Any] | None = None,
        on_token: Callable[[Request], None] | None = None,
    ) -> Request:
        """Put a request in line. ValueError, and nothing is put, where something in it makes no sense.

        `stop` are ids, sequences of ids and strings. `logprobs` asks for log-probabilities, of the tokens that come and
        of so many likely ones; `echo` for the prompt's too. `ends` are numbers of tokens after which a message ends:
        states are kept there. `state` is one to begin from, whose ids begin the prompt; `keep_state` asks for the one
        after all tokens. `constraint` is the form that the text has to have: a JSON schema, `{"regex": ...}` or
        `{"grammar": ...}`; it needs the tokenizer. `on_token(request)` is called by the thread that steps, after each
        token and at the end.
        """
        vocabulary = self.model.config.vocab_size
        check_count("max_new_tokens", max_new_tokens, least=0)
        check_count("logprobs", logprobs, least=0)
        sampler = Sampler(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
        )
        prompt = read_ids("ids", ids, vocabulary).tolist()
        check_flag("echo", echo)
        check_flag("keep_state", keep_state)
        if not isinstance(ends, Sequence):
            raise ValueError(f"ends is a {type(ends).__name__}, expected a list of numbers of tokens")
        if state is not None and not isinstance(state, State):
            raise ValueError(f"state is a {type(state).__name__}, expected the State of a request")
        if on_token is not None and not callable(on_token):
            raise ValueError(f"on_token is a {type(on_token).__name__}, expected a function of a request")
        if state is not None and list(state.ids) != prompt[: len(state.ids)]:
            raise ValueError("the prompt does not begin with the tokens of its state; leave the state out")
        if any(type(end) is not int or not 0 < end <= len(prompt) for end in ends):
            raise ValueError(f"ends = {list(ends)!r} has to be numbers of tokens from 1 to the prompt's {len(prompt)}")
        request = Request(
            prompt,
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            seed=int(row_seeds(seed, 1)[0]),
            stops=read_all_stops(stop, vocabulary, self.tokenizer),
            constraint=None if constraint is None else Constraint(constraint, self.tokenizer, vocabulary),
            logprobs=logprobs,
            echo=echo,
            ends=tuple(ends),
            keep_state=keep_state,
            state=state,
            on_token=on_token,
        )
        self._waiting.append(request)
        return request

    def step(self) -> bool:
        """Read a piece of waiting prompts and give every row its next token; False when nothing is left to do."""
        with self._stepping, torch.no_grad():
            self._let_go_of_cancelled()
            self._read_prompts()
            self._give_tokens()
        return bool(self.waiting or self.active)

    def run(self) -> None:
        """Until all requests are done."""
        while self.step():
            pass

    def _let_go_of_cancelled(self) -> None:
        for request in [request for request in self._waiting if request.is_cancelled]:
            self._waiting.remove(request)
            request.finish("cancelled")
        if self._reading is not None and self._reading.request.is_cancelled:
            self._reading.request.finish("cancelled")
            self._reading = None
        for request, _, _ in [one for one in self._fresh if one[0].is_cancelled]:
            request.finish("cancelled")
        self._fresh = [one for one in self._fresh if not one[0].done]
        for group in self._groups:
            for request in [request for request in group.requests if request.is_cancelled]:
                group.leave(request)
                request.finish("cancelled")

    def _read_prompts(self) -> None:
        """As many tokens as a piece has, of one prompt or of several short ones."""
        budget = self._chunk
        while budget > 0 and (self._reading is not None or self._waiting) and self.active < self.max_rows:
            if self._reading is None:
                self._reading = Reading(self._waiting.popleft())
            reading = self._reading
            try:
                with use_backend("torch" if self._backend == "torch" else "auto"):
                    budget -= reading.go_on(self, budget)
                    if reading.position < len(reading.request.ids):
                        continue
                    assert reading.x_1d is not None
                    logits_1w = self.model.logits(reading.x_1d)
            except Exception as error:  # of this request alone: the others go on
                self._reading = None
                reading.request.finish("error", error)
                continue
            self._reading = None
            if reading.request.max_new_tokens == 0:
                if reading.request.keep_state:
                    reading.request.state = State(tuple(reading.request.ids), reading.x_1d, reading.cache)
                self._finish(reading.request, "length", reading.cache)
            else:
                self._fresh.append((reading.request, logits_1w, reading.cache))

    def _give_tokens(self) -> None:
        for group in self._groups:
            requests = list(group.requests)
            for request, reason in zip(requests, self._choose(requests, group.logits_bw), strict=True):
                if request.done:
                    group.leave(request)
                elif reason is not None:
                    cache = group.row(request) if self._wants_state(request) else None
                    group.leave(request)
                    self._finish(request, reason, cache)
        self._groups = [group for group in self._groups if group.requests]
        fresh, self._fresh = self._fresh, []
        for request, logits_1w, cache in fresh:
            (reason,) = self._choose([request], logits_1w)
            if reason is not None:
                self._finish(request, reason, cache)
            elif not request.done:
                self._group_with_room().join(request, cache)
        for group in self._groups:
            group.take_in()

    def _group_with_room(self) -> "Group":
        for group in self._groups:
            if len(group.requests) < few_rows.MAX_ROWS:
                return group
        self._groups.append(Group(make_decoder(self.model, self._backend, 1)))
        return self._groups[-1]

    def _choose(self, requests: Sequence[Request], logits_bw: Tensor) -> list[str | None]:
        """Give each request its next token by its own rules; why that was its last, if it was."""
        may_bw = constrained(logits_bw, [request.constraint for request in requests])
        fine = may_bw.isfinite().any(1) & ~logits_bw.isnan().any(1)
        chosen: dict[int, int] = {}
        by_rule: dict[Sampler, list[int]] = {}
        for row, request in enumerate(requests):
            if fine[row]:
                by_rule.setdefault(request.sampler, []).append(row)
            else:
                told = "the model's logits are not finite; its weights or its cache hold a NaN or an infinity"
                request.finish("error", ValueError(told))
        for sampler, rows in by_rule.items():
            own_bw = may_bw if len(rows) == len(requests) else may_bw[rows]
            draws_b = seen_bw = None
            if sampler.temperature:
                seeds_b = torch.tensor([requests[row].seed for row in rows])
                draws_b = uniform(seeds_b, [len(requests[row].tokens) for row in rows])
            if sampler.repetition_penalty is not None:
                seen_bw = torch.stack([seen(requests[row], own_bw.shape[1]) for row in rows])
            for row, token in zip(rows, sampler.choose(own_bw, seen_bw, draws_b).tolist(), strict=True):
                chosen[row] = token
        return [self._give(requests[row], chosen.get(row), logits_bw[row]) for row in range(len(requests))]

    def _give(self, request: Request, token: int | None, logits_w: Tensor) -> str | None:
        if token is None:
            return None  # it has failed
        request.tokens.append(token)
        if request.top is not None:
            request.logprobs += log_probabilities(logits_w[None], [token], request.top)
        try:
            reason = request.ends_by()
        except ValueError as error:  # of its constraint
            request.finish("error", error)
            return None
        if reason is None:
            request.tell()
        return reason

    def _wants_state(self, request: Request) -> bool:
        return request.keep_state or self._known is not None

    def _finish(self, request: Request, reason: str, cache: Any) -> None:
        """Take the last token in where the state after it is wanted, and let it go."""
        if self._wants_state(request) and cache is not None and request.tokens:
            with use_backend("torch" if self._backend == "torch" else "auto"):
                last = torch.tensor([request.tokens[-1:]], device=self.model.backbone.embedding.weight.device)
                x_1sd, cache = self.model.backbone(self.model.embed(last), cache)
            ids = (*request.ids, *request.tokens)
            if request.keep_state:
                request.state = State(ids, x_1sd[:, -1].clone(), cache)
            if self._known is not None:
                self._known.keep(self._served, ids, x_1sd[:, -1], cache)
        request.finish(reason)


class Reading:
    """A prompt on its way through the model."""

    def __init__(self, request: Request):
        self.request = request
        self.position, self.started = 0, False
        self.cuts: list[int] = []
        """Numbers of tokens after which the state is kept."""
        self.x_1d: Tensor | None = None
        self.cache: Any = None

    def go_on(self, engine: Engine, budget: int) -> int:
        """Read up to `budget` tokens, to the next place where a state is kept at most; how many it were."""
        request, model = self.request, engine.model
        if not self.started:
            self._start(engine)
            if self.position == len(request.ids):
                return 0
        stop = min(place for place in (*self.cuts, len(request.ids)) if place > self.position)
        upto = min(stop, self.position + budget)
        device = model.backbone.embedding.weight.device
        piece_1s = torch.tensor([request.ids[self.position : upto]], device=device)
        x_1sd, self.cache = model.backbone(model.embed(piece_1s), self.cache)
        if request.echo:
            following = request.ids[self.position + 1 : upto + 1]
            logits_sw = model.logits(x_1sd[0, : len(following)])
            request.prompt_logprobs += log_probabilities(logits_sw, following, request.top or 0)
        read, x_1d = upto - self.position, x_1sd[:, -1]
        self.x_1d, self.position = x_1d, upto
        if engine._known is not None and upto in self.cuts:
            engine._known.keep(engine._served, request.ids[:upto], x_1d, self.cache)
        return read

    def _start(self, engine: Engine) -> None:
        """From the longest state that is known, with the places where states are to be kept on the way."""
        self.started, request = True, self.request
        found: Any = request.given_state
        length = 0 if found is None else len(found.ids)
        if request.echo:
            # Log-probabilities need the residual stream of every token.
            found, length, request.why_not_more = None, 0, "log-probabilities of the prompt were asked for"
        elif engine._known is not None:
            plan = engine._known.plan(engine._served, request.ids, request.ends)
            request.why_not_more = plan.why_not_more
            self.cuts = [*plan.cuts]
            if plan.prefix is not None and plan.prefix.length > length:
                found, length = plan.prefix, plan.prefix.length
        if found is not None:
            self.x_1d, self.cache, self.position = found.x_1d, found.cache, length
            request.reused_tokens = length


class Group:
    """Rows that are computed in one call."""

    def __init__(self, decoder: Decoder | StepByStep):
        self.requests: list[Request] = []
        self.logits_bw = torch.empty(0, 0)
        self._decoder = decoder

    def join(self, request: Request, cache: Any) -> None:
        self._decoder.join(cache)
        self.requests.append(request)

    def leave(self, request: Request) -> None:
        row = self.requests.index(request)
        self._decoder.leave(row)
        last = self.requests.pop()
        if last is not request:
            self.requests[row] = last

    def row(self, request: Request) -> Any:
        return self._decoder.row(self.requests.index(request))

    def take_in(self) -> None:
        """The newest token of every row."""
        self.logits_bw = self._decoder.step(torch.tensor([request.tokens[-1] for request in self.requests]))


def check_model(model: LanguageModel) -> None:
    check_language_model(model)
    if model.backbone.levels:
        raise ValueError("generation is for models without latents: rows of all lengths would share their places")
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ValueError(
            "generate takes whole models, and parameters of this one are shares; load a whole copy, one per process"
        )


def read_all_stops(stop: Any, vocab_size: int, tokenizer: Tokenizer | None) -> Stops:
    if stop is not None and not isinstance(stop, int | Sequence):
        raise ValueError(f"stop is a {type(stop).__name__}, expected ids, strings, or a list of them")
    entries = [] if stop is None else [stop] if isinstance(stop, int | str) else list(stop)
    strings = [entry for entry in entries if isinstance(entry, str)]
    ids = read_stops([entry for entry in entries if not isinstance(entry, str)], vocab_size)
    return Stops([one.tolist() for one in ids], strings, tokenizer)


def log_probabilities(logits_sw: Tensor, tokens: Sequence[int], top: int) -> list[LogProbs]:
    """Of each token under the logits before it, and of the `top` most likely ones."""
    if not tokens:
        return []
    all_sw = logits_sw.to(torch.promote_types(logits_sw.dtype, torch.float32)).log_softmax(-1)
    own = all_sw.gather(1, torch.tensor(tokens, device=all_sw.device)[:, None])[:, 0].tolist()
    if not top:
        return [LogProbs(one, {}) for one in own]
    best, ids = (part.tolist() for part in all_sw.topk(min(top, all_sw.shape[1]), -1))
    return [LogProbs(one, dict(zip(i, b, strict=True))) for one, b, i in zip(own, best, ids, strict=True)]


def seen(request: Request, vocab_size: int) -> Tensor:
    """Which tokens a request's prompt and text hold."""
    found_w = torch.zeros(vocab_size, dtype=torch.bool)
    found_w[torch.tensor([*request.ids, *request.tokens])] = True
    return found_w
