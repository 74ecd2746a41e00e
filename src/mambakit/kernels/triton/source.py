"""Which sources a verdict is about."""

import ast
import hashlib
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = "mambakit.kernels.triton.code."


@cache
def source_hash() -> str:
    """Of all kernels and of the code that starts them: whatever changes, is new."""
    return hashed(*(file.read_text("utf-8") for file in sorted(HERE.glob("**/*.py"))))


@cache
def kernel_hash(kernel: str) -> str:
    """Of one, `file.function` in `code`, and of all that it calls: what was found out about others stays."""
    waiting, found = [kernel], {}
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name], called = definitions(name.split(".")[0])[name]
            waiting += called
    return hashed(*(f"{name}\n{found[name]}" for name in sorted(found)))


@cache
def definitions(file: str) -> dict[str, tuple[str, list[str]]]:
    """Each function and constant of a file of `code`, by name: its text, and which others it names."""
    text = (HERE / "code" / f"{file}.py").read_text("utf-8")
    lines, known, places = text.splitlines(), {}, {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            known |= {each.name: f"{(node.module or '').removeprefix(PACKAGE)}.{each.name}" for each in node.names}
        elif isinstance(node, ast.FunctionDef):
            known[node.name] = f"{file}.{node.name}"
            places[node.name] = node, min(each.lineno for each in (node, *node.decorator_list))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = f"{file}.{node.targets[0].id}"
            places[node.targets[0].id] = node, node.lineno
    found = {}
    for name, (node, first) in places.items():
        named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & known.keys()
        found[known[name]] = "\n".join(lines[first - 1 : node.end_lineno]), sorted(known[each] for each in named)
    return found


def hashed(*texts: str) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode())
    return found.hexdigest()[:16]
