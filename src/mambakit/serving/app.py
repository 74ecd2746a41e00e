"""The paths of the server, and their description."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mambakit.serving import chat_completions, completions, embeddings, responses
from mambakit.serving.door import Door
from mambakit.serving.errors import ERROR_SCHEMA, ApiError
from mambakit.serving.exchange import ClientGoneError, Events, Json, error_response, read_json, until_gone
from mambakit.serving.schema import Schema, check, record, text
from mambakit.serving.service import Service

LOG = logging.getLogger("mambakit.serving")
PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/conversation.js": ("conversation.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
POLICY += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
OPEN_PATHS = frozenset({"/health", *FILES})


class Operation(NamedTuple):
    """A path that takes a JSON body, as it is answered and as it is described."""

    path: str
    summary: str
    handle: Callable[[Service, dict[str, Any]], Awaitable[Any]]
    schema: Callable[[int], Schema]
    """Of its body, for a vocabulary of that size."""
    example: dict[str, Any]
    answer: Schema
    streams: bool = True


def object_of(kind: str, *required: str) -> Schema:
    return {"type": "object", "required": ["object", *required], "properties": {"object": {"const": kind}}}


OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "The assistant's next message in a conversation",
        chat_completions.handle,
        lambda _: chat_completions.SCHEMA,
        chat_completions.EXAMPLE,
        object_of("chat.completion", "id", "created", "model", "choices", "usage"),
    ),
    Operation(
        "/v1/completions",
        "The text that follows prompts",
        completions.handle,
        completions.make_schema,
        completions.EXAMPLE,
        object_of("text_completion", "id", "created", "model", "choices", "usage"),
    ),
    Operation(
        "/v1/responses",
        "A response, which later ones may go on from",
        responses.handle,
        lambda _: responses.SCHEMA,
        responses.EXAMPLE,
        responses.ANSWER,
    ),
    Operation(
        "/v1/embeddings",
        "Texts as vectors",
        embeddings.handle,
        embeddings.make_schema,
        embeddings.EXAMPLE,
        object_of("list", "data", "model", "usage"),
        streams=False,
    ),
)


def make_app(service: Service, *, keys: Sequence[str] = (), hosts: Sequence[str] | None = None) -> Starlette:
    """The server as an ASGI application. Its engine works while the application lives."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            service.worker.stop()

    door = Middleware(Door, keys=keys, open_paths=OPEN_PATHS, hosts=hosts, count=service.metrics.request)
    app = Starlette(
        routes=routes(service),
        middleware=[door],
        lifespan=lifespan,
        exception_handlers={HTTPException: refused, ApiError: refused, ClientGoneError: gone, Exception: failed},
    )
    app.router.redirect_slashes = False
    return app


def routes(service: Service) -> list[Route]:
    description = describe(service)

    async def models(request: Request) -> Response:
        return Json({"object": "list", "data": [model_entry(service)]})

    async def model(request: Request) -> Response:
        service.check_model({"model": request.path_params["model"]})
        return Json(model_entry(service))

    async def health(request: Request) -> Response:
        return Json({"status": "stopping" if service.draining else "ok"}, 503 if service.draining else 200)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(request: Request) -> Response:
        return Json(description)

    async def stored(request: Request) -> Response:
        return Json(await responses.find(service, request.path_params["id"]))

    async def forget(request: Request) -> Response:
        return Json(await responses.delete(service, request.path_params["id"]))

    return [
        *(Route(one.path, posted(service, one), methods=["POST"]) for one in OPERATIONS),
        Route("/v1/responses/{id}", stored, methods=["GET"]),
        Route("/v1/responses/{id}", forget, methods=["DELETE"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        *(Route(path, page(*file), methods=["GET"]) for path, file in FILES.items()),
    ]


def posted(service: Service, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    schema = operation.schema(service.vocab_size)

    async def endpoint(request: Request) -> Response:
        body = await read_json(request, service.limits.max_body, lambda body: check(body, schema))
        answer = await until_gone(request.receive, operation.handle(service, body))
        return answer if isinstance(answer, Events) else Json(answer)

    return endpoint


def page(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = (PAGE / name).read_bytes()

    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=kind, headers=PAGE_HEADERS)

    return endpoint


def model_entry(service: Service) -> dict[str, Any]:
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "mambakit"}


async def refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=headers)
    assert isinstance(error, ApiError)
    return error_response(error)


async def gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def failed(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "the server failed; its log says why"))


def describe(service: Service) -> dict[str, Any]:
    """OpenAPI's description of what the handlers check and answer."""
    wrong = {"description": "An error, in OpenAI's shape", "content": as_json(ERROR_SCHEMA)}
    entry = object_of("model", "id", "created", "owned_by")
    name = {"name": "model", "in": "path", "required": True, "schema": text(), "example": service.name}
    stored = {"name": "id", "in": "path", "required": True, "schema": text()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mambakit serve", "version": version("mambakit")},
        "security": [{}, {"key": []}],
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            **{one.path: {"post": describe_post(one, service.vocab_size, wrong)} for one in OPERATIONS},
            "/v1/responses/{id}": {
                "get": described("A stored response", responses.ANSWER, wrong, stored),
                "delete": described("Forget a stored response", object_of("response", "id", "deleted"), wrong, stored),
            },
            "/v1/models": {"get": described("The models", object_of("list", "data"), wrong)},
            "/v1/models/{model}": {"get": described("A model", entry, wrong, name)},
            "/health": {"get": described("Whether it takes requests", record({"status": text()}, "status"), wrong)},
            "/metrics": {"get": described("Counts and times, for Prometheus", text(), wrong, kind="text/plain")},
            "/openapi.json": {"get": described("This description", {"type": "object"}, wrong)},
        },
    }


def describe_post(operation: Operation, vocab_size: int, wrong: dict[str, Any]) -> dict[str, Any]:
    found = described(operation.summary, operation.answer, wrong)
    if operation.streams:
        found["responses"]["200"]["content"]["text/event-stream"] = {"schema": {}}
    body = {"schema": operation.schema(vocab_size), "example": operation.example}
    return {**found, "requestBody": {"required": True, "content": {"application/json": body}}}


def described(
    summary: str, answer: Schema, wrong: dict[str, Any], *parameters: dict[str, Any], kind: str = "application/json"
) -> dict[str, Any]:
    right = {"description": summary, "content": {kind: {"schema": answer}}}
    return {"summary": summary, "parameters": list(parameters), "responses": {"200": right, "default": wrong}}


def as_json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
