"""How a command that cannot be done ends: in one line."""

import sys


def say(name: str, error: Exception) -> None:
    print(f"{name}: {one_line(str(error)) or 'not enough memory'}", file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """Whatever a file made an error say: no line breaks, and nothing that a terminal would obey."""
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
