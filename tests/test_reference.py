"""Every public name has a docstring with an example that runs, and a place in the reference."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

import mambakit as mk
import mambakit.inference

REFERENCE = Path(__file__).parents[1] / "docs" / "reference.md"


def public_functions(module) -> list[str]:
    own = {name: value for name, value in vars(module).items() if inspect.isfunction(value) or inspect.isclass(value)}
    return [name for name, value in own.items() if name[0] != "_" and value.__module__ == module.__name__]


NAMES = {f"mambakit.{name}": getattr(mk, name) for name in mk.__all__ if not inspect.ismodule(getattr(mk, name))}
NAMES |= {f"mambakit.inference.{name}": getattr(mk.inference, name) for name in mk.inference.__all__}
NAMES |= {f"mambakit.parallel.{name}": getattr(mk.parallel, name) for name in mk.parallel.__all__}
NAMES |= {f"mambakit.caches.{name}": getattr(mk.caches, name) for name in public_functions(mk.caches)}


def test_there_are_many():
    assert len(NAMES) > 60


@pytest.mark.parametrize("name", NAMES)
def test_example(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    says = inspect.getdoc(NAMES[name]) or ""
    assert len(says.split("\n")[0]) > 20, "says what it is"
    test = doctest.DocTestParser().get_doctest(says, {"mk": mk, "torch": torch}, name, None, None)
    assert test.examples, "has an example"
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.DocTestRunner(optionflags=flags).run(test).failed == 0


def test_reference_has_every_name():
    placed = re.findall(r"^::: (\S+)", REFERENCE.read_text("utf-8"), re.MULTILINE)
    assert sorted(placed) == sorted(set(placed)), "each once"
    assert set(placed) == set(NAMES)
