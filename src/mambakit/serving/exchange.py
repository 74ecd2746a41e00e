"""HTTP below the handlers: bodies with limits, server-sent events, clients that go away."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mambakit.serving.errors import ApiError, bad

LOG = logging.getLogger("mambakit.serving")
Result = TypeVar("Result")
BODY_SECONDS = 60.0
"""A body that takes longer to arrive is not waited for."""


class ClientGoneError(Exception):
    """Nobody is left to answer."""


def to_json(value: Any) -> bytes:
    # Half of a surrogate pair becomes its escape, which JSON has and UTF-8 does not.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_response(error: ApiError) -> Json:
    return Json(error.body(), error.status, headers=error.headers)


async def read_json(request: Request, most: int, check: Callable[[Any], None]) -> dict[str, Any]:
    """The body as a JSON object that passed `check`; ApiError 413 if it is larger than `most`, 408 if it is slow."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "a body has to come as it is: Content-Encoding is not taken")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > most):
        raise too_large(most)
    try:
        body = await asyncio.wait_for(_read_body(request, most), BODY_SECONDS)
    except asyncio.TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from error
    except ClientDisconnect as error:
        raise ClientGoneError from error
    try:
        # Large ones beside the event loop, which meanwhile serves the others.
        value = parse(body, check) if len(body) < 1 << 16 else await asyncio.to_thread(parse, body, check)
    except UnicodeDecodeError as error:
        raise bad(f"the body is not UTF-8: byte 0x{body[error.start]:02x} at {error.start}") from error
    except RecursionError as error:
        raise bad("the body is nested too deeply") from error
    except ValueError as error:
        raise bad(f"the body is not JSON: {error}") from error
    return value


async def _read_body(request: Request, most: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise too_large(most)
    return bytes(body)


def too_large(most: int) -> ApiError:
    # The rest is not read, so the connection cannot be used again.
    return ApiError(413, f"the body is larger than {most:,} bytes (--max-body)", headers={"Connection": "close"})


def parse(body: bytes, check: Callable[[Any], None]) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    def number(written: str) -> float:
        # To JSON 4.0 is a whole number.
        value = float(written)
        return int(value) if value.is_integer() else value

    value = json.loads(body.decode("utf-8"), parse_constant=refuse, parse_float=number)
    if not isinstance(value, dict):
        raise bad("the body has to be a JSON object")
    check(value)
    return value


async def until_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """What `work` returns; ClientGoneError, and `work` cancelled, when the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(Response):
    """Server-sent events: `data:` lines of JSON, with an `event:` line where one is named.

    An error after the first event can only be an event itself.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Any, None], close: Callable[[], None], seconds: float):
        """`close` is called at the end, whether an event was asked for or not. Who reads for longer is left alone."""
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close, self._seconds = events, close, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.wait_for(until_gone(receive, self._send(send)), self._seconds)
        except (ClientGoneError, asyncio.TimeoutError):
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": framed(event), "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": framed(error.body()), "more_body": True})
        except Exception:
            LOG.exception("an answer failed")
            body = framed(ApiError(500, "the answer failed").body())
            await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b""})


def framed(event: Any) -> bytes:
    """A string is sent as it is; of `(name, value)` the name is the event's."""
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    name, value = event if isinstance(event, tuple) else (None, event)
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(value) + b"\n\n"
