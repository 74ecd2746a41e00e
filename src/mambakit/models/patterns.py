"""A small language for layers: `"3*M2 A"`, `"2*(M2+F M2+F A+F)"`, `"M2|A+F"`.

Layers stand one after the other. `+` joins the blocks of a layer, each behind a norm of its own; `|` puts two blocks
side by side behind one norm; `3*` repeats a layer, or several in parentheses. The caller says what names stand for.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from mambakit.blocks.config import BlockConfig
from mambakit.blocks.parallel import ParallelConfig

MAX_LAYERS = 1000

Layers = tuple[tuple[BlockConfig, ...], ...]


def read_pattern(pattern: str, blocks: Mapping[str, Callable[[], BlockConfig]]) -> Layers:
    """The layers that `pattern` names; ValueError shows where it stops making sense."""
    words = re.findall(r"\S", pattern) and re.findall(r"\d+\s*\*|[A-Za-z]\w*|\S", pattern)
    if not words:
        raise ValueError(f"the pattern of layers is empty; {_example(blocks)}")
    made: dict[str, BlockConfig] = {}
    places = iter([*words, ""])
    word = next(places)

    def fail(expected: str) -> Any:
        at = f"at {word!r}" if word else "at its end"
        raise ValueError(f"the pattern {pattern!r} makes no sense {at}: {expected}; {_example(blocks)}")

    def take() -> str:
        nonlocal word
        taken, word = word, next(places, "")
        return taken

    def name() -> BlockConfig:
        if word not in blocks:
            fail(f"expected one of {', '.join(blocks)}")
        called = take()
        if called not in made:
            made[called] = blocks[called]()
        return made[called]

    def block() -> BlockConfig:
        first = name()
        while word == "|":
            take()
            first = ParallelConfig(first, name())
        return first

    def layer() -> tuple[BlockConfig, ...]:
        found = [block()]
        while word == "+":
            take()
            found.append(block())
        return tuple(found)

    def several(closing: str) -> Layers:
        found: Layers = ()
        while word != closing:
            times = int(take()[:-1]) if re.match(r"\d", word) else 1
            if word in ("", ")"):
                fail("expected a layer")
            if word == "(":
                take()
                inside = several(")")
                take()
            else:
                inside = (layer(),)
            if not 0 < times <= MAX_LAYERS or len(found) + times * len(inside) > MAX_LAYERS:
                fail(f"expected 1 to {MAX_LAYERS} layers")
            found += inside * times
        return found

    layers = several("")
    return layers if layers else fail("expected a layer")


def _example(blocks: Mapping[str, Any]) -> str:
    first, *_, last = blocks
    return f'write it like "3*{first} {last}" or "2*({first}+{last} {first})"'
