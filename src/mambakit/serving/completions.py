"""`POST /v1/completions`: text or token ids as they are, with `echo` and `logprobs` as lm-eval asks for them."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from mambakit.serving.answers import Piece, Text, Token, token_text, top_entries
from mambakit.serving.chat_completions import finite
from mambakit.serving.errors import bad
from mambakit.serving.exchange import Events
from mambakit.serving.schema import Schema, array, integer, not_built, optional, record, text
from mambakit.serving.service import COMMON, FLAG, FORMAT, Generation, Service


def texts_or_ids(vocab_size: int) -> Schema:
    """One or several, of a model's vocabulary."""
    ids = array(integer(0, vocab_size - 1), minItems=1)
    texts = array(text(minLength=1), minItems=1, maxItems=128)
    return {"anyOf": [text(minLength=1), texts, ids, array(ids, minItems=1, maxItems=128)]}


def make_schema(vocab_size: int) -> Schema:
    return record(
        {
            **COMMON,
            "prompt": texts_or_ids(vocab_size),
            "max_tokens": optional(integer(0)),
            "logprobs": optional(integer(0, 20)),
            "echo": FLAG,
            "best_of": not_built("integer", minimum=1, maximum=1),
            "suffix": not_built("string", maxLength=0),
            "response_format": FORMAT,
        },
        "prompt",
    )


EXAMPLE = {"prompt": "def ", "max_tokens": 16}
MAX_TOKENS = 16
"""OpenAI's, where a request names none."""


async def handle(service: Service, body: dict[str, Any]) -> dict[str, Any] | Events:
    service.check_model(body)
    prompts = await read_prompts(service, body["prompt"])
    wanted, echo = body.get("logprobs"), bool(body.get("echo"))
    limit = MAX_TOKENS if body.get("max_tokens") is None else body["max_tokens"]
    rows = [(ids, ()) for ids in prompts]
    run = service.begin(
        rows,
        body,
        max_tokens=limit,
        logprobs=wanted,
        echo=echo and wanted is not None,
        wanted=body.get("response_format"),
    )
    await run.taken()
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
    head["model"] = service.name
    count = body.get("n") or 1
    prompts = [ids for ids in prompts for _ in range(count)]
    if body.get("stream"):
        return Events(chunks(service, run, head, prompts, body), run.close, run.seconds)
    found = await run.collect()
    choices = []
    for index, pieces in enumerate(found):
        if echo:
            pieces = [echoed(service, run, index, prompts[index]), *moved(service, prompts[index], pieces)]
        choices.append(choice(service, index, pieces, wanted))
    return {**head, "choices": choices, "usage": run.usage()}


async def read_prompts(service: Service, prompt: Any) -> list[list[int]]:
    """Ids of every prompt; text is encoded as it is, with nothing before it."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    if isinstance(prompt[0], str):
        try:
            return await asyncio.to_thread(lambda: [service.tokens.encode(one.encode()) for one in prompt])
        except ValueError as error:
            raise bad(str(error), "prompt") from error
    return prompt


def text_of(service: Service, ids: Sequence[int]) -> str:
    return "".join(service.tokens.pieces(iter(ids)))


def echoed(service: Service, run: Generation, index: int, ids: list[int]) -> Piece:
    """The prompt itself, with the log-probabilities of its tokens where they were computed."""
    # The first token of a prompt follows nothing.
    known = [None, *run.choices[index].answer.request.prompt_logprobs]
    known += [None] * (len(ids) - len(known))
    text, tokens = Text(service.tokens, ()), []
    for id, one in zip(ids, known, strict=True):
        logprob, top = (None, {}) if one is None else one
        tokens.append(Token(id, logprob, top, text.length))
        text.push(id)
    return Piece(text_of(service, ids), tokens, None)


def moved(service: Service, ids: list[int], pieces: list[Piece]) -> list[Piece]:
    """With offsets counted from the start of the prompt."""
    by = len(text_of(service, ids))
    return [
        piece._replace(tokens=[token._replace(offset=token.offset + by) for token in piece.tokens]) for piece in pieces
    ]


def choice(service: Service, index: int, pieces: list[Piece], wanted: int | None) -> dict[str, Any]:
    tokens = [token for piece in pieces for token in piece.tokens]
    return {
        "index": index,
        "text": "".join(piece.text for piece in pieces),
        "logprobs": None if wanted is None else logprobs_of(service, tokens, wanted),
        "finish_reason": pieces[-1].finish if pieces else None,
    }


async def chunks(
    service: Service, run: Generation, head: dict[str, Any], prompts: list[list[int]], body: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    options, wanted, echo = body.get("stream_options") or {}, body.get("logprobs"), bool(body.get("echo"))
    silent = set(range(len(prompts))) if echo else set()
    async for index, piece in run.pieces():
        pieces = [piece]
        if echo:
            pieces = moved(service, prompts[index], pieces)
        if index in silent:
            silent.discard(index)
            pieces = [echoed(service, run, index, prompts[index]), *pieces]
        if any(one.text or one.finish for one in pieces) or wanted is not None:
            usage = {"usage": run.usage()} if options.get("continuous_usage_stats") else {}
            yield {**head, "choices": [choice(service, index, pieces, wanted)], **usage}
    if options.get("include_usage"):
        yield {**head, "choices": [], "usage": run.usage()}
    yield "[DONE]"


def logprobs_of(service: Service, tokens: list[Token], wanted: int) -> dict[str, Any]:
    def named(top: dict[int, float]) -> dict[str, float]:
        return {token_text(service.tokens, id): finite(logprob) for id, logprob in top_entries(top, wanted)}

    return {
        "tokens": [token_text(service.tokens, token.id) for token in tokens],
        "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
        "top_logprobs": [None if token.logprob is None else named(token.top) for token in tokens] if wanted else None,
        "text_offset": [token.offset for token in tokens],
    }
