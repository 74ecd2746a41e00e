"""Every Python and shell block of README and docs runs as written, and so does every example."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python" in page.read_text("utf-8")
]
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page, tmp_path, monkeypatch):
    """The blocks of a page share their names and a folder, in order."""
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": page.stem}
    for block in re.finditer(r"^```(python|sh)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        if block.group(1) == "sh":
            done = subprocess.run(["bash", "-e", "-c", block.group(2)], env=ENVIRONMENT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            continue
        line = page.read_text("utf-8")[: block.start()].count("\n") + 1
        # Padded with lines, so that a failure names the line of the page.
        exec(compile("\n" * line + block.group(2), str(page), "exec"), names)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example, tmp_path):
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example prints something"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_arithmetic_of_many_ranks_is_what_the_script_prints():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.parallel_arithmetic"], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "parallel.md").read_text("utf-8")
    for line in done.stdout.splitlines():
        assert line in page
