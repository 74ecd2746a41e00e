"""Conversations as token ids: the chat template of a tokenizer's files, or a plain one. See docs/serving.md."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from mambakit.arguments import check_flag, check_kind, encoded, shown
from mambakit.text.templates import Template, make_environment
from mambakit.text.tokens import Tokens

Message = Mapping[str, Any]
"""`role` and `content`, both text; a template may read more."""

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
ENDS_LOOKED_FOR = 32
CHARACTERS_ENCODED = 1 << 24
"""In looking for them, about."""
HERMES = "<tool_call>"
PLAIN_STOPS = ("\nuser:", "\nsystem:", "\ndeveloper:", "\ntool:")


class Rendered(NamedTuple):
    """A conversation up to where the assistant is to go on."""

    text: str
    ids: list[int]
    ends: tuple[int, ...]
    """Numbers of ids after which a message ends."""


class CallForm(NamedTuple):
    """How a model writes a call of a function: an object of `name` and `arguments` between two marks."""

    before: str
    after: str
    arguments: str = "arguments"
    """What it calls them."""


class Chat:
    """How a model is talked to. Without a template every message is a line `role: content`.

    `start` stands before a conversation without a template. A message of the assistant ends with one of `stop_ids` or
    before one of `stops`. `calls` is how the template writes calls of functions, None if it knows of none; where there
    is a `tool_template`, it is the one for conversations in which functions may be called.
    """

    def __init__(
        self,
        tokens: Tokens,
        template: str | None = None,
        *,
        named: Mapping[str, str] | None = None,
        start: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        tool_template: str | None = None,
    ):
        for given in (template, tool_template):
            check_kind("the chat template", given, (str, NoneType), "text")
        check_kind("named", named, (Mapping, NoneType), "texts by their names")
        self.tokens, self.stop_ids = tokens, tuple(stop_ids)
        self.template, self.named = template, dict(named or {})
        self._start = [] if template is not None else list(start)
        self.stops = PLAIN_STOPS if template is None else ()
        self._write: Callable[..., str] = plain if template is None else Template(template, named or {}).render
        self._write_tools, self.calls = self._write, None
        source = tool_template or template
        if source is not None:
            self._write_tools = Template(source, named or {}).render
            self.calls = call_form(source)

    def text(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Any] | None = None
    ) -> str:
        """ValueError where the template does not take these messages. `tools` are functions that may be called."""
        check_flag("add_generation_prompt", add_generation_prompt)
        if not isinstance(messages, Sequence) or not all(
            isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in messages
        ):
            raise ValueError("messages have to be a list of objects, each with a role")
        if tools is not None and not isinstance(tools, Sequence):
            raise ValueError(f"tools is {shown(tools)}, expected a list of functions")
        if tools and self._write_tools is plain:
            raise ValueError("tools are for a chat template that takes them, and there is none")
        if tools:
            return self._write_tools(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self._write(messages, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Ids of a conversation's text; of a later part of it where it is not the `first`."""
        return (self._start if first else []) + self.tokens.encode(encoded("the conversation", text))

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        text = self.text(messages, tools=tools)
        ids = self.encode(text)
        return Rendered(text, ids, tuple(self._ends(messages, tools, text, ids)))

    def _ends(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str, ids: list[int]
    ) -> Iterator[int]:
        """Where beginnings of the conversation end, as far as they begin the whole one id by id."""
        counts = range(1, len(messages) + 1)
        half = max(1, min(ENDS_LOOKED_FOR, CHARACTERS_ENCODED // max(1, len(text))) // 2)
        if len(counts) > 2 * half:
            # What many conversations share stands first, and what this one goes on from stands last.
            counts = [*counts[:half], *counts[-half:]]
        for count in counts:
            try:
                part = self.text(messages[:count], add_generation_prompt=False, tools=tools)
            except ValueError:  # some templates take no conversation that ends there
                continue
            if text.startswith(part):
                known = self.encode(part)
                if known and ids[: len(known)] == known:
                    yield len(known)


def plain(messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    lines = "".join(f"{message['role']}: {message.get('content') or ''}\n" for message in messages)
    return lines + ("assistant: " if add_generation_prompt else "")


def call_form(template: str) -> CallForm | None:
    """How a template that takes `tools` writes calls: between Hermes' marks if it has them, else as bare objects."""
    from jinja2 import meta

    if "tools" not in meta.find_undeclared_variables(make_environment().parse(template)):
        return None
    if HERMES in template:
        return CallForm(f"{HERMES}\n", "\n</tool_call>")
    return CallForm("", "", "parameters" if '"parameters": ' in template else "arguments")


def read_chat(folder: Path, tokens: Tokens, vocab_size: int) -> Chat:
    """What a model's folder says of conversations."""
    config = _read_json(folder / CONFIG)
    template, for_tools = config.get("chat_template"), None
    if isinstance(template, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template, for_tools = named.get("default"), named.get("tool_use")
    if (folder / TEMPLATE).is_file():
        template = (folder / TEMPLATE).read_text(encoding="utf-8")
    if not all(one is None or isinstance(one, str) for one in (template, for_tools)):
        raise ValueError(f"{folder / CONFIG} has a chat_template that is no text")
    special = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    special = {name: text for name, text in special.items() if text is not None}
    stop_ids = [tokens.end, *_ids_of(_read_json(folder / GENERATION).get("eos_token_id"))]
    if "eos_token" in special:
        ids = tokens.encode(special["eos_token"].encode())
        stop_ids += ids if len(ids) == 1 else []
    stop_ids = [one for one in dict.fromkeys(stop_ids) if 0 <= one < vocab_size]
    start = [tokens.end] if tokens.end < vocab_size else []
    return Chat(tokens, template, named=special, start=start, stop_ids=stop_ids, tool_template=for_tools)


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
