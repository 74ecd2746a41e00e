"""Functions that a model may call: what is asked, the form its text then has, and the calls found in that text."""

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mambakit.inference.constraints import SPACES
from mambakit.serving.errors import bad
from mambakit.serving.schema import Schema, array, optional, record, text
from mambakit.text.chat import CallForm, Message

FLAG: Schema = {"type": ["boolean", "null"]}
NAME = text(pattern="^[a-zA-Z0-9_-]{1,64}$")
FUNCTION: dict[str, Schema] = {
    "name": NAME,
    "description": optional(text()),
    "parameters": optional({"type": "object"}),
    "strict": FLAG,
}
KIND: Schema = {"enum": ["function"]}
TOOLS = optional(array(record({"type": KIND, "function": record(FUNCTION, "name")}, "type", "function"), maxItems=128))
TOOLS_BESIDE = optional(array(record({"type": KIND, **FUNCTION}, "type", "name"), maxItems=128))
"""As responses have them: a function's fields beside its type."""
WORDS: Schema = {"enum": ["none", "auto", "required", None]}
CHOICE: Schema = {
    "anyOf": [WORDS, record({"type": KIND, "function": record({"name": NAME}, "name")}, "type", "function")]
}
CHOICE_BESIDE: Schema = {"anyOf": [WORDS, record({"type": KIND, "name": NAME}, "type", "name")]}
CALL = record(
    {
        "id": text(),
        "type": KIND,
        "function": record({"name": text(), "arguments": text()}, "name", "arguments"),
        "index": optional({"type": "integer"}),
    },
    "id",
    "function",
)
"""One in an assistant's message."""


class Tools(NamedTuple):
    """What a request says of functions, checked."""

    functions: list[dict[str, Any]]
    """Those that may be called, as templates read them."""
    must: bool
    several: bool
    form: CallForm

    def constraint(self, tag: Any) -> dict[str, Any] | None:
        """The form of a text that has to be a call; `tag(text)` is how a mark is written in a grammar."""
        if not self.must:
            return None
        before, after = tag(self.form.before), tag(self.form.after)
        rules = []
        for place, function in enumerate(self.functions):
            schema = {"x-guidance": SPACES, **(function.get("parameters") or {"type": "object"})}
            head = '{"name": ' + json.dumps(function["name"]) + ', "' + self.form.arguments + '": '
            rules.append(f'call_{place}: {json.dumps(head)} arguments_{place} "}}"')
            rules.append(f"arguments_{place}: %json {json.dumps(schema)}")
        any_of = " | ".join(f"call_{place}" for place in range(len(self.functions)))
        more = ' ("\\n" call)*' if self.several and self.form.before else ""
        call = " ".join(part for part in (before, f"({any_of})", after) if part)
        return {"grammar": "\n".join([f"start: call{more}", f"call: {call}", *rules])}


def read_tools(body: dict[str, Any], form: CallForm | None) -> Tools | None:
    """None where no function may be called. ApiError where what is said of them does not go together."""
    given = body.get("tools") or []
    functions = [
        {name: value for name, value in (one.get("function") or one).items() if name != "type"} for one in given
    ]
    names = [one["name"] for one in functions]
    choice = body.get("tool_choice")
    named = (choice.get("function") or choice)["name"] if isinstance(choice, dict) else None
    if not functions:
        if choice == "required" or named is not None:
            raise bad("tool_choice asks for a call, but there are no tools", "tool_choice")
        return None
    if len(set(names)) < len(names):
        raise bad("tools has two functions of one name", "tools")
    if named is not None and named not in names:
        raise bad(f"tool_choice names {named!r}, which is not among the tools {', '.join(names)}", "tool_choice")
    if form is None:
        raise bad("this model's chat template has no tools; leave them out", "tools")
    if choice == "none":
        return None
    wanted = body.get("response_format") or (body.get("text") or {}).get("format") or {"type": "text"}
    if wanted["type"] != "text":
        raise bad('an answer with a form of its own cannot be a call; ask with tool_choice "none"', "tools")
    chosen = functions if named is None else [one for one in functions if one["name"] == named]
    several = body.get("parallel_tool_calls") is not False and named is None
    return Tools(chosen, choice == "required" or named is not None, several, form)


