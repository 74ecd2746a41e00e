"""`/v1/responses`: answers that are kept, so that a later one goes on from where they ended."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

from mambakit.serving.answers import Piece
from mambakit.serving.chat_completions import read_message, render
from mambakit.serving.errors import ApiError
from mambakit.serving.exchange import Events
from mambakit.serving.schema import Schema, array, integer, not_built, optional, record, text
from mambakit.serving.service import FLAG, FORMS, INERT, SAMPLING, SCHEMA_FIELDS, Generation, Service
from mambakit.serving.store import Record
from mambakit.text.chat import Message, Rendered

PART = record(
    {
        "type": {"enum": ["input_text", "output_text"]},
        "text": text(),
        "annotations": optional(array({})),
        "logprobs": optional(array({})),
    },
    "type",
    "text",
)
ITEM = record(
    {
        "type": {"enum": ["message"]},
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [text(), array(PART, minItems=1)]},
        "id": optional(text()),
        "status": optional(text()),
        "phase": optional(text()),
    },
    "role",
    "content",
)
FORMAT_BESIDE: Schema = {
    "anyOf": [
        record({"type": {"enum": ["json_schema"]}, **SCHEMA_FIELDS}, "type", "schema"),
        *FORMS,
        {"type": "null"},
    ]
}
SCHEMA = record(
    {
        "model": optional(text()),
        "input": {"anyOf": [text(), array(ITEM, minItems=1)]},
        "instructions": optional(text()),
        "previous_response_id": optional(text()),
        "store": FLAG,
        "stream": FLAG,
        "stream_options": optional(record({"include_obfuscation": FLAG})),
        "max_output_tokens": optional(integer(1)),
        **SAMPLING,
        **INERT,
        "user": optional(text()),
        "include": optional(array(text(), maxItems=0)),
        "text": optional(record({"format": FORMAT_BESIDE, "verbosity": optional(text())})),
        "tools": not_built("array", maxItems=0),
        "tool_choice": {"enum": ["none", "auto", None]},
        "parallel_tool_calls": FLAG,
        "truncation": {"enum": ["disabled", "auto", None]},
        "background": {"enum": [False, None]},
        "reasoning": not_built("object", maxProperties=0),
    },
    "input",
)
EXAMPLE = {"input": "Hello", "max_output_tokens": 16}
ANSWER: Schema = {
    "type": "object",
    "required": ["id", "object", "created_at", "model", "status", "output", "usage"],
    "properties": {"object": {"const": "response"}},
}
ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p", "user")


async def handle(service: Service, body: dict[str, Any]) -> dict[str, Any] | Events:
    service.check_model(body)
    before = await earlier(service, body.get("previous_response_id"))
    said = [*(before.messages if before else []), *read_input(body["input"])]
    instructions = body.get("instructions")
    # As OpenAI's: instructions are of one response and are not handed on.
    messages = [*([{"role": "system", "content": instructions}] if instructions else []), *said]
    rendered = await render(service, messages)
    state = None
    if before is not None:
        rendered, state = await go_on(service, before, rendered)
    store = body.get("store") is not False
    run = service.begin(
        [(rendered.ids, rendered.ends)],
        body,
        max_tokens=body.get("max_output_tokens"),
        stops=service.chat.stops,
        state=state,
        keep_state=store,
        wanted=(body.get("text") or {}).get("format"),
    )
    await run.taken()
    response = Response(service, body, run)

    async def finish(pieces: list[Piece]) -> dict[str, Any]:
        """The response as it is in the end; kept on disk before anybody hears of it."""
        answer = response.ended(pieces)
        if store:
            text = "".join(piece.text for piece in pieces)
            tokens = run.choices[0].answer.request.tokens
            if tokens and tokens[-1] in service.chat.stop_ids:
                # It stands in the conversation only if the template writes it.
                shown = service.tokens.decode(tokens[-1:])
                text, tokens = (text + shown, tokens) if shown else (text, tokens[:-1])
            ids = [*rendered.ids, *tokens]
            heard = [*said, {"role": "assistant", "content": "".join(piece.text for piece in pieces)}]
            kept = Record(answer, heard, rendered.text + text, ids)
            state = await state_after(service, ids, run.choices[0].answer.request.state)
            await asyncio.to_thread(service.store.put, response.id, kept, state)
        return answer

    if body.get("stream"):
        return Events(events(run, response, finish), run.close, run.seconds)
    return await finish((await run.collect())[0])


async def earlier(service: Service, id: str | None) -> Record | None:
    if id is None:
        return None
    found = await asyncio.to_thread(service.store.get, id)
    if found is None:
        raise ApiError(404, f"there is no response {id[:100]!r}", param="previous_response_id", code="not_found")
    return found


async def state_after(service: Service, ids: list[int], state: Any) -> Any:
    """The state after `ids`: `state`, unless the answer was cut or ends in more than it says."""
    if state is not None and list(state.ids) == ids:
        return state
    answer = service.worker.submit(ids, max_new_tokens=0, keep_state=True)
    async for _ in answer:
        pass
    return answer.request.state


async def go_on(service: Service, before: Record, rendered: Rendered) -> tuple[Rendered, Any]:
    """The conversation written as what was read and said before and what is new; and the state after the former.

    Tokens the model chose may not be those that its text is encoded in, so the text is encoded from there on only.
    """
    if before.answer["model"] != service.name or not rendered.text.startswith(before.text):
        return rendered, None
    state = await asyncio.to_thread(service.store.state, before.answer["id"])
    rest = await asyncio.to_thread(service.chat.encode, rendered.text[len(before.text) :], first=False)
    return Rendered(rendered.text, [*before.ids, *rest], (len(before.ids),)), state


def read_input(given: str | list[dict[str, Any]]) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    items = [{"role": item["role"], "content": item["content"]} for item in given]
    return [read_message(item) for item in items]


class Response:
    """A response as it grows."""

    def __init__(self, service: Service, body: dict[str, Any], run: Generation):
        self.id, self.item = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._run = run
        self._fields = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name,
            **{name: body.get(name) for name in ECHOED},
            "store": body.get("store") is not False,
            "error": None,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
            "truncation": "disabled",
        }

    def begun(self) -> dict[str, Any]:
        return {**self._fields, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}

    def message(self, text: str, status: str) -> dict[str, Any]:
        content = [self.part(text)] if status != "in_progress" else []
        return {"id": self.item, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def ended(self, pieces: list[Piece]) -> dict[str, Any]:
        whole = pieces[-1].finish == "stop"
        status = "completed" if whole else "incomplete"
        text = "".join(piece.text for piece in pieces)
        used = self._run.usage()
        return {
            **self._fields,
            "status": status,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": [self.message(text, status)],
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
        }


async def events(
    run: Generation, response: Response, finish: Callable[[list[Piece]], Any]
) -> AsyncGenerator[Any, None]:
    number = -1

    def event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        nonlocal number
        number += 1
        return kind, {"type": kind, "sequence_number": number, **fields}

    place = {"item_id": response.item, "output_index": 0, "content_index": 0}
    yield event("response.created", response=response.begun())
    yield event("response.in_progress", response=response.begun())
    yield event("response.output_item.added", output_index=0, item=response.message("", "in_progress"))
    yield event("response.content_part.added", **place, part=response.part(""))
    pieces = []
    async for _, piece in run.pieces():
        pieces.append(piece)
        if piece.text:
            yield event("response.output_text.delta", **place, delta=piece.text, logprobs=[])
    answer = await finish(pieces)
    [item] = answer["output"]
    [part] = item["content"]
    yield event("response.output_text.done", **place, text=part["text"], logprobs=[])
    yield event("response.content_part.done", **place, part=part)
    yield event("response.output_item.done", output_index=0, item=item)
    yield event(f"response.{answer['status']}", response=answer)


async def find(service: Service, id: str) -> dict[str, Any]:
    found = await asyncio.to_thread(service.store.get, id)
    if found is None:
        raise ApiError(404, f"there is no response {id[:100]!r}", code="not_found")
    return found.answer


async def delete(service: Service, id: str) -> dict[str, Any]:
    await find(service, id)
    await asyncio.to_thread(service.store.delete, id)
    return {"id": id, "object": "response", "deleted": True}
