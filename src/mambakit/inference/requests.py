"""What is asked of an engine, and how far it has come."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mambakit.inference.bias import Bias
from mambakit.inference.constraints import Constraint
from mambakit.inference.sampling import Sampler
from mambakit.ops.shapes import FLOATS, check_dense
from mambakit.text.tokens import certain


class Tokenizer(Protocol):
    """What turns ids into text, such as those of `mambakit.text.tokens`."""

    def decode(self, ids: Sequence[int]) -> str: ...


class State(NamedTuple):
    """Where a model stands after some tokens.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> from mambakit.inference import Engine
        >>> engine = Engine(model)
        >>> request = engine.add([72, 105], max_new_tokens=5, keep_state=True)
        >>> engine.run()
        >>> more = engine.add([*request.state.ids, 33], max_new_tokens=5, state=request.state)
        >>> engine.run()
        >>> more.reused_tokens
        7
    """

    ids: tuple[int, ...]
    x_1d: Tensor
    """The residual stream at the last of them: what the next token's logits are made of."""
    cache: Any


def check_state(state: Any, d_model: int) -> None:
    """That it is one, with numbers in it; whether its cache is the model's, the model's blocks know."""
    if not isinstance(state, State):
        raise ValueError(f"state is a {type(state).__name__}, expected the State of a request")
    for part in tree_leaves((state.x_1d, state.cache)):
        check_dense("a tensor of the state", part)
    x_1d = state.x_1d
    if not isinstance(x_1d, Tensor) or tuple(x_1d.shape) != (1, d_model) or x_1d.dtype not in FLOATS:
        given = f"{x_1d.dtype} of shape {tuple(x_1d.shape)}" if isinstance(x_1d, Tensor) else type(x_1d).__name__
        raise ValueError(f"state.x_1d is {given}, expected a floating-point tensor of shape (1, {d_model})")


class LogProbs(NamedTuple):
    """A token's log-probability, and those of the most likely ones.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> from mambakit.inference import Engine
        >>> engine = Engine(model)
        >>> request = engine.add([72, 105], max_new_tokens=5, logprobs=3)
        >>> engine.run()
        >>> request.logprobs[0].logprob < 0, len(request.logprobs[0].likeliest)
        (True, 3)
    """

    logprob: float
    """Of the token that came."""
    likeliest: dict[int, float]
    """The most likely ones, as many as were asked for."""


class Request:
    """One prompt and what follows it. Its fields may be read from any thread at any time.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> from mambakit.inference import Engine
        >>> engine = Engine(model)
        >>> request = engine.add([72, 105], max_new_tokens=5)
        >>> while engine.step():
        ...     pass
        >>> request.done, request.finish_reason, request.reused_tokens
        (True, 'length', 0)
    """

    def __init__(
        self,
        ids: list[int],
        *,
        max_new_tokens: int | None,
        sampler: Sampler,
        seed: int,
        stops: "Stops",
        constraint: Constraint | None = None,
        bias: Bias | None = None,
        logprobs: int | None = None,
        echo: int = 0,
        ends: Sequence[int] = (),
        keep_state: bool = False,
        state: State | None = None,
        on_token: "Callable[[Request], None] | None" = None,
    ):
        self.ids = ids
        self.max_new_tokens, self.sampler, self.seed = max_new_tokens, sampler, seed
        self.stops, self.constraint, self.bias, self.top, self.echo = stops, constraint, bias, logprobs, echo
        self.ends, self.keep_state, self.given_state, self.on_token = ends, keep_state, state, on_token
        self.tokens: list[int] = []
        """New ones, a stop included."""
        self.logprobs: list[LogProbs] = []
        """Of each new token, where asked for."""
        self.prompt_logprobs: list[LogProbs] = []
        """Of each of the prompt's tokens from the one that `echo` names; of the first there is none."""
        self.reused_tokens = 0
        self.why_not_more = ""
        """Why not more of the prompt was known already, in a clause."""
        self.state: State | None = None
        """After all of it, with `keep_state`."""
        self.finish_reason: str | None = None
        """"stop", "length", "cancelled" or "error"; None while it goes on."""
        self.error: Exception | None = None
        self.is_cancelled = False
        self._finished = threading.Event()
        self._seen_w: Tensor | None = None
        self._seen_count = 0
        """New tokens that are in it."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids)

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def ends_with_prompt(self) -> bool:
        """Whether nothing is asked for that comes after the prompt."""
        return self.max_new_tokens == 0 and not self.keep_state

    @property
    def takes_best(self) -> bool:
        """Whether its next token is the likeliest one as the model has it."""
        return self.constraint is None and self.bias is None and self.sampler.takes_best

    @property
    def text(self) -> str:
        """What the new tokens say, up to a stop string if one came."""
        return self.stops.text(self.tokens, final=self.done)

    def cancel(self) -> None:
        """Let go of it at the next step; what has come stays."""
        self.is_cancelled = True

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is done, while another thread steps the engine."""
        return self._finished.wait(timeout)

    def settle(self, token: int) -> int:
        """For the engine: the token that comes when this one was drawn. ValueError where a constraint cannot go on."""
        return token if self.constraint is None else self.constraint.take(token)

    def ends_by(self) -> str | None:
        """For the engine, after a token: what ends it."""
        complete = self.constraint is not None and self.constraint.complete
        if self.stops.found(self.tokens) or complete:
            return "stop"
        return "length" if len(self.tokens) == self.max_new_tokens else None

    def seen(self, vocab_size: int) -> Tensor:
        """For the engine: which tokens the prompt and the text hold."""
        if self._seen_w is None:
            self._seen_w = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen_w[torch.tensor(self.ids)] = True
        for token in self.tokens[self._seen_count :]:
            self._seen_w[token] = True
        self._seen_count = len(self.tokens)
        return self._seen_w

    def finish(self, reason: str, error: Exception | None = None) -> None:
        """For the engine."""
        self.finish_reason, self.error = reason, error
        self._finished.set()
        self.tell()

    def tell(self) -> None:
        """An `on_token` that raises ends its own request with that, and is not called again.

        A request that has failed already keeps what it failed of.
        """
        if self.on_token is None:
            return
        try:
            self.on_token(self)
        except Exception as error:
            self.on_token, self.error = None, error if self.error is None else self.error
            if not self.done:
                self.finish("error", error)