def read_calls(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls of a message as templates read them: arguments are an object rather than its text, where they are one."""
    return [
        {
            "id": one["id"],
            "type": "function",
            "function": {"name": one["function"]["name"], "arguments": as_object(one["function"]["arguments"])},
        }
        for one in calls
    ]


def as_object(arguments: str) -> Any:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def name_in(quoted: str) -> str | None:
    """What a string in a model's JSON says, if it says anything that can be sent."""
    try:
        name = json.loads(quoted)
        name.encode()
    except ValueError:
        return None
    return name


class Call:
    """One that was made, as far as it has come."""

    def __init__(self, index: int, name: str):
        self.index, self.name, self.arguments = index, name, ""
        self.id, self.item = f"call_{uuid.uuid4().hex[:24]}", f"fc_{uuid.uuid4().hex}"

    def message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Delta(NamedTuple):
    """What an answer goes on by: text, or a call that begins (`new`) or goes on."""

    text: str
    call: Call | None = None
    new: bool = False


class Calls:
    """Text in, calls and other text out. Without a form all of it is text."""

    def __init__(self, form: CallForm | None, names: Sequence[str] = ()):
        self._form, self._names = form, frozenset(names)
        # Models are not strict about the white space around them.
        self._before, self._after = ("", "") if form is None else (form.before.strip(), form.after.strip())
        self.content = ""
        self.calls: list[Call] = []
        self._held = ""
        self._open: Call | None = None
        self._inside = False
        self._depth, self._quoted, self._escaped = 0, False, False

    def push(self, text: str) -> list[Delta]:
        if self._form is None:
            self.content += text
            return [Delta(text)] if text else []
        self._held += text
        return list(self._go_on(final=False))

    def end(self) -> list[Delta]:
        """The rest: what was held back for a call that did not come is text after all."""
        if self._form is None:
            return []
        found = list(self._go_on(final=True))
        if self._held and self._open is None:
            found += self._text((self._before if self._inside else "") + self._held)
        self._held = ""
        return found

    def message(self) -> Message:
        """The assistant's, as clients see it."""
        content = self.content if self.content.strip() or not self.calls else None
        calls = {"tool_calls": [one.message() for one in self.calls]} if self.calls else {}
        return {"role": "assistant", "content": content, **calls}

    def _go_on(self, final: bool) -> Iterator[Delta]:
        while self._held:
            before = (self._held, self._inside, self._open)
            if self._open is not None:
                yield from self._arguments()
            elif self._inside:
                yield from self._begin(final)
            else:
                yield from self._look_for_one()
            if before == (self._held, self._inside, self._open):
                return

    def _text(self, text: str) -> list[Delta]:
        self.content += text
        return [Delta(text)] if text else []

    def _look_for_one(self) -> Iterator[Delta]:
        """Text up to where a call may begin. Without marks, only a whole answer is one."""
        mark = self._before
        if not mark:
            if self.calls:
                self._held = self._held.lstrip()
            if not self.content and self._held.lstrip().startswith("{"):
                self._inside = True
            elif self._held.strip() or self.content:
                yield from self._text(self._held)
                self._held = ""
            return
        place = self._held.find(mark)
        if place >= 0:
            shown = self._held[:place]
            self._held, self._inside = self._held[place + len(mark) :], True
        else:
            kept = next(
                (n for n in range(min(len(mark) - 1, len(self._held)), 0, -1) if mark.startswith(self._held[-n:])), 0
            )
            shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        if self.calls and not shown.strip():
            return  # what stands between calls
        yield from self._text(shown)

    def _begin(self, final: bool) -> Iterator[Delta]:
        """A call's name, once it is there; what turns out to be none is text."""
        found = HEAD.match(self._held)
        name = name_in(found[1]) if found else None
        if found and name is not None and (self._before or name in self._names):
            self._open = Call(len(self.calls), name)
            self.calls.append(self._open)
            self._held = self._held[found.end() :]
            self._depth, self._quoted, self._escaped = 0, False, False
            yield Delta("", self._open, new=True)
            return
        after = self._after
        whole = after and after in self._held
        if found or whole or (len(self._held) > LONGEST_HEAD and not LIKE_A_HEAD.match(self._held)):
            upto = self._held.find(after) + len(after) if whole else len(self._held)
            said, self._held = self._before + self._held[:upto], self._held[upto:]
            self._inside = False
            yield from self._text(said)

    def _arguments(self) -> Iterator[Delta]:
        """What stands in the arguments, until the brackets are closed; then what closes the call is dropped."""
        call = self._open
        assert call is not None
        if not call.arguments or self._depth:
            upto = self._until_closed(self._held)
            new, self._held = self._held[:upto], self._held[upto:]
            call.arguments += new
            if new:
                yield Delta(new, call)
            if self._depth:
                return
        rest = self._held.lstrip()
        closing = re.match(r"\}\s*" + re.escape(self._after), rest)
        if closing:
            self._held, self._inside, self._open = rest[closing.end() :], False, None

    def _until_closed(self, text: str) -> int:
        for place, one in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif one == "\\":
                    self._escaped = True
                elif one == '"':
                    self._quoted = False
            elif one == '"':
                self._quoted = True
            elif one in "[{":
                self._depth += 1
            elif one in "]}":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        return len(text)


HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
LIKE_A_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"(?:[^"\\]|\\.){0,64}"?\s*(,\s*"(?:arguments|parameters)?"?\s*:?\s*)?$')
LONGEST_HEAD = 200
