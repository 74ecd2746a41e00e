"""What all handlers share: the model's names and limits, its conversations, and the way into the engine."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mambakit.inference.sampling import row_seeds
from mambakit.models.language_model import LanguageModel
from mambakit.serving.answers import Choice, Piece, usage
from mambakit.serving.errors import ApiError, bad, overloaded
from mambakit.serving.metrics import Metrics
from mambakit.serving.schema import Schema, array, integer, number, optional, record, text
from mambakit.serving.store import Store
from mambakit.serving.tools import Tools
from mambakit.serving.worker import NotBegunError, Worker
from mambakit.text.chat import Chat
from mambakit.text.tokens import Tokens, is_special

FLAG: Schema = {"type": ["boolean", "null"]}
SAMPLING: dict[str, Schema] = {
    "temperature": optional(number(minimum=0, maximum=100)),
    "top_p": optional(number(exclusiveMinimum=0, maximum=1)),
    "top_k": optional(integer(1)),
    "min_p": optional(number(minimum=0, maximum=1)),
    "repetition_penalty": optional(number(minimum=0.01, maximum=100)),
    "seed": optional(integer(-(2**63), 2**63 - 1)),
}
"""How tokens are chosen; beyond OpenAI's fields those of docs/generation.md."""
BIAS: dict[str, Schema] = {
    "frequency_penalty": optional(number(minimum=-2, maximum=2)),
    "presence_penalty": optional(number(minimum=-2, maximum=2)),
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": text(pattern="^[0-9]{1,9}$"),
        "additionalProperties": number(minimum=-100, maximum=100),
        "maxProperties": 1024,
    },
}
"""What is added to logits before that."""
COMMON: dict[str, Schema] = {
    "model": optional(text()),
    **SAMPLING,
    "n": optional(integer(1, 16)),
    "stop": {"anyOf": [text(minLength=1), array(text(minLength=1), maxItems=16), {"type": "null"}]},
    "stream": FLAG,
    "stream_options": optional(
        record(dict.fromkeys(("include_usage", "continuous_usage_stats", "include_obfuscation"), FLAG))
    ),
    "ignore_eos": FLAG,
    **BIAS,
    "user": optional(text()),
}
"""What both kinds of completions take."""
SCHEMA_FIELDS: dict[str, Schema] = {
    "name": text(),
    "schema": {"type": "object"},
    "strict": FLAG,
    "description": optional(text()),
}
FORMS = [
    record({"type": {"enum": ["text", "json_object"]}}, "type"),
    record({"type": {"enum": ["regex"]}, "regex": text(minLength=1)}, "type", "regex"),
    record({"type": {"enum": ["grammar"]}, "grammar": text(minLength=1)}, "type", "grammar"),
]
FORMAT: Schema = {
    "anyOf": [
        record(
            {"type": {"enum": ["json_schema"]}, "json_schema": record(SCHEMA_FIELDS, "schema")}, "type", "json_schema"
        ),
        *FORMS,
        {"type": "null"},
    ]
}
"""The form that an answer has to have; beyond OpenAI's a regular expression and a grammar."""
INERT: dict[str, Schema] = {
    "metadata": optional({"type": "object"}),
    "service_tier": optional(text()),
    "safety_identifier": optional(text()),
    "prompt_cache_key": optional(text()),
    "prompt_cache_retention": optional(text()),
}
"""What names a request to somebody and changes nothing in its answer."""

READING_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_body: int = 10_000_000
    max_waiting: int = 256
    """Requests that wait for a row; more get 429."""
    max_tokens: int = 4096
    """Of an answer whose request names no limit."""
    seconds: float = 600.0
    """An answer that takes longer ends where it is; a request that has not begun by then gets 503."""
    grace: float = 30.0


@dataclass(kw_only=True)
class Service:
    name: str
    model: LanguageModel
    tokens: Tokens
    chat: Chat
    worker: Worker
    store: Store
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    generations: "set[Generation]" = field(default_factory=set)

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def check_model(self, body: dict[str, Any]) -> None:
        asked = body.get("model")
        if asked is not None and asked != self.name:
            message = f"there is no model {asked[:100]!r} here; this is {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _tag(self, mark: str) -> str:
        """A mark in a grammar. Where it is a token that stands for no text, it is named rather than spelled."""
        name, rest = mark.strip(), mark.partition(mark.strip() or " ")
        if not name or not is_special(self.tokens, name):
            return json.dumps(mark) if mark else ""
        parts = (json.dumps(rest[0]) if rest[0] else "", name, json.dumps(rest[2]) if rest[2] else "")
        return " ".join(part for part in parts if part)

    def admit(self, count: int) -> None:
        """ApiError where there is no room for `count` more requests."""
        if self.draining:
            raise overloaded("the server is stopping", status=503)
        if count > self.limits.max_waiting:
            # Nothing would change that.
            raise bad(f"{count} answers are asked for at once, at most {self.limits.max_waiting} are allowed", "n")
        if self.worker.waiting + count > self.limits.max_waiting:
            raise overloaded(f"{self.worker.waiting} requests are waiting already; try again in a moment")

    def begin(
        self,
        prompts: Sequence[tuple[list[int], Sequence[int]]],
        body: dict[str, Any],
        *,
        max_tokens: int | None,
        logprobs: int | None = None,
        stops: Sequence[str] = (),
        echo: bool = False,
        wanted: dict[str, Any] | None = None,
        tools: Tools | None = None,
        **options: Any,
    ) -> "Generation":
        """Answers to `prompts` (ids and ends of messages), `n` of each, in that order; ApiError if there is no room.

        `wanted` is the form the text has to have, as FORMAT describes it; `tools` are functions that it may call.
        """
        count = body.get("n") or 1
        self.admit(len(prompts) * count)
        if any(not ids for ids, _ in prompts):
            raise bad("a prompt has no tokens; it needs at least one")
        stop = body.get("stop") or []
        asked = [stop] if isinstance(stop, str) else stop
        stops = [*asked, *stops]
        stop_ids = () if body.get("ignore_eos") else self.chat.stop_ids
        sampling = {name: body[name] for name in (*SAMPLING, *BIAS) if body.get(name) is not None and name != "seed"}
        if "logit_bias" in sampling:
            sampling["logit_bias"] = {int(token): number for token, number in sampling["logit_bias"].items()}
        constraint = constraint_of(wanted) if tools is None else tools.constraint(self._tag)
        if constraint is not None:
            # Its form says where it ends.
            options["constraint"], stops = constraint, asked
        choices = []
        for ids, ends in prompts:
            for seed in row_seeds(body.get("seed"), count).tolist():
                answer = self.worker.submit(
                    ids,
                    max_new_tokens=self.limits.max_tokens if max_tokens is None else max_tokens,
                    stop=[*stop_ids, *stops] or None,
                    seed=seed,
                    logprobs=logprobs,
                    echo=echo,
                    ends=tuple(ends),
                    **sampling,
                    **options,
                )
                choices.append(Choice(answer, self.tokens, stops, stop_ids))
        return Generation(self, [len(ids) for ids, _ in prompts], choices)


