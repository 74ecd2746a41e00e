"""Conversations from records, and as token ids of which the assistant's answers count."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from mambakit.text.chat import Chat, Message, Template
from mambakit.text.records import Record, called

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWER = "assistant"
BEGINS, ENDS = "\ufdd0", "\ufdd1"
"""Around answers while a template is rendered. Unicode promises that no text holds them."""


class Conversation(NamedTuple):
    name: str
    messages: list[dict[str, Any]]
    given: int = 0
    """Answers among so many first messages are part of the prompt and do not count."""


class Example(NamedTuple):
    """Tokens to read in order, and which of them are to be predicted."""

    name: str
    ids: list[int]
    counts: list[bool]


def conversation(record: Record) -> Conversation | None:
    """What a record says, if it is no plain text; ValueError names its place and what is wrong."""
    where, values = record
    if values.get("messages") is not None:
        found = Conversation(where, _messages(where, "messages", values["messages"]))
    elif values.get("prompt") is not None or values.get("completion") is not None:
        prompt = _side(where, values, "prompt", "user")
        found = Conversation(where, prompt + _side(where, values, "completion", ANSWER), len(prompt))
    else:
        return None
    if not any(message["role"] == ANSWER for message in found.messages[found.given :]):
        raise ValueError(f"{where} has no message of the {ANSWER}, which is what is learned")
    return found


def text_of(record: Record) -> str:
    text = record.values.get("text")
    if not isinstance(text, str):
        raise ValueError(f"{record.where}: text is {called(text)}, expected a text")
    return text


def examples(conversation: Conversation, chat: Chat, *, template: bool = True) -> list[Example]:
    """The conversation in the tokens that a model gets to see, all of whose answers count.

    Usually it is one example. Some templates write an answer otherwise once more follows; then there is one for each
    answer, with the beginning of the conversation as it is written when that answer is asked for. Without `template`
    the messages stand one after the other as they are.
    """
    name, messages, given = conversation
    try:
        if not template:
            pieces = [(str(one["content"]), i >= given and one["role"] == ANSWER) for i, one in enumerate(messages)]
            return [_encode(name, pieces, chat)]
        asked = [i for i, message in enumerate(messages) if i >= given and message["role"] == ANSWER]
        try:
            return [_encode(name, _cut(messages, asked, chat), chat)]
        except _CannotBeCutError:
            if len(asked) == 1:
                raise
        return [_encode(name, _cut(messages[: i + 1], [i], chat), chat) for i in asked]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


class _CannotBeCutError(ValueError):
    """Where an answer begins or ends cannot be told."""


Pieces = list[tuple[str, bool]]
"""Texts that together are a conversation, and whether each is an answer that counts."""


def _cut(messages: Sequence[Message], asked: Sequence[int], chat: Chat) -> Pieces:
    """By the template's own marks where it has some, or else by how it writes beginnings of the conversation."""
    if chat.template is not None and re.search(r"\{%[-+]?\s*generation\b", chat.template):
        return _cut_by_marks(messages, asked, chat)
    whole, pieces, at = chat.text(messages, add_generation_prompt=False), [], 0
    for i in asked:
        before = chat.text(messages[:i], add_generation_prompt=True)
        after = chat.text(messages[: i + 1], add_generation_prompt=False)
        if not (whole.startswith(after) and after.startswith(before) and at <= len(before) < len(after)):
            raise _CannotBeCutError(
                f"the chat template writes what precedes answer {i + 1} otherwise once more follows; "
                "mark answers in it by {% generation %} and {% endgeneration %}"
            )
        # In a plain line the answer is what a model writes before the line ends.
        end = len(after) - (1 if chat.stops else 0)
        pieces += [(whole[at : len(before)], False), (whole[len(before) : end], True)]
        at = end
    return [*pieces, (whole[at:], False)]


