"""Imports point down only."""

import ast
from pathlib import Path

import mambakit

ROOT = Path(mambakit.__file__).parent
# A part may import from itself and from the parts below it.
LAYERS = [
    "kernels",
    "ops",
    "blocks",
    "models",
    "checkpoints",
    "text",
    "inference",
    "training",
    "tools",
    "compat",
    "cli",
]


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


def test_imports_point_down():
    for file in ROOT.rglob("*.py"):
        part = file.relative_to(ROOT).with_suffix("").parts[0]
        if part in ("__init__", "__main__"):
            continue
        assert part in LAYERS, f"{part} has no place in the layers"
        for module in imports_of(file):
            assert LAYERS.index(part_of(module)) <= LAYERS.index(part), f"{file.relative_to(ROOT)} imports {module}"


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
    }
    # Kernels load a library; only `ops` knows them.
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
