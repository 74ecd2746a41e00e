"""What the readers of foreign configs share: renaming fields, and naming all that is wrong with them at once."""

import reprlib
from collections.abc import Collection, Mapping
from typing import Any, get_type_hints

from mambakit.blocks.config import called, fits
from mambakit.blocks.family import FAMILIES
from mambakit.models.language_model import ModelConfig

Names = Mapping[str, str]
"""A format's names of fields, each with ours."""


def same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def renamed(values: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """The fields that `names` knows, under our names."""
    ours = {names[name]: value for name, value in values.items() if name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in ours.items()}


COUNTS = {"n_layer": 2**20, "n": 10_000, "indices": 10_000}
"""The most that is read of what is gone through one by one before the weights can say that it is not there. Virtual
layers need no weights at all."""


def shown(value: Any) -> str:
    """A value in a message, shortened."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 20
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 200


class Lint:
    """Collects what is wrong with a config, for one ValueError in the words of its format."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.buildable = True

    def add(self, problem: str) -> None:
        self.problems.append(problem)

    def unknown(self, values: Collection[str], known: Collection[str], where: str = "") -> None:
        self.problems += [f"unknown field {where}{name}" for name in sorted(set(values) - set(known))]

    def types(self, kind: type, values: Mapping[str, Any], names: Names, where: str = "") -> None:
        """Each value has to be one that its field of `kind`, a config of ours, can take."""
        hints = get_type_hints(kind)
        for name, ours in names.items():
            if name not in values:
                continue
            if not fits(values[name], hints[ours]):
                self.refuse(f"{where}{name} = {shown(values[name])} is not {called(hints[ours])}")
            elif ours in COUNTS:
                count = values[name] if isinstance(values[name], int) else len(values[name])
                if count > COUNTS[ours]:
                    self.refuse(f"{where}{name} asks for {count}, and at most {COUNTS[ours]} are read")

    def refuse(self, problem: str) -> None:
        """What leaves nothing to build."""
        self.add(problem)
        self.buildable = False

    def build(self, family: str, model: dict[str, Any], block: dict[str, Any]) -> ModelConfig:
        """The config, which may still be refused by `close`."""
        try:
            if self.buildable:
                return ModelConfig(block=FAMILIES[family].config(**block), **model)
        except (ValueError, ArithmeticError) as error:
            self.add(str(error))
        raise ValueError("; ".join(self.problems))

    def close(self) -> None:
        if self.problems:
            raise ValueError("; ".join(self.problems))
