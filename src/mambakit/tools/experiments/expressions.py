"""Random arithmetic with the value of every complete part, modulo 5."""

import random
from typing import NamedTuple

MODULUS = 5
OPERATORS = "+-*"
TOKENS = "01234" + OPERATORS + "()"


class Expression(NamedTuple):
    tokens: str
    values: list[int | None]
    """For every token the value of what is complete with it, modulo `MODULUS`; None where nothing is."""


def digit(rng: random.Random) -> int:
    return rng.randrange(MODULUS)


def combine(left: int, operator: str, right: int) -> int:
    if operator == "*":
        return left * right % MODULUS
    return (left + right if operator == "+" else left - right) % MODULUS


def flat(length: int, rng: random.Random) -> Expression:
    """Digits and operators in turn; an even length starts with a minus sign. Values are those of the part so far."""
    tokens, values, total, product = "", [], 0, 1
    operator = "-" if length % 2 == 0 else ""
    for _ in range((length + 1) // 2):
        value = digit(rng)
        if operator == "*":
            product = product * value % MODULUS
        else:
            total, product = (total + product) if tokens else 0, -value if operator == "-" else value
        tokens += operator + str(value)
        values += [None] * len(operator) + [(total + product) % MODULUS]
        operator = rng.choice(OPERATORS)
    return Expression(tokens, values)


def bracketed(length: int, rng: random.Random) -> Expression:
    """Nested brackets around two operands each, filled up with minus signs; values are those of what was closed."""
    if length < 1:
        raise ValueError(f"an expression of length {length} has no token")
    expression, value = _nested(length, rng)
    # The whole has a value also where it ends in no bracket.
    expression.values[-1] = value
    return expression


def _nested(length: int, rng: random.Random) -> tuple[Expression, int]:
    if length == 1:
        value = digit(rng)
        return Expression(str(value), [None]), value
    if length == 2:
        value = digit(rng)
        return Expression(f"-{value}", [None, None]), -value % MODULUS
    if length <= 4:
        inner, value = _nested(length - 2, rng)
        return Expression(f"({inner.tokens})", [None, *inner.values, value]), value
    left_length = rng.randint(1, length - 4)
    left, a = _nested(left_length, rng)
    right, b = _nested(length - 3 - left_length, rng)
    operator = rng.choice(OPERATORS)
    value = combine(a, operator, b)
    tokens = f"({left.tokens}{operator}{right.tokens})"
    return Expression(tokens, [None, *left.values, None, *right.values, value]), value
