"""A tiny model behind a server, for the tests of serving."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mambakit.inference import Engine
from mambakit.inference.prefix_cache import PrefixCache
from mambakit.serving.metrics import Metrics
from mambakit.serving.server import listen, make_server
from mambakit.serving.service import Limits, Service
from mambakit.serving.store import Store
from mambakit.serving.worker import Worker
from mambakit.text.chat import Chat
from mambakit.text.tokens import Bytes
from trainer_cases import make_model


def make_service(store: Store | None = None, **changed: Any) -> Service:
    model, tokens = make_model().eval(), Bytes()
    worker = Worker(Engine(model, 8, PrefixCache(), tokenizer=tokens))
    limits = Limits(**{"max_tokens": 24, "grace": 5.0, **changed})
    metrics = Metrics(lambda: worker.waiting, lambda: worker.active)
    chat = Chat(tokens, start=[256], stop_ids=[256])
    return Service(
        name="tiny",
        model=model,
        tokens=tokens,
        chat=chat,
        worker=worker,
        store=store or Store(),
        metrics=metrics,
        limits=limits,
    )


@contextmanager
def running(service: Service, keys: tuple[str, ...] = ()) -> Iterator[str]:
    """The server in a thread; its address."""
    sock = listen("127.0.0.1", 0)
    ready = threading.Event()
    server = make_server(service, "127.0.0.1", keys=keys, ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        sock.close()
        assert not thread.is_alive()