class Stops:
    """What ends a request: sequences of ids, and strings that a tokenizer's text may come to hold."""

    WINDOW = 16
    """Tokens that are decoded again with every new one: more than one character takes."""

    def __init__(
        self, ids: Sequence[Sequence[int]] = (), strings: Sequence[str] = (), tokenizer: Tokenizer | None = None
    ):
        if strings and tokenizer is None:
            raise ValueError("stop strings are found in text, so the engine needs a tokenizer")
        if not all(strings):
            raise ValueError("a stop string is empty")
        self._ids, self._strings, self._tokenizer = [list(one) for one in ids], list(strings), tokenizer
        self._said, self._counted = "", 0
        self._lock = threading.Lock()

    def found(self, tokens: list[int]) -> bool:
        """Whether these tokens, of which all but the last were asked for before, end it."""
        if any(tokens[-len(one) :] == one for one in self._ids):
            return True
        return bool(self._strings) and self._cut(self._text(tokens)) is not None

    def text(self, tokens: Sequence[int], final: bool) -> str:
        """Without what a stop string cuts off, and, while it goes on, without what may become one."""
        said = self._text(tokens)
        cut = self._cut(said)
        if cut is not None:
            return said[:cut]
        if final:
            return said
        said = certain(said)
        longest = max(map(len, self._strings), default=1) - 1
        for length in range(min(longest, len(said)), 0, -1):
            if any(one.startswith(said[-length:]) for one in self._strings):
                return said[:-length]
        return said

    def _cut(self, said: str) -> int | None:
        said = certain(said)
        places = [place for place in (said.find(one) for one in self._strings) if place >= 0]
        return min(places, default=None)

    def _text(self, tokens: Sequence[int]) -> str:
        """Decoded in pieces, so that a long text is not decoded whole again for every token."""
        if self._tokenizer is None:
            raise ValueError("text needs an engine with a tokenizer")
        with self._lock:
            # What lies far enough back no longer changes with what comes, if it ends in a whole character.
            while len(tokens) - self._counted > 2 * self.WINDOW:
                most = self._counted + self.WINDOW
                upto = next((upto for upto in range(most, most - 4, -1) if self._is_whole(tokens, upto)), None)
                if upto is None:
                    break
                self._said, self._counted = self._said + self._piece(tokens, upto), upto
            return self._said + self._piece(tokens, len(tokens))

    def _is_whole(self, tokens: Sequence[int], upto: int) -> bool:
        """Whether no character goes on there: the next tokens would make another one of what it looks like."""
        piece = self._piece(tokens, upto)
        return not piece.endswith("\ufffd") or self._piece(tokens, upto + self.WINDOW).startswith(piece)

    def _piece(self, tokens: Sequence[int], upto: int) -> str:
        """What tokens from the counted ones on add, told with the ones before, on which a space may depend."""
        assert self._tokenizer is not None
        before = list(tokens[max(0, self._counted - self.WINDOW) : self._counted])
        known = self._tokenizer.decode(before) if before else ""
        return self._tokenizer.decode([*before, *tokens[self._counted : upto]])[len(known) :]
