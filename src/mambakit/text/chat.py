"""Conversations as token ids: the chat template of a tokenizer's files, or a plain one. See docs/serving.md."""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mambakit.text.tokens import Tokens

Message = Mapping[str, Any]
"""`role` and `content`, both text; a template may read more."""

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
SECONDS = 2.0
"""A template that takes longer to render is refused."""
LONGEST_TEMPLATE = 1 << 20
LONGEST_TEXT = 1 << 26
LARGEST_NUMBER = 100_000
"""Of what a template may repeat or pad by."""
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
        if tools:
            return self._write_tools(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self._write(messages, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Ids of a conversation's text; of a later part of it where it is not the `first`."""
        return (self._start if first else []) + self.tokens.encode(text.encode())

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


class Template:
    """A template in jinja's sandbox, with bounds on its time and on what it makes."""

    def __init__(self, source: str, named: Mapping[str, str]):
        if len(source) > LONGEST_TEMPLATE:
            raise ValueError(f"the chat template has {len(source):,} characters; at most {LONGEST_TEMPLATE:,} are read")
        import jinja2

        self._errors = (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
        try:
            self._template = make_environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template cannot be read: {error}") from error
        self._named = dict(named)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Any] | None = None
    ) -> str:
        pieces, length = [], 0
        given: dict[str, Any] = {"messages": [dict(one) for one in messages], "tools": tools}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            with limited(SECONDS, self._template.filename or "<template>"):
                for piece in self._template.generate(**self._named, **given):
                    length += len(piece)
                    if length > LONGEST_TEXT:
                        raise ValueError(f"it makes more than {LONGEST_TEXT:,} characters")
                    pieces.append(piece)
        except self._errors as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise ValueError(f"the chat template needs too much: {type(error).__name__}") from error
        return "".join(pieces)


def make_environment() -> Any:
    """jinja as chat templates expect it: transformers' settings, with nothing that reaches beyond the messages.

    What could make much out of little (products, padding, joins) is bounded, so that a hostile template ends early.
    """
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def check_size(*values: Any) -> None:
        if any(isinstance(value, int | float) and abs(value) > LARGEST_NUMBER for value in values):
            raise SecurityError(f"it computes with numbers above {LARGEST_NUMBER:,}")

    def joined(parts: Iterable[Any], between: Any = "") -> str:
        texts, length, between = [], 0, str(between)
        for part in parts:
            texts.append(str(part))
            length += len(texts[-1]) + len(between)
            if length > LONGEST_TEXT:
                raise SecurityError(f"it makes more than {LONGEST_TEXT:,} characters")
        return between.join(texts)

    def replaced(text: Any, old: Any, new: Any, count: int = -1) -> str:
        text, old, new = str(text), str(old), str(new)
        return joined(text.split(old, -1 if count is None else count) if old else [text], new)

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`, which marks what an assistant wrote, is what it encloses."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    class Code(CodeGenerator):
        def visit_Concat(self, node: Any, frame: Any) -> None:
            self.write("environment.concat((")
            for one in node.nodes:
                self.visit(one, frame)
                self.write(", ")
            self.write("))")

    class Bounded(ImmutableSandboxedEnvironment):
        code_generator_class = Code
        intercepted_binops = frozenset(("*", "**", "%", "+"))
        concat = staticmethod(joined)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            return not (isinstance(obj, str) and attr.startswith("format")) and super().is_safe_attribute(
                obj, attr, value
            )

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "%" and isinstance(left, str):
                raise SecurityError("it formats text with %; ~ joins it")
            if operator in ("*", "**"):
                check_size(left, right)
            if operator == "+" and isinstance(left, str | list | tuple) and len(left) > LONGEST_TEXT:
                raise SecurityError("it makes too much")
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            check_size(*args, *kwargs.values())
            owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
            if isinstance(owner, str) and name == "join":
                return joined(*args, between=owner)
            if isinstance(owner, str) and name == "replace":
                return replaced(owner, *args, **kwargs)
            return super().call(context, called, *args, **kwargs)

    def bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(filter)  # with the marks of what jinja passes to it
        def called(*args: Any, **kwargs: Any) -> Any:
            check_size(*args, *kwargs.values())
            return filter(*args, **kwargs)

        return called

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    def join(parts: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        return joined((part[attribute] for part in parts) if attribute else parts, d)

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **more: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **more)

    environment = Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"], autoescape=False
    )
    del environment.filters["format"]
    environment.filters |= {name: bounded(environment.filters[name]) for name in ("center", "indent", "batch", "slice")}
    environment.filters |= {"tojson": bounded(to_json), "join": join, "replace": replaced}
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
    }
    return environment


@contextmanager
def limited(seconds: float, filename: str) -> Iterator[None]:
    """Whatever runs of a template in this thread meanwhile ends with ValueError when its time is over.

    A loop in a template calls nothing that could look at the clock, so its lines do.
    """
    until = time.monotonic() + seconds
    before = sys.gettrace()

    def each_line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > until:
            raise ValueError(f"it takes longer than {seconds:g} s")
        return each_line

    def each_call(frame: FrameType, event: str, argument: Any) -> Any:
        return each_line(frame, event, argument) if frame.f_code.co_filename == filename else None

    sys.settrace(each_call)
    try:
        yield
    finally:
        sys.settrace(before)


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
