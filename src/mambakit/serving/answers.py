"""Tokens as a client sees them: text as far as it is certain, without stop strings, with log-probabilities."""

from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

from mambakit.serving.worker import Answer, NotBegunError
from mambakit.text.tokens import Bytes, Tokens


class Token(NamedTuple):
    id: int
    logprob: float | None
    top: dict[int, float]
    offset: int
    """Characters before it."""


class Piece(NamedTuple):
    """What an answer goes on by. Text may come later than its tokens."""

    text: str
    tokens: list[Token]
    finish: str | None
    """Why it ends here: "stop" or "length"."""


class Text:
    """Ids in, text out: what is certain, up to the first of `stops`."""

    def __init__(self, tokens: Tokens, stops: Sequence[str]):
        self._ids: deque[int] = deque()
        self._pieces = tokens.pieces(self._next_ids())
        self._stops = stops
        self._held = ""
        self.stopped = False
        self.length = 0
        """Characters of all ids so far."""

    def push(self, id: int) -> str:
        self._ids.append(id)
        return self._show(next(self._pieces))

    def end(self) -> str:
        """The rest: nothing more comes that would make a stop of it."""
        text = self._show(next(self._pieces, ""))
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _next_ids(self) -> Iterator[int]:
        # Asked for the next one when it is there, or at the end.
        while self._ids:
            yield self._ids.popleft()

    def _show(self, new: str) -> str:
        self.length += len(new)
        if self.stopped:
            return ""
        self._held += new
        found = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        keep = max((_begun(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown


def _begun(text: str, stop: str) -> int:
    """How much of `stop` stands at the end of `text`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class Choice:
    """One answer as pieces of text. Ids in `stop_ids` end it and are not shown."""

    def __init__(self, answer: Answer, tokens: Tokens, stops: Sequence[str], stop_ids: Sequence[int]):
        self.answer = answer
        self.completion_tokens = 0
        self._text, self._stop_ids = Text(tokens, stops), frozenset(stop_ids)

    async def pieces(self) -> AsyncIterator[Piece]:
        try:
            async for news in self.answer:
                self.completion_tokens += len(news.tokens)
                text, shown = "", []
                for place, id in enumerate(news.tokens):
                    if id in self._stop_ids:
                        continue
                    logprob, top = news.logprobs[place] if place < len(news.logprobs) else (None, {})
                    shown.append(Token(id, logprob, top, self._text.length))
                    text += self._text.push(id)
                if news.done:
                    text += self._text.end()
                    reason = self.answer.request.finish_reason
                    if reason == "cancelled" and not self.completion_tokens:
                        raise NotBegunError("cancelled before its first token")
                    yield Piece(text, shown, "stop" if reason == "stop" or self._text.stopped else "length")
                elif text or shown:
                    yield Piece(text, shown, None)
        finally:
            self.answer.cancel()


def token_text(tokens: Tokens, id: int) -> str:
    """A token by itself, different for different tokens: part of a character is shown as its bytes."""
    text = tokens.decode([id])
    if text and "�" not in text:
        return text
    return f"bytes:\\x{id:02x}" if isinstance(tokens, Bytes) and id < 256 else f"<id {id}>"


def token_bytes(tokens: Tokens, id: int) -> list[int] | None:
    if isinstance(tokens, Bytes):
        return [id] if id < 256 else []
    text = tokens.decode([id])
    return None if "�" in text else list(text.encode())


def top_entries(top: dict[int, float], most: int) -> list[tuple[int, float]]:
    return sorted(top.items(), key=lambda one: (-one[1], one[0]))[:most]


def usage(prompts: int, completion: int, cached: int, why_not_more: str | None) -> dict[str, Any]:
    details: dict[str, Any] = {"cached_tokens": cached}
    if why_not_more:
        details["why_not_more"] = why_not_more
    return {
        "prompt_tokens": prompts,
        "completion_tokens": completion,
        "total_tokens": prompts + completion,
        "prompt_tokens_details": details,
    }
