"""Chat templates, which come with models and are trusted no more than these: bounded in time and in what they make."""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

SECONDS = 2.0
"""A template that takes longer to render is refused."""
LONGEST_TEMPLATE = 1 << 20
LONGEST_TEXT = 1 << 26
LARGEST_NUMBER = 100_000
"""Of what a template may repeat or pad by."""
DEEPEST_INDENT = 32
UNBOUNDED = {"format", "format_map", "expandtabs", "translate"}
"""Methods of text that make much out of little."""
UNKNOWN = ("format", "urlize", "wordwrap", "xmlattr")
"""Filters that do, which no chat needs."""


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
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
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

    def too_long() -> SecurityError:
        return SecurityError(f"it makes more than {LONGEST_TEXT:,} characters")

    def shown(value: Any) -> Any:
        """The value, of which a text is to be made: how long that becomes is counted first."""
        if not isinstance(value, list | tuple | dict):
            return value
        length, left = 0, [value]
        while left:
            one = left.pop()
            length += len(one) if isinstance(one, str) else 8
            if isinstance(one, list | tuple | dict):
                length += 8 * len(one)
                if length <= LONGEST_TEXT:
                    left += [*one, *one.values()] if isinstance(one, dict) else one
            if length > LONGEST_TEXT:
                raise too_long()
        return value

    def joined(parts: Iterable[Any], between: Any = "") -> str:
        texts, length, between = [], 0, str(shown(between))
        for part in parts:
            texts.append(str(shown(part)))
            length += len(texts[-1]) + len(between)
            if length > LONGEST_TEXT:
                raise too_long()
        return between.join(texts)

    def replaced(text: Any, old: Any, new: Any, count: int = -1) -> str:
        text, old, new = (str(shown(one)) for one in (text, old, new))
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
            return not (isinstance(obj, str) and attr in UNBOUNDED) and super().is_safe_attribute(obj, attr, value)

        def wrap_str_format(self, value: Any) -> None:
            """No form of it is safe here."""

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "%" and isinstance(left, str):
                raise SecurityError("it formats text with %; ~ joins it")
            if operator in ("*", "**"):
                check_size(left, right)
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple):
                    longer = len(one) * times if operator == "*" and isinstance(times, int) else len(one)
                    if longer > LONGEST_TEXT:
                        raise too_long()
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
        if indent is not None and (not isinstance(indent, int) or indent > DEEPEST_INDENT):
            raise SecurityError(f"it indents by more than {DEEPEST_INDENT}")
        return json.dumps(shown(value), indent=indent, ensure_ascii=ensure_ascii, **more)

    def indented(text: str, width: Any = 4, *more: Any, **options: Any) -> str:
        by = len(width) if isinstance(width, str) else int(width)
        if len(str(text)) + str(text).count("\n") * by > LONGEST_TEXT:
            raise too_long()
        return filters["indent"](text, width, *more, **options)

    def total(numbers: Iterable[Any], attribute: str | None = None, start: Any = 0) -> Any:
        parts = list(numbers) if attribute is None else [one[attribute] for one in numbers]
        if not all(isinstance(one, int | float) for one in (start, *parts)):
            raise SecurityError("it adds up what is no number")
        return sum(parts, start)

    environment = Bounded(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        autoescape=False,
        finalize=shown,
    )
    filters = dict(environment.filters)
    for name in UNKNOWN:
        del environment.filters[name]
    environment.filters |= {name: bounded(filters[name]) for name in ("center", "batch", "slice", "truncate", "round")}
    environment.filters |= {"tojson": bounded(to_json), "join": join, "replace": replaced, "sum": total}
    environment.filters |= {"indent": bounded(indented), "string": lambda value: str(shown(value))}
    environment.filters["pprint"] = lambda value: filters["pprint"](shown(value))
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
    }
    return environment


@contextmanager
def limited(seconds: float, filename: str) -> Iterator[None]:
    """Whatever runs of a template in this thread meanwhile ends with ValueError when its time is over.

    A loop in a template calls nothing that could look at the clock, so its lines do, and those of filters.
    """
    import jinja2.filters

    watched = {filename, __file__, jinja2.filters.__file__}
    until = time.monotonic() + seconds
    before = sys.gettrace()

    def each_line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > until:
            raise ValueError(f"it takes longer than {seconds:g} s")
        return each_line

    def each_call(frame: FrameType, event: str, argument: Any) -> Any:
        return each_line(frame, event, argument) if frame.f_code.co_filename in watched else None

    sys.settrace(each_call)
    try:
        yield
    finally:
        sys.settrace(before)
