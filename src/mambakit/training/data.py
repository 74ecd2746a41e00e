"""From what was read to what a run trains and is judged on."""

import hashlib
import json
import math
from collections.abc import Callable
from typing import NamedTuple

from mambakit.text.chat import Chat
from mambakit.text.conversations import Example, examples
from mambakit.text.documents import Document, Found, hold_out, hold_out_whole
from mambakit.text.tokens import Tokens
from mambakit.training.batches import Rows, encode
from mambakit.training.examples import HeldOutAnswers, Packed, fitting
from mambakit.training.loop import HeldOut
from mambakit.training.settings import TrainSettings


class Data(NamedTuple):
    rows: Rows | Packed
    held_out: HeldOut | HeldOutAnswers
    bits_per_nat: float | None
    """What a loss is in bits per byte of the text; None where answers are learned."""
    notes: list[str]
    """How much it is, and what was left out, a line each."""


class Choices(NamedTuple):
    """How data is prepared."""

    held_out: float = 0.05
    template: bool = True
    packing: bool = True
    too_long: str = "refuse"


def prepare(
    found: Found, tokens: Tokens, read_chat: Callable[[], Chat], settings: TrainSettings, choices: Choices
) -> Data:
    """Documents as text; with conversations among them, all as examples, of which documents count whole."""
    if found.conversations:
        return _prepare_examples(found, tokens, read_chat(), settings, choices)
    for_training, held_out = hold_out(found.documents, choices.held_out)
    rows = Rows(encode(for_training, tokens), tokens.end, settings)
    judged = HeldOut(encode(held_out, tokens), [len(content) for _, content in held_out])
    bits_per_nat = rows.tokens / sum(len(content) for _, content in for_training) / math.log(2)
    return Data(rows, judged, bits_per_nat, [f"{rows.tokens:,} tokens in {len(for_training)} documents"])


def fingerprint(found: Found) -> str:
    """The same for the same documents and conversations in the same order, and for no others."""
    digest = hashlib.sha256()
    for name, content in found.documents:
        digest.update(f"{name} {len(content)} ".encode() + content)
    for conversation in found.conversations:
        digest.update(json.dumps(conversation).encode())
    return digest.hexdigest()


def _prepare_examples(found: Found, tokens: Tokens, chat: Chat, settings: TrainSettings, choices: Choices) -> Data:
    said = hold_out_whole(found.conversations, choices.held_out)
    read = hold_out_whole(found.documents, choices.held_out) if len(found.documents) > 1 else (found.documents, [])

    def made(side: int) -> list[Example]:
        spoken = [one for each in said[side] for one in examples(each, chat, template=choices.template)]
        return spoken + [_whole(document, tokens) for document in read[side]]

    pairs, notes = fitting(made(0), settings.seq_len, choices.too_long)
    # Judged whole, however long.
    judged = HeldOutAnswers(fitting(made(1), 2**62, "refuse")[0])
    rows = Packed(pairs, settings, packing=choices.packing)
    much = (
        f"{rows.counted:,} of {rows.tokens:,} tokens are learned, in {len(pairs)} examples and {len(rows.rows)} rows; "
        f"{len(judged.pairs_s2)} examples are held out"
    )
    return Data(rows, judged, None, [*notes, much])


def _whole(document: Document, tokens: Tokens) -> Example:
    (ids_s,) = encode([document], tokens)
    ids = [*ids_s.tolist(), tokens.end]
    return Example(document.name, ids, [True] * len(ids))
