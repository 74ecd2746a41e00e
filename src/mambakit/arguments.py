"""What any function checks at its door: numbers, words, paths, devices and kinds of objects, one line for each."""

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def shown(value: Any) -> str:
    """In a line, cut where it is long."""
    try:
        told = repr(value)
    except Exception:  # Python writes no integer of more than 4300 digits
        return f"a {type(value).__name__}"
    return " ".join(told.split())[:80] if "\n" in told else told[:80]


def number(name: str, value: Any) -> float:
    """A finite one, as torch takes it: larger integers than it has are floats."""
    try:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{name} is {shown(value)}, expected a finite number") from None


def find_device(given: Any) -> "torch.device":
    """ValueError where torch does not know it, or cannot use it on this machine."""
    import torch

    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except Exception as error:  # torch raises all kinds
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"device is {shown(given)}, which torch does not know or have here: {why:.120}") from error
    return device


def check_flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise ValueError(f"{name} is {shown(value)}, expected True or False")


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    optional: bool = False,
) -> None:
    """`value` is a finite number from `least`, or greater than `above`, to `most`; or None, if it is `optional`."""
    if value is None and optional:
        return
    bounds = [f"above {above:g}"] * (above > -math.inf) + [f"at least {least:g}"] * (least > -math.inf)
    bounds += [f"at most {most:g}"] * (most < math.inf)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) <= sys.float_info.max
        or not least <= value <= most
        or value <= above
    ):
        raise ValueError(f"{name} is {shown(value)}, expected a finite number {' and '.join(bounds)}")


def check_count(name: str, value: Any, *, least: int, most: int | None = None, optional: bool = False) -> None:
    """`value` is a whole number from `least` to `most`; or None, if it is `optional`."""
    if value is None and optional:
        return
    if type(value) is not int or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" + ("" if most is None else f" and at most {most}")
        raise ValueError(f"{name} is {shown(value)}, expected a whole number {bounds}")


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}, expected {expected}")


def find_path(name: str, value: Any) -> Path:
    """Of a string or a path that a file system can have."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} is {shown(value)}, expected a string or a path")
    try:
        os.fsencode(path := Path(value))
    except (UnicodeEncodeError, TypeError) as error:
        raise ValueError(f"{name} is {shown(value)}, which is no path") from error
    return path


def encoded(name: str, text: Any) -> bytes:
    """In UTF-8."""
    check_kind(name, text, str, "text")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a surrogate pair, which is no character") from error
