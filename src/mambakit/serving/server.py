"""A service behind a socket, from the first request to a graceful end."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mambakit.serving.app import make_app
from mambakit.serving.door import LOOPBACK
from mambakit.serving.service import Service

HEAD_SECONDS = 30.0
"""For a request's first line and headers."""
LAST_WORDS = 5
"""Seconds for sending what was cut short and for parking it."""


class Protocol(H11Protocol):
    """Lets go of connections on which a request is not begun, or not finished being asked, for `HEAD_SECONDS`."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Server(uvicorn.Server):
    """Takes no new requests after a signal, and gives those on their way `grace` seconds."""

    def __init__(self, service: Service, config: uvicorn.Config, ready: Callable[[], None]):
        super().__init__(config)
        self._service, self._ready = service, ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        service = self._service
        if not service.draining:
            service.draining = True
            assert self._loop is not None
            self._loop.call_later(service.limits.grace, self._cut)

    def _cut(self) -> None:
        for generation in list(self._service.generations):
            generation.cancel()


def serve(service: Service, host: str, port: int, *, keys: Sequence[str], ready: Callable[[str], None]) -> None:
    """Answer requests at `host` and `port` (0: any that is free) until a signal comes; `ready` is told the address."""
    sock = listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{sock.getsockname()[1]}"
    server = make_server(service, host, keys=keys, ready=lambda: ready(address))
    # uvicorn raises the signals again that ended it; this one has done its work by then.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[sock])
    finally:
        signal.signal(signal.SIGTERM, before)
        sock.close()


def make_server(service: Service, host: str, *, keys: Sequence[str], ready: Callable[[], None]) -> Server:
    local = host in LOOPBACK
    app: Any = make_app(service, keys=keys, hosts=LOOPBACK if local else None)
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_level="error",  # a warning for every broken request would let anybody fill the log
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(service.limits.grace) + LAST_WORDS,
    )
    return Server(service, config, ready)


def listen(host: str, port: int) -> socket.socket:
    """An open socket; OSError that names the address if it cannot be had."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        sock = socket.socket(family, kind, protocol)
        if sys.platform != "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error
    return sock
