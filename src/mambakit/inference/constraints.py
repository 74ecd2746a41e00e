"""Text that has to have a form: which tokens may come next, by `llguidance`; see docs/generation.md."""

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mambakit.arguments import check_count, shown
from mambakit.optional import need
from mambakit.text.tokens import Bytes, TokenizerFile

COMPILERS = {"regex": "grammar_from_regex", "grammar": "grammar_from_lark"}
SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Of JSON: at most one, after a comma or a colon, so that a model cannot go on with spaces for ever."""
QUOTE, BRACKETS = b'"', b"]})"
OTHERS = (b",:", b"0123456789", b"tn", b"f", b"-[{(", b" ", b"abcdefghijklmnopqrstuvwxyz")
"""First bytes of tokens in the order in which they are tried in bringing a text to its end."""
USED = 1000.0
FORMS, DETOURS = 64, 1024
"""That are remembered: forms for each tokenizer, detours for each form."""
LONGEST_WAY = 4096
"""Tokens after which no end is looked for any more: a form may have none."""
IS_ZERO = bytes([1]) + bytes(255)
MINUS_INFINITY = (bytes([0, 0xFF]) + bytes(254), bytes([0, 0x80]) + bytes(254))
"""Its two high bytes in float32 for 1, and those of 0 for 0."""


class Form:
    """What is known of all texts of one form for a model's vocabulary."""

    def __init__(self, matcher: Any):
        self.matcher = matcher
        """At the start of a text."""
        self.ways_out: list[list[int] | None] = []
        """The one from there, once it was looked for."""
        self.detours: dict[int, list[int]] = {}
        """After a token that a way out did not begin with: what led back to it last time."""
        self.latest: list[list[int]] = []
        """Of these the ones found last."""

    def add_detour(self, token: int, detour: list[int]) -> None:
        if len(self.detours) < DETOURS:
            self.detours[token] = detour
        if detour not in self.latest:
            self.latest = [detour, *self.latest[:3]]


class Table:
    """A tokenizer's tokens, and the forms that were compiled for them."""

    def __init__(self, known: Any):
        self.known = known
        """As `llguidance` reads them."""
        self.prices = find_prices(known)
        self._forms: dict[tuple[str, int], Form] = {}

    def form(self, told: str, vocab_size: int) -> Form:
        """Compiled once; one that cannot be is not remembered."""
        form = self._forms.get((told, vocab_size))
        if form is None:
            form = Form(import_llguidance().LLMatcher(self.known, told, log_level=0))
            if not form.matcher.is_error():
                while len(self._forms) >= FORMS:
                    self._forms.pop(next(iter(self._forms)), None)
                self._forms[told, vocab_size] = form
        return form


TABLES: "WeakKeyDictionary[Any, Table]" = WeakKeyDictionary()
"""By tokenizer, as it takes a while to find out."""


