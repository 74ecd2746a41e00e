"""`/v1/responses`: answers that are kept, so that a later one goes on from where they ended."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from mambakit.serving.answers import Piece
from mambakit.serving.chat_completions import calls_for, read_message, render
from mambakit.serving.errors import ApiError
from mambakit.serving.exchange import Events
from mambakit.serving.schema import Schema, array, integer, not_built, optional, record, text
from mambakit.serving.service import FLAG, FORMS, INERT, SAMPLING, SCHEMA_FIELDS, Generation, Service
from mambakit.serving.store import Record
from mambakit.serving.tools import CHOICE_BESIDE, TOOLS_BESIDE, Call, Calls, Delta, read_tools
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
CALLED = record(
    {
        "type": {"enum": ["function_call"]},
        "call_id": text(),
        "name": text(),
        "arguments": text(),
        "id": optional(text()),
        "status": optional(text()),
    },
    "type",
    "call_id",
    "name",
    "arguments",
)
RETURNED = record(
    {
        "type": {"enum": ["function_call_output"]},
        "call_id": text(),
        "output": {"anyOf": [text(), array(PART, minItems=1)]},
        "id": optional(text()),
        "status": optional(text()),
    },
    "type",
    "call_id",
    "output",
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
        "input": {"anyOf": [text(), array({"anyOf": [ITEM, CALLED, RETURNED]}, minItems=1)]},
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
        "tools": TOOLS_BESIDE,
        "tool_choice": CHOICE_BESIDE,
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
    tools = read_tools(body, service.chat.calls)
    rendered = await render(service, messages, tools)
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
        tools=tools,
    )
    await run.taken()
    response = Response(service, body, run, calls_for(tools))

    async def finish(pieces: list[Piece]) -> dict[str, Any]:
        """The response as it is in the end; kept on disk before anybody hears of it."""
        answer = response.ended(pieces[-1].finish == "stop")
        if store:
            text = "".join(piece.text for piece in pieces)
            tokens = run.choices[0].answer.request.tokens
            if tokens and tokens[-1] in service.chat.stop_ids:
                # It stands in the conversation only if the template writes it.
                shown = service.tokens.decode(tokens[-1:])
                text, tokens = (text + shown, tokens) if shown else (text, tokens[:-1])
            ids = [*rendered.ids, *tokens]
            heard = [*said, read_message(dict(response.calls.message()))]
            kept = Record(answer, heard, rendered.text + text, ids)
            state = await state_after(service, ids, run.choices[0].answer.request.state)
            await asyncio.to_thread(service.store.put, response.id, kept, state)
        return answer

    if body.get("stream"):
        return Events(events(run, response, finish), run.close, run.seconds)
    pieces = (await run.collect())[0]
    response.calls.push("".join(piece.text for piece in pieces))
    response.calls.end()
    return await finish(pieces)


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
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for item in given:
        kind = item.get("type")
        if kind == "function_call":
            call = {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
            names[item["call_id"]] = item["name"]
            if not (messages and messages[-1].get("tool_calls")):
                messages.append({"role": "assistant", "content": None, "tool_calls": []})
            messages[-1]["tool_calls"].append(call)
        elif kind == "function_call_output":
            name = {"name": names[item["call_id"]]} if item["call_id"] in names else {}
            messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"], **name})
        else:
            messages.append({"role": item["role"], "content": item["content"]})
    return [read_message(message) for message in messages]


class Response:
    """A response as it grows."""

    def __init__(self, service: Service, body: dict[str, Any], run: Generation, calls: Calls):
        self.id, self.item = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._run, self.calls = run, calls
        self._fields = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name,
            **{name: body.get(name) for name in ECHOED},
            "store": body.get("store") is not False,
            "error": None,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "tool_choice": body.get("tool_choice") or ("auto" if body.get("tools") else "none"),
            "tools": body.get("tools") or [],
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

    def call(self, call: Call, status: str) -> dict[str, Any]:
        said = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        return {"id": call.item, "type": "function_call", "status": status, **said}

    def ended(self, whole: bool) -> dict[str, Any]:
        status = "completed" if whole else "incomplete"
        content, calls = self.calls.message()["content"], self.calls.calls
        said = [] if content is None else [self.message(content, status)]
        used = self._run.usage()
        return {
            **self._fields,
            "status": status,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": [*said, *(self.call(one, status) for one in calls)],
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

    def item_events(item: dict[str, Any], place: int) -> Iterator[Any]:
        """What ends an item of the output."""
        where = {"item_id": item["id"], "output_index": place}
        if item["type"] == "function_call":
            yield event(
                "response.function_call_arguments.done", **where, arguments=item["arguments"], name=item["name"]
            )
        else:
            [part] = item["content"]
            yield event("response.output_text.done", **where, content_index=0, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **where, content_index=0, part=part)
        yield event("response.output_item.done", output_index=place, item=item)

    def delta_events(delta: Delta) -> Iterator[Any]:
        call = delta.call
        item = response.item if call is None else call.item
        if item not in places:
            places.append(item)
            begun = response.message("", "in_progress") if call is None else response.call(call, "in_progress")
            yield event("response.output_item.added", output_index=len(places) - 1, item=begun)
            if call is None:
                where = {"item_id": item, "output_index": len(places) - 1, "content_index": 0}
                yield event("response.content_part.added", **where, part=response.part(""))
        where = {"item_id": item, "output_index": places.index(item)}
        if call is None and delta.text:
            yield event("response.output_text.delta", **where, content_index=0, delta=delta.text, logprobs=[])
        elif delta.text:
            yield event("response.function_call_arguments.delta", **where, delta=delta.text)

    places: list[str] = []
    yield event("response.created", response=response.begun())
    yield event("response.in_progress", response=response.begun())
    pieces, calls = [], response.calls
    async for _, piece in run.pieces():
        pieces.append(piece)
        for delta in [*calls.push(piece.text), *(calls.end() if piece.finish else [])]:
            for one in delta_events(delta):
                yield one
    answer = await finish(pieces)
    for item in answer["output"]:
        if item["id"] not in places:  # one that says nothing
            for one in delta_events(Delta("")):
                yield one
        for one in item_events(item, places.index(item["id"])):
            yield one
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
