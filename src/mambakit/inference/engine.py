"""Many requests through one model: rows that come and go at any step, prompts read in pieces in between.

What a request gets does not depend on who else is there. Its prompt is read by itself; its tokens are computed together
with others' by kernels whose rows do not touch one another; its draws are those of its own seed.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mambakit.arguments import check_count, check_flag, shown
from mambakit.blocks.caches import select
from mambakit.blocks.shares import check_whole
from mambakit.inference.bias import make_bias
from mambakit.inference.constraints import Constraint
from mambakit.inference.decoder import Decoder, check_one_call, check_states, make_decoder
from mambakit.inference.guesses import Ngrams
from mambakit.inference.prefix_cache import PrefixCache, check_prefix_cache
from mambakit.inference.prompts import Stop, read_ids, read_stops
from mambakit.inference.reading import Known, Reading, device_of
from mambakit.inference.requests import Request, State, Stops, Tokenizer, check_state
from mambakit.inference.rows import Group, choose
from mambakit.inference.sampling import Sampler, row_seeds
from mambakit.inference.speculation import Speculation, is_wanted
from mambakit.models.language_model import LanguageModel, check_language_model
from mambakit.ops import few_rows
from mambakit.ops.backends import check_backend, use_backend


class Engine:
    """`request = engine.add(ids, max_new_tokens=...)`, then `engine.step()` until `request.done`; see docs/serving.md.

    At most `max_rows` requests are computed at a time; others wait. `add` and `cancel` may be called from any thread,
    and one thread steps. The model's weights stay as they are while an engine uses them.

    Prompts are read `prefill_chunk` tokens at a time, in turn those of the request that came first and of the one with
    the least left to read: a short one does not wait for a long one, nor a long one for ever. `prefill_rows` of them
    are read in one pass. More than one is faster where prompts are short, but torch's products add in an order that may
    depend on the others, so what a request gets does too, by rounding.

    `speculate` is `mk.generate`'s, without a draft: while one request is alone, several of its tokens may be computed
    at a time. Tokens stay those of `"off"`. `states` is `mk.generate`'s too.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> from mambakit.inference import Engine
        >>> engine = Engine(model)
        >>> requests = [engine.add([72, 105], 5, seed=1), engine.add([87, 104, 121], 3, temperature=0)]
        >>> engine.run()
        >>> [len(request.tokens) for request in requests]
        [5, 3]
    """

    def __init__(
        self,
        model: LanguageModel,
        max_rows: int = 64,
        prefix_cache: PrefixCache | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        prefill_chunk: int = 512,
        prefill_rows: int = 1,
        backend: str = "auto",
        speculate: str = "off",
        states: str = "float32",
    ):
        check_count("max_rows", max_rows, least=1)
        check_count("prefill_chunk", prefill_chunk, least=1)
        check_count("prefill_rows", prefill_rows, least=1)
        check_model(model)
        check_backend(backend)
        check_one_call(model, backend)
        check_prefix_cache(prefix_cache)
        check_states(model, backend, states)
        if states != "float32" and speculate == "ngram":
            raise ValueError(f'states="{states}": tokens are computed one by one then; leave out speculate')
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise ValueError(f"tokenizer is a {type(tokenizer).__name__}, expected one with decode(ids)")
        if prefix_cache is not None and prefill_rows > 1:
            raise ValueError("prompts that go on from a prefix_cache are read one by one; leave out prefill_rows")
        self.model, self.tokenizer, self.max_rows = model, tokenizer, max_rows
        self._chunk, self._together, self._backend = prefill_chunk, prefill_rows, backend
        self._guesses = is_wanted(speculate, model, 1, backend) and states == "float32"
        self._states = states
        self._known = None if prefix_cache is None else Known(prefix_cache, model)
        self._new: deque[Request] = deque()
        self._line: list[Request] = []
        """Requests whose prompts have not been read to their ends, as they came."""
        self._readings: dict[Request, Reading] = {}
        """Of those, the ones that are being read."""
        self._turns = 0
        self._groups: list[Group] = []
        self._stepping = threading.Lock()

    @property
    def waiting(self) -> int:
        """Requests whose prompts have not been read to their ends."""
        return len(self._new) + len(self._line)

    @property
    def active(self) -> int:
        """Requests that get a token with every step."""
        return sum(len(group.requests) for group in self._groups)

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
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        stop: Stop | str | Sequence[int | str | Sequence[int]] | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        echo: bool | int = False,
        ends: Sequence[int] = (),
        keep_state: bool = False,
        state: State | None = None,
        constraint: dict[str, Any] | None = None,
        on_token: Callable[[Request], None] | None = None,
    ) -> Request:
        """Put a request in line. ValueError, and nothing is put, where something in it makes no sense.

        `logit_bias` is added to the logits of its tokens, `{id: number}`; the frequency penalty is taken off those of a
        token for each time that the new text has said it, the presence penalty once.

        Without `max_new_tokens` nothing ends it but a stop, the end of its constraint's form, or `cancel`. `stop` are
        ids, sequences of ids and strings. `logprobs` asks for log-probabilities, of the tokens that come and of so many
        likely ones; `echo` for the prompt's too, or, a number, for those from that token on. `ends` are numbers of
        tokens after which a message ends: states are kept there. `state` is one to begin from, whose ids begin the
        prompt; `keep_state` asks for the one after all tokens. `constraint` is the form that the text has to have: a
        JSON schema, `{"regex": ...}` or `{"grammar": ...}`; it needs the tokenizer. `on_token(request)` is called by
        the thread that steps, after each token and at the end.
        """
        vocabulary = self.model.config.vocab_size
        check_count("max_new_tokens", max_new_tokens, least=0, optional=True)
        check_count("logprobs", logprobs, least=0, most=2**31, optional=True)
        check_count("echo", int(echo) if isinstance(echo, bool) else echo, least=0)
        sampler = Sampler(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
        )
        prompt = read_ids("ids", ids, vocabulary).tolist()
        check_flag("keep_state", keep_state)
        if not isinstance(ends, Sequence):
            raise ValueError(f"ends is a {type(ends).__name__}, expected a list of numbers of tokens")
        if state is not None:
            check_state(state, self.model.config.d_model)
        if on_token is not None and not callable(on_token):
            raise ValueError(f"on_token is a {type(on_token).__name__}, expected a function of a request")
        if state is not None and list(state.ids) != prompt[: len(state.ids)]:
            raise ValueError("the prompt does not begin with the tokens of its state; leave the state out")
        if any(type(end) is not int or not 0 < end <= len(prompt) for end in ends):
            raise ValueError(
                f"ends = {shown(list(ends))} has to be numbers of tokens from 1 to the prompt's {len(prompt)}"
            )
        request = Request(
            prompt,
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            seed=int(row_seeds(seed, 1)[0]),
            stops=read_all_stops(stop, vocabulary, self.tokenizer),
            constraint=None
            if constraint is None
            else Constraint(constraint, self.tokenizer, vocabulary, max_new_tokens),
            bias=make_bias(vocabulary, logit_bias, frequency_penalty, presence_penalty),
            logprobs=logprobs,
            echo=int(echo),
            ends=tuple(ends),
            keep_state=keep_state,
            state=state,
            on_token=on_token,
        )
        self._new.append(request)
        return request

    def step(self) -> bool:
        """Give every row its next token and read a piece of waiting prompts; False when nothing is left to do."""
        with self._stepping, torch.no_grad():
            self._let_go_of_cancelled()
            self._decode()
            if self._line:
                self._read()
        return bool(self.waiting or self.active)

    def run(self) -> None:
        """Until all requests are done."""
        while self.step():
            pass

    def _let_go_of_cancelled(self) -> None:
        while self._new:
            self._line.append(self._new.popleft())
        for request in [request for request in self._line if request.is_cancelled]:
            self._take_out([request])
            request.finish("cancelled")
        for group in self._groups:
            for request in [request for request in group.requests if request.is_cancelled]:
                group.leave(request)
                request.finish("cancelled")

    def _take_out(self, requests: Sequence[Request]) -> None:
        """Of the line."""
        for request in requests:
            self._line.remove(request)
            self._readings.pop(request, None)

    def _decode(self) -> None:
        # The first stays, as making one takes as long as many tokens.
        self._groups = [group for group in self._groups if group.requests] or self._groups[:1]
        for group in self._groups:
            if not group.requests:
                continue
            group.take_in()
            requests = list(group.requests)
            for request, reason in zip(requests, choose(requests, group.logits_bw, group.best), strict=True):
                if reason is None and not request.done:
                    continue
                cache = group.row(request) if reason is not None and self._wants_state(request) else None
                group.leave(request)
                if reason is not None:
                    self._finish(request, reason, cache)

    def _read(self) -> None:
        """As many tokens as a piece has, of one prompt or of several short ones."""
        left = self._chunk * self._together
        while (requests := self._whose_turn()) and left > 0:
            try:
                with use_backend(reading_backend(self._backend)):
                    reading = self._readings.get(requests[0])
                    if reading is None:
                        reading = Reading(self.model, requests, self._chunk, known=self._known)
                        self._readings |= dict.fromkeys(requests, reading)
                    if left < self._chunk * self._together and reading.next_piece > left:
                        break
                    left -= reading.next_piece
                    if not reading.is_done:
                        reading.go_on()
                        self._turns += 1
                    if reading.is_done:
                        self._begin(reading)
            except Exception as error:  # of these requests alone: the others go on
                failed = [request for request in requests if request in self._line]
                self._take_out(failed)
                for request in failed:
                    request.finish("error", error)

    def _whose_turn(self) -> Sequence[Request]:
        """The requests whose prompts are read next, together."""
        room = self.max_rows - self.active - len(self._readings)
        able = self._line if room > 0 else list(self._readings)
        if not able:
            return ()
        order = sorted(able, key=self._left) if self._turns % 2 else able
        if order[0] in self._readings:
            return self._readings[order[0]].requests
        return [request for request in order if request not in self._readings][: min(room, self._together)]

    def _left(self, request: Request) -> int:
        """Tokens to be read before its first."""
        reading = self._readings.get(request)
        known = 0 if request.given_state is None else len(request.given_state.ids)
        return len(request.ids) - known if reading is None else reading.left

    def _begin(self, reading: Reading) -> None:
        """Prompts have been read; their first tokens."""
        for row, request in enumerate(reading.requests):
            if request.done:
                continue  # it was cancelled
            if request.ends_with_prompt:
                reason, cache = "length", None
            else:
                assert reading.x_bd is not None
                x_1d = reading.x_bd[row : row + 1]
                cache = reading.cache if len(reading.requests) == 1 else select(reading.cache, [row])
                if request.max_new_tokens == 0:
                    reason, request.state = "length", State(tuple(request.ids), x_1d.clone(), cache)
                else:
                    (reason,) = choose([request], self.model.logits(x_1d))
            if reason is None and not request.done:
                self._group_with_room().join(request, cache)
            self._take_out([request])
            if reason is not None:
                self._finish(request, reason, cache)

    def _group_with_room(self) -> Group:
        for group in self._groups:
            if len(group.requests) < group.room:
                return group
        decoder = make_decoder(self.model, self._backend, self._states)
        # In one call rows do not touch one another; step by step, that holds for so many.
        room = self.max_rows if isinstance(decoder, Decoder) else few_rows.MAX_ROWS
        speculation = Speculation(decoder, Ngrams) if self._guesses and isinstance(decoder, Decoder) else None
        self._groups.append(Group(decoder, room, speculation))
        return self._groups[-1]

    def _wants_state(self, request: Request) -> bool:
        return request.keep_state or self._known is not None

    def _finish(self, request: Request, reason: str, cache: Any) -> None:
        """Take the last token in where the state after it is wanted, and let it go."""
        if request.tokens and self._wants_state(request):
            with use_backend(reading_backend(self._backend)):
                last = torch.tensor([request.tokens[-1:]], device=device_of(self.model))
                x_1sd, cache = self.model.backbone(self.model.embed(last), cache)
            ids = (*request.ids, *request.tokens)
            if request.keep_state:
                request.state = State(ids, x_1sd[:, -1].clone(), cache)
            if self._known is not None:
                self._known.prefixes.keep(self._known.served, ids, x_1sd[:, -1], cache)
        request.finish(reason)


def reading_backend(backend: str) -> str:
    """What reads prompts where tokens are computed by `backend`."""
    return "torch" if backend == "torch" else "auto"


def check_model(model: LanguageModel) -> None:
    check_language_model(model)
    if model.backbone.levels:
        raise ValueError("generation is for models without latents: rows of all lengths would share their places")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device, where weights have no numbers; load it onto another one")
    check_whole("generate", model)


def read_all_stops(stop: Any, vocab_size: int, tokenizer: Tokenizer | None) -> Stops:
    if stop is not None and not isinstance(stop, int | Sequence):
        raise ValueError(f"stop is a {type(stop).__name__}, expected ids, strings, or a list of them")
    entries = [] if stop is None else [stop] if isinstance(stop, int | str) else list(stop)
    strings = [entry for entry in entries if isinstance(entry, str)]
    ids = read_stops([entry for entry in entries if not isinstance(entry, str)], vocab_size)
    return Stops(ids, strings, tokenizer)