class Constraint:
    """Where a text stands in the form it has to have. ValueError where that form cannot be compiled.

    A text of at most `max_new_tokens` tokens is whole at its end: a token after which too few would be left gives way
    to the next one of a way out, which is known at every moment. Only where none was found from the start that is
    short enough (a form that needs more tokens) can it be cut.
    """

    def __init__(self, wanted: Any, tokenizer: Any, vocab_size: int, max_new_tokens: int | None = None):
        if tokenizer is None:
            raise ValueError("a constraint is about text, so it needs a tokenizer")
        check_count("vocab_size", vocab_size, least=1, most=2**31)
        check_count("max_new_tokens", max_new_tokens, least=0, optional=True)
        self._vocab_size = vocab_size
        self._table = table(tokenizer)
        self._eos = self._table.known.eos_token
        self._form = self._table.form(grammar(wanted), vocab_size)
        self._matcher = self._form.matcher.deep_copy()
        self._check("cannot be compiled")
        self.complete = False
        """Whether no further token may come."""
        self.only: int | None = None
        """The next token, where no other may come."""
        self._bias = bytearray(4 * vocab_size)
        self.bias_w = torch.frombuffer(self._bias, dtype=torch.float32)
        """Added to the logits of the next token: minus infinity where it may not come. Changed by `take`."""
        self._astray = 0
        """How many tokens of the way out only lead back to one that was known before."""
        self._look_ahead()
        self._left = max_new_tokens
        self._way_out = None if max_new_tokens is None else self._first_way_out(max_new_tokens)

    def take(self, token: int) -> int:
        """Go on with this token, or with another if too few were left to come to an end after it; which it was."""
        matcher, way_out = self._matcher, self._way_out
        if self._left is not None:
            self._left -= 1
            if way_out is not None:
                token, self._way_out = self._settle(token, way_out, self._left)
        matcher.consume_token(token)
        if matcher.is_error():
            self._check(f"cannot go on with token {token}")
        self.complete = matcher.is_stopped() or not self._look_ahead() or (self._left == 0 and matcher.is_accepting())
        return token

    def _first_way_out(self, most: int) -> list[int] | None:
        """From the start; found once for all texts of the form."""
        if not self._form.ways_out:
            self._form.ways_out.append(self._find_way_out(LONGEST_WAY))
        way_out = self._form.ways_out[0]
        return self._find_way_out(most) if way_out is not None and len(way_out) > most else way_out

    def _settle(self, token: int, way_out: list[int], left: int) -> tuple[int, list[int] | None]:
        """The token that comes and the way out after it, of at most `left` tokens; None for a model without an end."""
        way_out = way_out or [self._eos]  # where the text may end as it is
        found = way_out[1:] if token == way_out[0] else self._known_way_out(token, way_out, left)
        can_be_said = way_out[0] < self._vocab_size
        if found is None and (len(way_out) <= left or not can_be_said):
            # Where it takes all tokens that are left, no other is looked for.
            found = self._find_way_out(left, [token], way_out)
            if found is not None and found[-len(way_out) :] == way_out:
                self._form.add_detour(token, found[: -len(way_out)])
        if found is None and can_be_said:
            token, found = way_out[0], way_out[1:]
        if found is not None:
            self._astray = max(0, self._astray + len(found) - len(way_out))
        return token, found

    def _known_way_out(self, token: int, way_out: list[int], left: int) -> list[int] | None:
        """After `token`: as before, without the token that this one is in place of, or back to it."""
        ways = [way_out[1:], way_out] if self._astray else [way_out, way_out[1:]]
        detour = self._form.detours.get(token)
        if detour is None:
            ways += [[*some, *way_out] for some in self._form.latest]
        else:
            ways.insert(0, detour + way_out)
        for way in ways:
            if len(way) <= left and self._ends(self._matcher, [token, *way]):
                if detour is None and len(way) > len(way_out):
                    self._form.add_detour(token, way[: -len(way_out)])
                return way
        return None

    def _ends(self, matcher: Any, tokens: list[int]) -> bool:
        """Whether these may come next and be the last."""
        tokens.append(self._eos)
        return matcher.validate_tokens(tokens) == len(tokens)

    def _find_way_out(self, most: int, after: Sequence[int] = (), known: Sequence[int] = ()) -> list[int] | None:
        """Tokens that end the text, at most so many; None if none are found. `known` is how it would have ended before.

        What closes comes first, and of what does not, what has not been there yet: all of a form is tried in the end.
        """
        most = min(most, LONGEST_WAY)
        for joins in (True, False) if known else (False,):
            for first_w, dearer_w in self._table.prices:
                matcher, way = self._matcher.deep_copy(), []
                matcher.consume_tokens(list(after))
                price_w = first_w[: self._vocab_size].clone()
                while not matcher.is_error():
                    if matcher.is_stopped() or matcher.is_accepting():
                        return way
                    if joins and len(way) + len(known) <= most and self._ends(matcher, [*known]):
                        return [*way, *known]
                    if len(way) == most:
                        break
                    told = forbidden(matcher.compute_logit_bias(), len(price_w))
                    token = int(masked(price_w, told, torch.inf).argmin())
                    if told[token]:
                        break
                    matcher.consume_token(token)
                    way.append(token)
                    price_w[token] += dearer_w[token]
        return None

    def _look_ahead(self) -> bool:
        """Find out what may come next; whether anything may."""
        told = forbidden(self._matcher.compute_logit_bias(), self._vocab_size)
        if self._matcher.is_error():
            self._check("has become too complex")
        # Bytes of float32: torch takes longer for any of its operations.
        high, low = (3, 2) if sys.byteorder == "little" else (0, 1)
        self._bias[high::4], self._bias[low::4] = told.translate(MINUS_INFINITY[0]), told.translate(MINUS_INFINITY[1])
        first = told.find(0)
        self.only = first if first >= 0 and told.find(0, first + 1) < 0 else None
        if first < 0 and not self._matcher.is_accepting():
            raise ValueError("the constraint allows none of the model's tokens to come next")
        return first >= 0

    def _check(self, told: str) -> None:
        if self._matcher.is_error():
            why = textwrap.shorten(self._matcher.get_error(), 300, placeholder=" ...")
            raise ValueError(f"the constraint {told}: {why}")