def _cut_by_marks(messages: Sequence[Message], asked: Sequence[int], chat: Chat) -> Pieces:
    # Inside an `if`, so that what the tags do to the space around them stays as it is.
    source = re.sub(
        r"\{%([-+]?)\s*generation\s*([-+]?)%\}", rf"{{%\1 if true %}}{BEGINS}{{% generation \2%}}", str(chat.template)
    )
    source = re.sub(
        r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}", rf"{{%\1 endgeneration %}}{ENDS}{{% endif \2%}}", source
    )
    text = Template(source, chat.named).render(messages, add_generation_prompt=False)
    answers = [i for i, message in enumerate(messages) if message["role"] == ANSWER]
    start, *rest = text.split(BEGINS)
    parts = [part.split(ENDS) for part in rest]
    if len(parts) != len(answers) or any(len(part) != 2 for part in parts):
        raise _CannotBeCutError(
            f"the chat template marks {len(parts)} answers by {{% generation %}} where there are {len(answers)}"
        )
    pieces = [(start, False)]
    for i, (answer, after) in zip(answers, parts, strict=True):
        pieces += [(answer, i in asked), (after, False)]
    return pieces


def _encode(name: str, pieces: Pieces, chat: Chat) -> Example:
    last = max(place for place, (_, counted) in enumerate(pieces) if counted)
    pieces = [piece for piece in pieces[: last + 1] if piece[0]]
    parts = _encode_together(pieces, chat) or _encode_apart(pieces, chat)
    ids, counts = [], []
    for part, (_, counted) in zip(parts, pieces, strict=True):
        ends = [place for place, id in enumerate(part) if id in chat.stop_ids]
        # What a template writes after the end of an answer is never asked for.
        known = ends[-1] + 1 if counted and ends else len(part)
        ids += part
        counts += [counted] * known + [False] * (len(part) - known)
    while counts and not counts[-1]:
        del ids[-1], counts[-1]
    if ids and ids[-1] not in chat.stop_ids and chat.tokens.end in chat.stop_ids:
        ids, counts = [*ids, chat.tokens.end], [*counts, True]
    if not any(counts[1:]):
        raise ValueError("no token of an answer is there to be predicted")
    return Example(name, ids, counts)


def _encode_together(pieces: Pieces, chat: Chat) -> list[list[int]] | None:
    """Ids of the whole text, cut where the pieces meet; None if a token stands on both sides of a cut."""
    text, at, parts = "", 0, []
    whole = chat.encode("".join(piece for piece, _ in pieces))
    for piece, _ in pieces:
        text += piece
        known = chat.encode(text)
        if len(known) < at or whole[: len(known)] != known:
            return None
        parts.append(whole[at : len(known)])
        at = len(known)
    return parts


def _encode_apart(pieces: Pieces, chat: Chat) -> list[list[int]]:
    """Piece by piece: an answer is then written as a model writes it that was given the ids before it."""
    parts = [chat.encode(piece, first=place == 0) for place, (piece, _) in enumerate(pieces)]
    whole, joined = chat.encode("".join(piece for piece, _ in pieces)), [id for part in parts for id in part]
    if chat.tokens.decode(joined) != chat.tokens.decode(whole):
        raise _CannotBeCutError("the tokenizer writes a part of a text otherwise than in the whole, so none can be cut")
    return parts


def _messages(where: str, field: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {field} is {called(value)}, expected a list of messages")
    if not value:
        raise ValueError(f"{where}: {field} is empty")
    found = []
    for i, message in enumerate(value):
        at = f"{where}: {field}[{i}]"
        if not isinstance(message, dict):
            raise ValueError(f"{at} is {called(message)}, expected an object with role and content")
        # Tables hold all fields of all messages.
        message = {name: one for name, one in message.items() if one is not None}
        if message.get("role") not in ROLES:
            role = message.get("role")
            told = "has no role" if role is None else f"has the role {role!r}"
            raise ValueError(f"{at} {told}; expected one of {', '.join(ROLES)}")
        calls = message["role"] == ANSWER and "tool_calls" in message
        if not isinstance(message.get("content", "" if calls else None), str):
            told = "has no content" if "content" not in message else f"has content that is {called(message['content'])}"
            raise ValueError(f"{at} {told}; expected a text")
        found.append(message)
    return found


def _side(where: str, values: dict[str, Any], field: str, role: str) -> list[dict[str, Any]]:
    """Of a prompt or completion: a text, or messages."""
    value = values.get(field)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if value is None:
        other = "completion" if field == "prompt" else "prompt"
        raise ValueError(f"{where} has a {other} and no {field}")
    return _messages(where, field, value)
