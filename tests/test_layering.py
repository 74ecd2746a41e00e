"""Imports point down only."""

import ast
from pathlib import Path

import pytest

import mambakit

ROOT = Path(mambakit.__file__).parent
# As in docs/architecture.md, from below. A part may import itself and the levels below; parts of one level do not know
# each other.
LEVELS = [
    {"ops"},
    {"blocks"},
    {"models"},
    {"checkpoints", "text", "parallel"},
    {"inference", "training"},
    {"tools", "serving"},
    {"compat", "cli"},
]
# Kernels stand aside: `ops` imports them as a whole, they register behind operations, and nothing else knows them.
KERNELS = "kernels"
# Known to all, and knowing nothing of them.
OUTSIDE = ("arguments", "optional")
IMPORTS_KERNELS = ROOT / "ops" / "__init__.py"


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: relative import"
            # `from mambakit import caches` imports the part of that name.
            names = (
                [f"mambakit.{alias.name}" for alias in node.names] if node.module == "mambakit" else [node.module or ""]
            )
            found |= set(names)
    return {name for name in found if name.split(".")[0] == "mambakit"}


def part_of(module: str) -> str:
    return [*module.split("."), ""][1]


def below(part: str) -> set[str]:
    """What a part may import."""
    if part == KERNELS:
        return {KERNELS, "ops"}
    level = next(i for i, parts in enumerate(LEVELS) if part in parts)
    return {part, "__version__", *OUTSIDE}.union(*LEVELS[:level])


def test_every_folder_has_its_place():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {KERNELS}.union(*LEVELS)
    assert {path.name for path in ROOT.glob("*.py")} == {
        "__init__.py",
        "public.py",
        *(f"{name}.py" for name in OUTSIDE),
    }


@pytest.mark.parametrize("part", sorted({KERNELS}.union(*LEVELS)))
def test_imports_point_down(part):
    for file in (ROOT / part).rglob("*.py"):
        name = file.relative_to(ROOT).as_posix()
        allowed = below(part) | ({KERNELS} if file == IMPORTS_KERNELS else set())
        wrong = sorted(module for module in imports_of(file) if part_of(module) not in allowed)
        assert not wrong, f"{name} imports {', '.join(wrong)}"


def test_ops_know_torch_only():
    allowed = {
        "abc",
        "torch",
        "mambakit",
        "math",
        "contextlib",
        "types",
        "typing",
        "collections",
        "dataclasses",
        "functools",
        "reprlib",
        "threading",
    }
    for file in (ROOT / "ops").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            else:
                continue
            assert names <= allowed, f"{file.name} imports {names - allowed}"


def test_oracles_know_nothing_of_the_library():
    for file in (Path(__file__).parent / "oracles").glob("*.py"):
        assert not imports_of(file), file.name