def forbidden(bias: bytes, vocab_size: int) -> bytes:
    """1 for each of the model's tokens that `llguidance` does not allow. The model may know fewer ids than it, or more.

    Bytes, as torch takes longer for any of its operations than all of this does.
    """
    return bias[:vocab_size].translate(IS_ZERO).ljust(vocab_size, b"\1")


def masked(values_w: Tensor, forbidden: bytes, value: float) -> Tensor:
    """`value` in all places of `values_w` where there is a 1."""
    return values_w.masked_fill(torch.frombuffer(bytearray(forbidden), dtype=torch.bool), value)


def find_prices(known: Any) -> list[tuple[Tensor, Tensor]]:
    """Prices of tokens for two ways to the end of a text, and how much dearer each use makes them.

    The first takes a quote for the end of a string, the second for its beginning.
    """
    tokens = [known.decode_bytes([id]) for id in range(known.vocab_size)]
    special_w = torch.tensor([known.is_special_token(id) for id in range(known.vocab_size)])
    quoted_w = torch.tensor([token[:1] == QUOTE for token in tokens])
    first_w, second_w = (
        torch.tensor([price(token, order) for token in tokens]).masked_fill(special_w, torch.inf)
        for order in ((QUOTE, BRACKETS, *OTHERS), (BRACKETS, QUOTE, *OTHERS))
    )
    return [(first_w, USED * (first_w > 7.5)), (second_w, USED * ~quoted_w)]


def price(token: bytes, order: Sequence[bytes]) -> float:
    """By what it begins with, and of those, the shortest; but what closes several things is the best."""
    place = next((i for i, some in enumerate(order) if token[:1] in some), len(order)) if token else len(order)
    closes = all(one in QUOTE + BRACKETS for one in token)
    return place + 0.01 * (-1 if closes else 1) * min(len(token), 40)


def constrained(logits_bw: Tensor, constraints: Sequence[Constraint | None]) -> Tensor:
    """What each row's constraint keeps, and all of a row that has none."""
    if not any(constraints):
        return logits_bw
    if len(constraints) == 1 and constraints[0] is not None:
        bias_bw = constraints[0].bias_w
    else:
        free_w = torch.zeros(logits_bw.shape[1])
        bias_bw = torch.stack([free_w if own is None else own.bias_w for own in constraints])
    return logits_bw + (bias_bw if logits_bw.device.type == "cpu" else bias_bw.to(logits_bw.device))


def grammar(wanted: Any) -> str:
    """`llguidance`'s own form of a JSON schema, a regular expression or a lark grammar."""
    forms = 'a JSON schema as a dict, {"regex": ...} or {"grammar": ...}'
    if not isinstance(wanted, dict):
        raise ValueError(f"constraint is {shown(wanted)}, expected {forms}")
    named = [form for form in COMPILERS if form in wanted]
    if named and len(wanted) > 1:
        raise ValueError(f"constraint has {', '.join(map(repr, wanted))}, expected one of: {forms}")
    matchers = import_llguidance().LLMatcher
    if named:
        text = wanted[named[0]]
        if not isinstance(text, str):
            raise ValueError(f"constraint has {named[0]} {shown(text)}, expected a string")
        return getattr(matchers, COMPILERS[named[0]])(text)
    try:
        return matchers.grammar_from_json_schema(json.dumps(wanted, allow_nan=False), defaults=SPACES)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the constraint is not a JSON schema: {error}") from error


def table(tokenizer: Any) -> Table:
    try:
        known = tokenizer in TABLES
    except TypeError:  # what cannot be a key is none of ours
        known = False
    if not known:
        llguidance = import_llguidance()
        if isinstance(tokenizer, Bytes):
            made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTable()))
        elif isinstance(tokenizer, TokenizerFile):
            made = file_table(llguidance, tokenizer)
        else:
            given = f"expected Bytes or a TokenizerFile of mambakit.text.tokens, got a {type(tokenizer).__name__}"
            raise ValueError(f"a constraint needs to know the tokenizer's tokens: {given}")
        TABLES[tokenizer] = Table(made)
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
