"""Counts and times in Prometheus' format."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """A registry of its own, so that several servers may live in one process."""

    def __init__(self, waiting: Callable[[], int], active: Callable[[], int]):
        self._registry = registry = CollectorRegistry()
        requests = "Requests answered, by path and status"
        self._requests = Counter("mambakit_http_requests", requests, ["path", "status"], registry=registry)
        self._prompt = Counter("mambakit_prompt_tokens", "Tokens of prompts", registry=registry)
        self._reused = Counter(
            "mambakit_reused_tokens", "Tokens of prompts that were not read again", registry=registry
        )
        self._new = Counter("mambakit_completion_tokens", "Tokens generated", registry=registry)
        first = "Seconds until the first token of an answer"
        self._first = Histogram("mambakit_first_token_seconds", first, buckets=FIRST_TOKEN, registry=registry)
        self._whole = Histogram("mambakit_answer_seconds", "Seconds per answer", buckets=WHOLE, registry=registry)
        Gauge("mambakit_waiting_requests", "Requests that wait", registry=registry).set_function(waiting)
        Gauge("mambakit_active_requests", "Requests being answered", registry=registry).set_function(active)

    def request(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def answered(self, usage: dict[str, Any], seconds: float) -> None:
        self._prompt.inc(usage["prompt_tokens"])
        self._reused.inc(usage["prompt_tokens_details"]["cached_tokens"])
        self._new.inc(usage["completion_tokens"])
        self._whole.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
