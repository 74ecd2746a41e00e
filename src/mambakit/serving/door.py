"""What every request passes before a handler sees it: whose it is, where it comes from, and a count of it."""

import hmac
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mambakit.serving.errors import ApiError
from mambakit.serving.exchange import error_response

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Door:
    """Refuses requests without one of `keys` (if there are any), except for `open_paths`, and those of other sites.

    A browser sends requests to a server on its own machine for whatever page asks it to. They are known by their
    Origin, or, where a site's name was made to lead here, by a Host that is not in `hosts` (None: any).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        open_paths: frozenset[str],
        hosts: Sequence[str] | None,
        count: Callable[[str, int], None],
    ):
        self._app, self._open_paths, self._hosts, self._count = app, open_paths, hosts, count
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route: Any = scope.get("route")
                self._count(getattr(route, "path", "other"), message["status"])
                MutableHeaders(scope=message)["X-Content-Type-Options"] = "nosniff"
            await send(message)

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        await (self._app if refusal is None else error_response(refusal))(scope, receive, counted)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._hosts is not None and name_of(f"//{host}") not in self._hosts:
            return ApiError(403, f"this server is not {host[:100]!r}; --host names other addresses")
        if origin is not None and urlsplit_or_none(origin) != host:
            return ApiError(403, "requests of other sites are refused")
        if not self._keys or path in self._open_paths:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if kind.lower() == "bearer" and any(known):
            return None
        message = "a valid key is needed: Authorization: Bearer KEY"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def name_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def urlsplit_or_none(address: str) -> str | None:
    try:
        return urlsplit(address).netloc
    except ValueError:
        return None
