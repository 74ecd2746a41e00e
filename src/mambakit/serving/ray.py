"""Many replicas of a service behind Ray Serve: `serve.run(application("run/model", sessions="shared"))`.

Responses and their states lie in a folder that all replicas reach, so that any of them can go on with any conversation.
One goes to the replica that answered it last, which has its state in memory, as long as that one lives and has time.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from mambakit.optional import need
from mambakit.serving.errors import ApiError
from mambakit.serving.exchange import error_response, parse
from mambakit.serving.loading import load, make_service
from mambakit.serving.service import Limits

REMEMBERED = 10_000
"""Responses of which it is known which replica has made them."""
REPLICA = "X-Mambakit-Replica"


class Replica:
    """One engine with the whole server's application before it, called with requests instead of connections."""

    def __init__(self, folder: str, sessions: str, name: str, keys: Sequence[str], options: dict[str, Any]):
        import torch

        from mambakit.serving.app import make_app

        threads = options.pop("threads", None)
        if threads is not None:
            torch.set_num_threads(threads)
        limits = Limits(**options.pop("limits", {}))
        service = make_service(name, load(Path(folder), **options), limits, sessions=Path(sessions))
        self._service, self._app = service, make_app(service, keys=keys)
        self._loop: asyncio.AbstractEventLoop | None = None
        put = service.store.put

        def told(id: str, record: Any, state: Any) -> None:
            put(id, record, state)
            assert self._loop is not None
            asyncio.run_coroutine_threadsafe(self.warm(id), self._loop)

        service.store.put = told
        service.worker.start()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Any, None]:
        """Status and headers, then the body in pieces."""
        self._loop = asyncio.get_running_loop()
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        given = iter([{"type": "http.request", "body": body, "more_body": False}])
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            for message in given:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, sent.put)  # type: ignore[arg-type]
            finally:
                sent.put_nowait(None)

        task = asyncio.ensure_future(run())
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    mark = (REPLICA.lower().encode(), str(os.getpid()).encode())
                    yield message["status"], [*message["headers"], mark]
                elif message.get("body"):
                    yield message["body"]
            await task
        finally:
            gone.set()
            task.cancel()

    async def warm(self, id: str) -> str:
        """Told to Ray as what this replica has, so that requests about it come here."""
        return id


class Front:
    """Takes requests, and hands each to the replica that knows its conversation."""

    def __init__(self, replicas: Any, max_body: int):
        self._replicas, self._max_body = replicas, max_body

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import StreamingResponse

        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body:
                return error_response(ApiError(413, f"the body is larger than {self._max_body:,} bytes"))
        scope = {
            name: request.scope[name] for name in ("type", "method", "path", "raw_path", "query_string", "headers")
        }
        scope |= {"http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {"version": "3.0"}}
        scope |= {"client": None, "server": None}
        handle = self._replicas.options(stream=True)
        earlier = conversation(request.url.path, bytes(body))
        if earlier:
            handle = handle.options(multiplexed_model_id=earlier)
        coming = handle.answer.remote(scope, bytes(body))
        status, headers = await anext(coming)
        response = StreamingResponse(rest(coming), status_code=status)
        response.raw_headers = [(bytes(name), bytes(value)) for name, value in headers]
        return response


async def rest(coming: Any) -> AsyncIterator[bytes]:
    async for piece in coming:
        yield piece


def conversation(path: str, body: bytes) -> str | None:
    """The response that a request is about or goes on from."""
    if path.startswith("/v1/responses/"):
        return path.removeprefix("/v1/responses/")[:100] or None
    if path != "/v1/responses":
        return None
    try:
        earlier = parse(body, lambda _: None).get("previous_response_id")
    except (ValueError, RecursionError, ApiError):  # the replica says what is wrong
        return None
    return earlier[:100] if isinstance(earlier, str) and earlier else None


def application(
    folder: str | os.PathLike[str],
    *,
    sessions: str | os.PathLike[str],
    replicas: int = 2,
    name: str | None = None,
    keys: Sequence[str] = (),
    actor_options: dict[str, Any] | None = None,
    max_ongoing_requests: int = 512,
    **options: Any,
) -> Any:
    """A Ray Serve application of so many replicas, for `ray.serve.run`.

    `sessions` is a folder that every replica reaches. `options` are `limits` (a dict of `Limits`' fields), `threads` of
    each replica, and `tokenizer`, `bits`, `max_rows` and `speculate` as `mambakit serve` has them. `actor_options` are
    Ray's, such as `{"num_gpus": 1}`.
    """
    serve = need("Ray Serve", "ray.serve")
    path = Path(folder).resolve()
    shown = name or (path.parent.name if path.name == "model" else path.name)

    class Known(Replica):
        warm: Any = serve.multiplexed(max_num_models_per_replica=REMEMBERED)(Replica.warm)

    common: dict[str, Any] = {"max_ongoing_requests": max_ongoing_requests}
    many = serve.deployment(name="Replica", num_replicas=replicas, ray_actor_options=actor_options or {}, **common)(
        Known
    )
    front = serve.deployment(name="Front", ray_actor_options={"num_cpus": 0}, **common)(Front)
    bound = many.bind(str(path), str(Path(sessions).resolve()), shown, list(keys), options)
    return front.bind(bound, options.get("limits", {}).get("max_body", Limits().max_body))
