"""A tiny model behind a server, for the tests of serving."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from mambakit.inference.generation import Stream
from mambakit.serving.metrics import Metrics
from mambakit.serving.server import listen, make_server
from mambakit.serving.service import Limits, Service
from mambakit.serving.store import Store
from mambakit.serving.worker import Worker
from mambakit.text.chat import Chat
from mambakit.text.tokens import Bytes
from trainer_cases import make_model


class FakeEngine:
    """The engine's contract, one request after the other."""

    def __init__(self, model: Any):
        self.model, self.requests = model, []
        self.lock = threading.Lock()

    @property
    def waiting(self) -> int:
        return 0

    @property
    def active(self) -> int:
        return len(self.requests)

    def add(
        self,
        ids,
        max_new_tokens=None,
        *,
        stop=None,
        seed=None,
        logprobs=None,
        echo=False,
        ends=(),
        keep_state=False,
        state=None,
        on_token=None,
        **sampling,
    ):
        request = SimpleNamespace(
            tokens=[],
            done=False,
            finish_reason=None,
            error=None,
            prompt_tokens=len(ids),
            reused_tokens=0,
            why_not_more="nothing is kept",
            logprobs=[],
            prompt_logprobs=None,
            state=None,
        )
        stop_ids = [one for one in stop or [] if isinstance(one, int)]
        stops = [one for one in stop or [] if isinstance(one, str)]
        request.cancelled, request.stop_ids = False, stop_ids
        request.cancel = lambda: setattr(request, "cancelled", True)
        if echo:
            logits = self.model(torch.tensor([ids]))[0][0].log_softmax(-1)
            logits = logits.detach()
            request.prompt_logprobs = [None] + [
                (
                    float(logits[i, ids[i + 1]]),
                    dict(zip(*[t.tolist() for t in reversed(logits[i].topk(logprobs))], strict=True)),
                )
                for i in range(len(ids) - 1)
            ]
        request.stream = Stream(
            self.model, ids, max_new_tokens=max_new_tokens, seed=seed, stop=stop_ids or None, **sampling
        )
        request.on_token, request.stops = on_token, stops
        self.requests.append(request)
        return request

    def step(self) -> bool:
        for request in list(self.requests):
            reason = "cancelled" if request.cancelled else None
            if reason is None:
                logits = request.stream._logits_aw[0].log_softmax(-1)
                token = next(request.stream, None)
                if token is None:
                    reason = "length"
                else:
                    request.tokens.append(int(token[0]))
                    request.logprobs.append((float(logits[request.tokens[-1]]), dict(enumerate(logits.tolist()))))
                    if request.tokens[-1] in request.stop_ids or any(s in Bytes().decode(request.tokens) for s in request.stops):
                        reason = "stop"
            if reason is not None:
                request.done, request.finish_reason = True, reason
                self.requests.remove(request)
            request.on_token(request)
        return bool(self.requests)


def make_service(**changed: Any) -> Service:
    model, tokens = make_model().eval(), Bytes()
    worker = Worker(FakeEngine(model))
    limits = Limits(**{"max_tokens": 24, "grace": 5.0, **changed})
    metrics = Metrics(lambda: worker.waiting, lambda: worker.active)
    chat = Chat(tokens, start=[256], stop_ids=[256])
    return Service(
        name="tiny", model=model, tokens=tokens, chat=chat, worker=worker, store=Store(), metrics=metrics, limits=limits
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
