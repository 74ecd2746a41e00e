"""What configs share: JSON both ways, and checks that say what to change."""

import json
import math
from collections.abc import Iterable
from dataclasses import MISSING, Field, asdict, dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin, get_type_hints

from mambakit.arguments import shown
from mambakit.blocks.words import check_known

if TYPE_CHECKING:
    from typing_extensions import Self


class Config:
    """Base of the frozen config dataclasses."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __new__(cls, *values: Any, **fields: Any) -> "Self":
        check_fields(cls, fields)
        return super().__new__(cls)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinity is the string `"inf"`."""
        return {name: _plain(value) for name, value in asdict(self).items()}  # type: ignore[call-overload]  # a dataclass

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        check_object(cls, values)
        check_fields(cls, values)
        missing = [field.name for field in fields(cls) if is_needed(field) and field.name not in values]  # type: ignore[arg-type]  # a dataclass
        if missing:
            raise ValueError(f"{cls.__name__} needs {', '.join(missing)}")
        return cls(**{name: from_plain(value) for name, value in values.items()})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Self":
        """ValueError for what is no JSON, or not that of such a config."""
        try:
            values = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{cls.__name__}.from_json got {shown(text)}, which is no JSON: {error}") from error
        return cls.from_dict(values)


class _Wide(Config):
    __slots__ = ()
    d_model: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig(_Wide):
    """Base of the families' configs."""

    in_scale: float = 1.0
    """What a block's input is multiplied by before all else."""
    out_scale: float = 1.0
    """What its output is multiplied by after all else."""


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return "inf" if value == math.inf else value


def from_plain(value: Any) -> Any:
    """What a plain JSON value stands for in a config."""
    if isinstance(value, list):
        return tuple(from_plain(item) for item in value)
    return math.inf if isinstance(value, str) and value == "inf" else value


def check_types(config: Any, *but: str) -> None:
    """Every field `but` some is of the type it is declared with, and no integer is one that torch cannot take."""
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if name not in but and not fits(value, hint):
            raise ValueError(f"{name} = {shown(value)} is not {called(hint)}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{name} = {shown(value)} is too large")


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass


def fits(value: Any, hint: Any) -> bool:
    """Whether a field that is declared so may hold the value."""
    if isinstance(hint, UnionType):
        return any(fits(value, option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if not isinstance(value, list | tuple):
            return False
        if parts[-1] is ...:
            return all(fits(item, parts[0]) for item in value)
        return len(value) == len(parts) and all(map(fits, value, parts))
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def called(hint: Any) -> str:
    """What such a field holds, for a reader."""
    if isinstance(hint, UnionType):
        return " or ".join(map(called, get_args(hint)))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return f"a list, each {called(parts[0])}" if parts[-1] is ... else f"a list of {len(parts)} numbers"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}
    return names.get(hint, f"a {hint.__name__}")


def is_needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def check_object(kind: type[Config], values: Any) -> None:
    """That these are fields by their names, whatever the fields are."""
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{kind.__name__} cannot be read from {shown(values)}, expected an object with its fields")


def check_fields(kind: type[Config], given: Iterable[str]) -> None:
    check_known(f"{kind.__name__} has no field", given, kind.__dataclass_fields__)


def check_config(module: Any, config: Any, kind: type[Config]) -> None:
    """ValueError unless a module was given the config that it is made from."""
    if not isinstance(config, kind):
        raise ValueError(f"{type(module).__name__} takes a {kind.__name__}, got a {type(config).__name__}")


def expanded(config: Any) -> int:
    """`expand` times `d_model`."""
    width = config.expand * config.d_model
    if not width < 2**63:
        raise ValueError(f"expand = {config.expand} is too large beside d_model = {config.d_model}")
    return int(width)


def check_positive(config: Any, *names: str) -> None:
    for name in names:
        value: Any = getattr(config, name)
        field = config.__dataclass_fields__.get(name)
        whole = field is not None and field.type is int
        kind: Any = Integral if whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{name} = {shown(value)} has to be {'a whole number' if whole else 'a number'}")
        if not value > 0:
            raise ValueError(f"{name} = {shown(value)} has to be positive")


def check_divides(part: str, part_size: int, whole: str, whole_size: int) -> None:
    if whole_size % part_size:
        # Up to a million: a size that a damaged file made up has to be refused in no time.
        near = [n for n in range(1, min(whole_size, 2**20) + 1) if whole_size % n == 0]
        near.sort(key=lambda n: abs(n - part_size))
        advice = " or ".join(map(str, near[:2]))
        raise ValueError(f"{whole} = {whole_size} is not a multiple of {part} = {part_size}; try {advice}")


def check_range(name: str, low_high: tuple[float, float], positive: bool = False) -> None:
    low, high = low_high
    if not low <= high or low < 0 or (positive and low == 0):
        bound = "0 < low <= high" if positive else "0 <= low <= high"
        raise ValueError(f"{name} = {low_high} has to be a pair with {bound}")
