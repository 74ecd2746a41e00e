"""Text that has to have a form: which tokens may come next, by `llguidance`; see docs/generation.md."""

import json
import reprlib
import textwrap
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mambakit.optional import need
from mambakit.text.tokens import Bytes, TokenizerFile

COMPILERS = {"regex": "grammar_from_regex", "grammar": "grammar_from_lark"}
SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Of JSON: at most one, after a comma or a colon, so that a model cannot go on with spaces for ever."""
TABLES: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
"""What `llguidance` knows of a tokenizer's tokens, as it takes a while to find out."""


class Constraint:
    """Where a text stands in the form it has to have. ValueError where that form cannot be compiled."""

    def __init__(self, wanted: Any, tokenizer: Any, vocab_size: int):
        if tokenizer is None:
            raise ValueError("a constraint is about text, so it needs a tokenizer")
        self._vocab_size = vocab_size
        self._matcher = import_llguidance().LLMatcher(table(tokenizer), grammar(wanted), log_level=0)
        self._check("cannot be compiled")
        self._look_ahead()

    def keep(self, logits_w: Tensor) -> Tensor:
        """The logits of tokens that may come next, minus infinity in the place of the others."""
        return logits_w.masked_fill(~self._allowed_w.to(logits_w.device), -torch.inf)

    def take(self, token: int) -> bool:
        """Go on with this token; whether it was the last one that may come."""
        self._matcher.consume_token(token)
        self._check(f"cannot go on with token {token}")
        return self._matcher.is_stopped() or not self._look_ahead()

    def _look_ahead(self) -> bool:
        """Find out what may come next; whether anything may."""
        bias = self._matcher.compute_logit_bias()
        self._check("has become too complex")
        self._allowed_w = torch.zeros(self._vocab_size, dtype=torch.bool)
        # The model may know fewer ids than the tokenizer, or more.
        known_w = torch.frombuffer(bytearray(bias), dtype=torch.uint8)[: self._vocab_size]
        self._allowed_w[: len(known_w)] = known_w != 0
        goes_on = bool(self._allowed_w.any())
        if not goes_on and not self._matcher.is_accepting():
            raise ValueError("the constraint allows none of the model's tokens to come next")
        return goes_on

    def _check(self, told: str) -> None:
        if self._matcher.is_error():
            why = textwrap.shorten(self._matcher.get_error(), 300, placeholder=" ...")
            raise ValueError(f"the constraint {told}: {why}")


def constrained(logits_bw: Tensor, constraints: Sequence[Constraint | None]) -> Tensor:
    """What each row's constraint keeps, and all of a row that has none."""
    if not any(constraints):
        return logits_bw
    rows = zip(logits_bw, constraints, strict=True)
    return torch.stack([logits_w if own is None else own.keep(logits_w) for logits_w, own in rows])


def grammar(wanted: Any) -> str:
    """`llguidance`'s own form of a JSON schema, a regular expression or a lark grammar."""
    forms = 'a JSON schema as a dict, {"regex": ...} or {"grammar": ...}'
    if not isinstance(wanted, dict):
        raise ValueError(f"constraint is {reprlib.repr(wanted)}, expected {forms}")
    named = [form for form in COMPILERS if form in wanted]
    if named and len(wanted) > 1:
        raise ValueError(f"constraint has {', '.join(map(repr, wanted))}, expected one of: {forms}")
    matchers = import_llguidance().LLMatcher
    if named:
        text = wanted[named[0]]
        if not isinstance(text, str):
            raise ValueError(f"constraint has {named[0]} {reprlib.repr(text)}, expected a string")
        return getattr(matchers, COMPILERS[named[0]])(text)
    try:
        return matchers.grammar_from_json_schema(json.dumps(wanted, allow_nan=False), defaults=SPACES)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the constraint is not a JSON schema: {error}") from error


def table(tokenizer: Any) -> Any:
    """A tokenizer's tokens as `llguidance` reads them."""
    if tokenizer not in TABLES:
        llguidance = import_llguidance()
        if isinstance(tokenizer, Bytes):
            made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTable()))
        elif isinstance(tokenizer, TokenizerFile):
            made = file_table(llguidance, tokenizer)
        else:
            given = f"expected Bytes or a TokenizerFile of mambakit.text.tokens, got a {type(tokenizer).__name__}"
            raise ValueError(f"a constraint needs to know the tokenizer's tokens: {given}")
        TABLES[tokenizer] = made
    return TABLES[tokenizer]


class ByteTable:
    """`Bytes` in the words of `llguidance`."""

    eos_token_id = Bytes.end
    bos_token_id = None
    tokens = (*(bytes([one]) for one in range(256)), b"<end>")
    special_token_ids = (Bytes.end,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def file_table(llguidance: Any, tokenizer: TokenizerFile) -> Any:
    described = json.loads(tokenizer._tokenizer.to_str()) | {"truncation": None, "padding": None}
    if tokenizer._tokenizer.id_to_token(tokenizer.end) is None:
        # An id of its own after the last, of which the file says nothing.
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        described["added_tokens"].append({"id": tokenizer.end, "content": "<|end of text|>", **plain, "special": True})
    try:
        return llguidance.LLTokenizer(json.dumps(described), n_vocab=tokenizer.vocab_size, eos_token=tokenizer.end)
    except ValueError as error:
        raise ValueError(f"constraints do not go with the tokenizer {tokenizer.path}: {error}") from error


def import_llguidance() -> Any:
    return need("a constraint", "llguidance")