class Generation:
    """Answers of one HTTP request, on their way together."""

    def __init__(self, service: Service, prompt_tokens: list[int], choices: list[Choice]):
        self._service, self._prompt_tokens, self.choices = service, prompt_tokens, choices
        self._began = time.monotonic()
        self._first, self._closed = True, False
        self.seconds = service.limits.seconds + READING_SECONDS
        """After which even a client that reads slowly has had its time."""
        self._timer = asyncio.get_running_loop().call_later(service.limits.seconds, self.cancel)
        service.generations.add(self)

    async def taken(self) -> None:
        """When the engine has taken all of it; ApiError if it refuses something, such as a form it cannot compile."""
        try:
            await asyncio.gather(*(choice.answer.taken for choice in self.choices))
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                raise told(error) from error
            raise

    def cancel(self) -> None:
        """End all answers where they are."""
        for choice in self.choices:
            choice.answer.cancel()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Each with the place of its choice, as they come. Leaving this early cancels what is left."""
        ready: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()

        async def pump(place: int, choice: Choice) -> None:
            try:
                async for piece in choice.pieces():
                    ready.put_nowait((place, piece))
                ready.put_nowait(None)
            except Exception as error:
                ready.put_nowait(error)

        pumps = [asyncio.ensure_future(pump(*one)) for one in enumerate(self.choices)]
        left = len(pumps)
        try:
            while left:
                found = await ready.get()
                if isinstance(found, Exception):
                    raise told(found) from found
                if found is None:
                    left -= 1
                    continue
                if self._first:
                    self._first = False
                    self._service.metrics.first_token(time.monotonic() - self._began)
                yield found
        finally:
            for one in pumps:
                one.cancel()
            self.close()

    def close(self) -> None:
        """Nobody asks for more; may be called again."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        self.cancel()
        self._service.generations.discard(self)
        self._service.metrics.answered(self.usage(), time.monotonic() - self._began)

    async def collect(self) -> list[list[Piece]]:
        """All pieces of every choice."""
        found: list[list[Piece]] = [[] for _ in self.choices]
        pieces = self.pieces()
        try:
            async for place, piece in pieces:
                found[place].append(piece)
        finally:
            await pieces.aclose()
        return found

    def usage(self) -> dict[str, Any]:
        """Of several answers to one prompt, the prompt counts once, and what its first answer reused of it."""
        count = len(self.choices) // len(self._prompt_tokens)
        firsts = [choice.answer.request for choice in self.choices[::count]]
        cached = sum(request.reused_tokens for request in firsts if request is not None)
        completion = sum(choice.completion_tokens for choice in self.choices)
        why = getattr(firsts[0], "why_not_more", None) if len(firsts) == 1 else None
        return usage(sum(self._prompt_tokens), completion, cached, why)


def told(error: Exception) -> Exception:
    """What a client hears of it."""
    if isinstance(error, NotBegunError):
        return overloaded("the request waited for too long", status=503, seconds=5)
    return bad(str(error)) if isinstance(error, ValueError | ImportError) else error


def constraint_of(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """In the engine's words."""
    kind = "text" if wanted is None else wanted["type"]
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        # Chats have it inside of an object of that name, responses beside it.
        return wanted.get("json_schema", wanted)["schema"]
    return {kind: wanted[kind]}


def embed_steps(model: LanguageModel, ids: Sequence[int], chunk: int = 512) -> Any:
    """The mean of the residual stream after the last layer over the tokens, a list of numbers, at the last step."""
    total_d = torch.zeros(model.config.d_model, dtype=torch.float64)
    cache = None
    device = model.backbone.embedding.weight.device
    for start in range(0, len(ids), chunk):
        with torch.inference_mode():
            ids_1s = torch.tensor([ids[start : start + chunk]], device=device)
            x_1sd, cache = model.backbone(model.embed(ids_1s), cache)
            total_d += x_1sd[0].double().sum(0).cpu()
        yield None
    yield (total_d / len(ids)).tolist()
