"""Conversations as token ids: the chat template of a tokenizer's files, or a plain one. See docs/serving.md."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mambakit.text.templates import Template
from mambakit.text.tokens import Tokens

Message = Mapping[str, Any]
"""`role` and `content`, both text; a template may read more."""

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
ENDS_LOOKED_FOR = 32
CHARACTERS_ENCODED = 1 << 24
"""In looking for them, about."""
PLAIN_STOPS = ("\nuser:", "\nsystem:", "\ndeveloper:", "\ntool:")


class Rendered(NamedTuple):
    """A conversation up to where the assistant is to go on."""

    text: str
    ids: list[int]
    ends: tuple[int, ...]
    """Numbers of ids after which a message ends."""


class Chat:
    """How a model is talked to. Without a template every message is a line `role: content`.

    `start` stands before a conversation without a template. A message of the assistant ends with one of `stop_ids` or
    before one of `stops`.
    """

    def __init__(
        self,
        tokens: Tokens,
        template: str | None = None,
        *,
        named: Mapping[str, str] | None = None,
        start: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
    ):
        self.tokens, self.stop_ids = tokens, tuple(stop_ids)
        self._start = [] if template is not None else list(start)
        self.stops = PLAIN_STOPS if template is None else ()
        self._write: Callable[..., str] = plain if template is None else Template(template, named or {}).render

    def text(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """ValueError where the template does not take these messages."""
        if isinstance(messages, str | Mapping) or not all(
            isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in messages
        ):
            raise ValueError("messages have to be a list of objects, each with a role")
        return self._write(messages, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Ids of a conversation's text; of a later part of it where it is not the `first`."""
        return (self._start if first else []) + self.tokens.encode(text.encode())

    def render(self, messages: Sequence[Message]) -> Rendered:
        text = self.text(messages)
        ids = self.encode(text)
        return Rendered(text, ids, tuple(self._ends(messages, text, ids)))

    def _ends(self, messages: Sequence[Message], text: str, ids: list[int]) -> Iterator[int]:
        """Where beginnings of the conversation end, as far as they begin the whole one id by id."""
        counts = range(1, len(messages) + 1)
        half = max(1, min(ENDS_LOOKED_FOR, CHARACTERS_ENCODED // max(1, len(text))) // 2)
        if len(counts) > 2 * half:
            # What many conversations share stands first, and what this one goes on from stands last.
            counts = [*counts[:half], *counts[-half:]]
        for count in counts:
            try:
                part = self.text(messages[:count], add_generation_prompt=False)
            except ValueError:  # some templates take no conversation that ends there
                continue
            if text.startswith(part):
                known = self.encode(part)
                if known and ids[: len(known)] == known:
                    yield len(known)


def plain(messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    lines = "".join(f"{message['role']}: {message.get('content') or ''}\n" for message in messages)
    return lines + ("assistant: " if add_generation_prompt else "")


def read_chat(folder: Path, tokens: Tokens, vocab_size: int) -> Chat:
    """What a model's folder says of conversations."""
    config = _read_json(folder / CONFIG)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if (folder / TEMPLATE).is_file():
        template = (folder / TEMPLATE).read_text(encoding="utf-8")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder / CONFIG} has a chat_template that is no text")
    special = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    special = {name: text for name, text in special.items() if text is not None}
    stop_ids = [tokens.end, *_ids_of(_read_json(folder / GENERATION).get("eos_token_id"))]
    if "eos_token" in special:
        ids = tokens.encode(special["eos_token"].encode())
        stop_ids += ids if len(ids) == 1 else []
    stop_ids = [one for one in dict.fromkeys(stop_ids) if 0 <= one < vocab_size]
    start = [tokens.end] if tokens.end < vocab_size else []
    return Chat(tokens, template, named=special, start=start, stop_ids=stop_ids)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no object")
    return values


def _token_text(value: Any) -> str | None:
    """A special token's text, written as such or as an object that holds it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _ids_of(value: Any) -> list[int]:
    return [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]
