"""`POST /v1/chat/completions`."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from mambakit.serving.answers import Piece, Token, token_bytes, token_text, top_entries
from mambakit.serving.errors import bad
from mambakit.serving.exchange import Events
from mambakit.serving.schema import Schema, array, integer, not_built, optional, record, text
from mambakit.serving.service import COMMON, FLAG, FORMAT, INERT, Generation, Service
from mambakit.serving.tools import CALL, CHOICE, TOOLS, Calls, Delta, Tools, read_calls, read_tools
from mambakit.text.chat import Message, Rendered

PART = record({"type": {"enum": ["text"]}, "text": text()}, "type", "text")
NOTHING: Schema = {"type": "null"}
MESSAGE = record(
    {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [text(), array(PART, minItems=1), {"type": "null"}]},
        "name": optional(text()),
        "tool_call_id": optional(text()),
        "tool_calls": optional(array(CALL)),
        "refusal": optional(text()),
        "annotations": optional(array({})),
        "audio": NOTHING,
        "function_call": NOTHING,
    },
    "role",
)
# As `read_messages` checks it.
HAS_CONTENT: Schema = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
MAY_BE_EMPTY: Schema = {"properties": {"role": {"enum": ["assistant"]}}}
MESSAGE["anyOf"] = [HAS_CONTENT, MAY_BE_EMPTY]
SCHEMA = record(
    {
        **COMMON,
        **INERT,
        "messages": array(MESSAGE, minItems=1),
        "max_tokens": optional(integer(1)),
        "max_completion_tokens": optional(integer(1)),
        "logprobs": FLAG,
        "top_logprobs": optional(integer(0, 20)),
        "response_format": FORMAT,
        "tools": TOOLS,
        "tool_choice": CHOICE,
        "parallel_tool_calls": FLAG,
        "store": FLAG,
        "reasoning_effort": not_built("string", maxLength=0),
        "verbosity": not_built("string", maxLength=0),
        "prediction": not_built("object", maxProperties=0),
        "web_search_options": not_built("object", maxProperties=0),
        "modalities": optional(array({"enum": ["text"]})),
    },
    "messages",
)
EXAMPLE = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}


def read_messages(messages: list[dict[str, Any]]) -> list[Message]:
    for place, message in enumerate(messages):
        if message.get("content") is None and message["role"] != "assistant":
            name = f"messages[{place}].content"
            raise bad(f"{name} is missing; only an assistant's message may be without", name)
    return [read_message(one) for one in messages]


def read_message(message: dict[str, Any]) -> Message:
    """A message as templates read it: its content in one text."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    read = {**{name: value for name, value in message.items() if value is not None}, "content": content or ""}
    return {**read, "tool_calls": read_calls(read["tool_calls"])} if read.get("tool_calls") else read


async def render(service: Service, messages: list[Message], tools: Tools | None) -> Rendered:
    functions = None if tools is None else [{"type": "function", "function": one} for one in tools.functions]
    try:
        # Beside the event loop: a long conversation takes a while.
        return await asyncio.to_thread(service.chat.render, messages, functions)
    except ValueError as error:
        raise bad(str(error), "messages") from error


async def handle(service: Service, body: dict[str, Any]) -> dict[str, Any] | Events:
    service.check_model(body)
    tools = read_tools(body, service.chat.calls)
    rendered = await render(service, read_messages(body["messages"]), tools)
    wanted = body.get("top_logprobs") or (0 if body.get("logprobs") else None)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    run = service.begin(
        [(rendered.ids, rendered.ends)],
        body,
        max_tokens=limit,
        logprobs=wanted,
        stops=service.chat.stops,
        wanted=body.get("response_format"),
        tools=tools,
    )
    await run.taken()
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.name}
    if body.get("stream"):
        return Events(chunks(service, run, head, body, wanted, tools), run.close, run.seconds)
    choices = [message_of(service, *one, wanted, tools) for one in enumerate(await run.collect())]
    return {**head, "object": "chat.completion", "choices": choices, "usage": run.usage()}


def message_of(
    service: Service, index: int, pieces: list[Piece], wanted: int | None, tools: Tools | None
) -> dict[str, Any]:
    tokens, calls = [token for piece in pieces for token in piece.tokens], calls_for(tools)
    calls.push("".join(piece.text for piece in pieces))
    calls.end()
    return {
        "index": index,
        "message": {**calls.message(), "refusal": None},
        "logprobs": None if wanted is None else logprobs_of(service, tokens, wanted),
        "finish_reason": finish_of(pieces[-1], calls),
    }


def calls_for(tools: Tools | None) -> Calls:
    return Calls(None) if tools is None else Calls(tools.form, [one["name"] for one in tools.functions])


def finish_of(piece: Piece, calls: Calls) -> str | None:
    return "tool_calls" if piece.finish == "stop" and calls.calls else piece.finish


def delta_of(delta: Delta) -> dict[str, Any]:
    if delta.call is None:
        return {"content": delta.text}
    function = {"name": delta.call.name, "arguments": ""} if delta.new else {"arguments": delta.text}
    begun = {"id": delta.call.id, "type": "function"} if delta.new else {}
    return {"tool_calls": [{"index": delta.call.index, **begun, "function": function}]}


async def chunks(
    service: Service,
    run: Generation,
    head: dict[str, Any],
    body: dict[str, Any],
    wanted: int | None,
    tools: Tools | None,
) -> AsyncGenerator[Any, None]:
    options = body.get("stream_options") or {}
    always = bool(options.get("continuous_usage_stats"))
    calls = [calls_for(tools) for _ in run.choices]

    def chunk(
        index: int, delta: dict[str, Any], tokens: list[Token] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        logprobs = None if tokens is None or wanted is None else logprobs_of(service, tokens, wanted)
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": run.usage()} if always else {}
        return {**head, "object": "chat.completion.chunk", "choices": [choice], **usage}

    for index in range(len(run.choices)):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for index, piece in run.pieces():
        deltas = [*calls[index].push(piece.text), *(calls[index].end() if piece.finish else [])]
        shown = [delta_of(delta) for delta in deltas]
        if piece.finish or (wanted is not None and not shown):
            shown.append({})
        # What is said of the tokens goes with the last part of them, and the reason comes by itself.
        end, said = len(shown) - 1, max(0, len(shown) - 2) if piece.finish else len(shown) - 1
        for place, delta in enumerate(shown):
            finish = finish_of(piece, calls[index]) if place == end else None
            yield chunk(index, delta, piece.tokens if place == said else None, finish)
    if options.get("include_usage"):
        yield {**head, "object": "chat.completion.chunk", "choices": [], "usage": run.usage()}
    yield "[DONE]"


def logprobs_of(service: Service, tokens: list[Token], wanted: int) -> dict[str, Any]:
    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        shown = {"token": token_text(service.tokens, id), "bytes": token_bytes(service.tokens, id)}
        return {**shown, "logprob": finite(logprob)}

    content = [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(*one) for one in top_entries(token.top, wanted)]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def finite(logprob: float | None) -> float:
    """JSON has no infinity; OpenAI's stand-in for what cannot happen."""
    return -9999.0 if logprob is None or logprob < -9999 else logprob
