"""What a person has who installed a wheel: no repository, no compiler, an empty folder. `make wheel-check` runs it.

    python tests/wheel_check.py build/wheel/env [--without-kernels]

The environment named holds torch and an installed mambakit and nothing else that is needed here.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TINY = "--steps 4 --d-model 32 --head-dim 16 --state-rank 16 --layers 2 --batch 2 --seq-len 64 --held-out 0.2"
TUNED = "--steps 2 --batch 2 --seq-len 64 --held-out 0.2"
# In order, in one folder. A verb that shall work from a wheel gets a line here: the command and what comes in.
COMMANDS = [
    ("mambakit --version", ""),
    ("mambakit --help", ""),
    (f"mambakit train text --out run {TINY}", ""),
    ("mambakit train --out run --resume", ""),
    ("mambakit train --out run --resume --steps 6", ""),
    ("mambakit generate run --prompt to --max-new-tokens 8 --seed 1", ""),
    ("mambakit chat run --max-new-tokens 8 --seed 1", "hello\n/again\n"),
    (f"mambakit train chats.jsonl --init run --lora 2 --out tuned {TUNED}", ""),
    (f"mambakit train chats.jsonl --init run --full --out full {TUNED}", ""),
    ("mambakit generate tuned --prompt to --max-new-tokens 8 --seed 1", ""),
    ("mambakit chat tuned --max-new-tokens 8 --seed 1", "hello\n"),
    ("mambakit quantize tuned/model small --bits 8 --report text", ""),
    ("mambakit generate small --prompt to --max-new-tokens 8 --seed 1", ""),
    ("mambakit chat small --max-new-tokens 8 --seed 1", "hello\n"),
    ("mambakit tokenizer text --out words.json --vocab-size 270", ""),
    ("mambakit convert run official --format official", ""),
    ("mambakit bench --d-model 64 --state-rank 16 --per-head-dim 16 --tokens 64 --repeats 1", ""),
    ("mambakit doctor", ""),
    ("python tour.py", ""),
]


def tour() -> str:
    """The Python blocks of the README, one after the other."""
    return "\n".join(
        re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    )


def run(command: str, given: str, environment: Path, folder: Path) -> str:
    """Standard output; ends the check where the command fails."""
    bin = environment / ("Scripts" if os.name == "nt" else "bin")
    name, *arguments = command.split()
    # Nothing in PATH but the environment itself, so no compiler; no PYTHONPATH, so no sources.
    done = subprocess.run(
        [bin / name, *arguments],
        cwd=folder,
        input=given,
        env={"PATH": str(bin), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"FAILED {command}\n{done.stdout}{done.stderr}")
    print(f"ok  {command}")
    return done.stdout


def main() -> None:
    environment = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").write_text("to be or not to be, that is the question\n" * 100)
        chat = {"messages": [{"role": "user", "content": "to be?"}, {"role": "assistant", "content": "or not"}]}
        (folder / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 40)
        (folder / "tour.py").write_text(tour())
        for command, given in COMMANDS:
            run(command, given, environment, folder)
        found = json.loads(run("mambakit doctor --json", "", environment, folder))
    kernels = found["kernels"]
    expected = sys.argv[2:] != ["--without-kernels"]
    if kernels["built"] is not expected:
        sys.exit(f"FAILED kernels: {kernels}")
    print(f"kernels: {kernels['instruction_set']}" if kernels["built"] else f"no kernels: {kernels['reason']}")


if __name__ == "__main__":
    main()
