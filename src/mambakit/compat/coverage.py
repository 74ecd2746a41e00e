"""`python -m mambakit.compat.coverage docs/compat.md` rewrites the table of official names in that file."""

import importlib
import sys
from pathlib import Path

from mambakit.compat.finder import EXTENSIONS, HOME, exists
from mambakit.compat.gpu_only import GpuOnly
from mambakit.compat.official_names import NAMES

START, END = "<!-- made by python -m mambakit.compat.coverage -->", "<!-- end -->"
STATES = ("covered", "raises", "absent")


def state_of(module: str, name: str) -> str:
    """`covered`, `raises` when it is called, or `absent`."""
    own = EXTENSIONS.get(module, f"{HOME}.{module}")
    if not exists(own):
        return "absent"
    found = getattr(importlib.import_module(own), name, None)
    return "absent" if found is None else "raises" if isinstance(found, GpuOnly) else "covered"


def table() -> str:
    """One row per module, its names by what becomes of them, and the totals."""
    rows, totals = [], dict.fromkeys(STATES, 0)
    for module, names in sorted(NAMES.items()):
        by_state = {state: [n for n in names.split() if state_of(module, n) == state] for state in STATES}
        totals = {state: totals[state] + len(by_state[state]) for state in STATES}
        cells = (" ".join(f"`{name}`" for name in by_state[state]) for state in STATES)
        rows.append(f"| `{module}` | {' | '.join(cells)} |")
    counts = ", ".join(f"{totals[state]} {state}" for state in STATES)
    head = f"| module | {' | '.join(STATES)} |\n| --- | --- | --- | --- |"
    return "\n".join((START, "", f"{sum(totals.values())} names: {counts}.", "", head, *rows, "", END))


def rewritten(text: str) -> str:
    """A page with the table as it is now."""
    before, found, rest = text.partition(START)
    _, ends, after = rest.partition(END)
    if not found or not ends:
        raise ValueError(f"the page has no lines {START!r} and {END!r} to write the table between")
    return before + table() + after


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(rewritten(page.read_text("utf-8")), encoding="utf-8")
