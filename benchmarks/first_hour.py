"""What a person waits for first: imports and the command line. And what a step costs that may start rows afresh.

python -m benchmarks.first_hour        about a minute

Imports and commands are processes of their own, in rounds that run each once; so are the steps. Times are medians.
"""

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import interleaved, median, table, write_json
from mambakit import Mamba1, Mamba2, Mamba3

PROCESSES = {
    "import torch": "import torch",
    "import mambakit": "import mambakit as mk; mk.Mamba3, mk.load_model, mk.generate",
    "mambakit --help": "from mambakit.cli.main import main; main(['--help'])",
}
BLOCKS = {"Mamba-1": Mamba1, "Mamba-2": Mamba2, "Mamba-3": Mamba3}
WIDTH, BATCH, STEPS = 768, 8, 20


def start(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def steps(block: Any, x_bd: torch.Tensor, cache: Any, reset_b: torch.Tensor | None) -> None:
    with torch.no_grad():
        for _ in range(STEPS):
            _, cache = block.step(x_bd, cache, reset_b=reset_b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = {name: partial(start, code) for name, code in PROCESSES.items()}
    waited = {name: median(times) for name, times in interleaved(started, args.repeats).items()}
    print(
        table(
            ["", "seconds", "x import torch"],
            [[n, f"{s:.2f}", f"{s / waited['import torch']:.2f}"] for n, s in waited.items()],
        )
    )
    tasks: dict[tuple[str, str], Any] = {}
    resets = {"step": None, "with reset_b, none set": torch.zeros(BATCH, dtype=torch.bool)}
    resets["with reset_b, half set"] = torch.arange(BATCH) % 2 == 0
    for name, of in BLOCKS.items():
        block, x_bd = of(d_model=WIDTH).eval(), torch.randn(BATCH, WIDTH)
        for kind, reset_b in resets.items():
            tasks[name, kind] = partial(steps, block, x_bd, block.fresh_cache(BATCH), reset_b)
    took = {key: median(times) / STEPS * 1e6 for key, times in interleaved(tasks, 5 * args.repeats).items()}
    rows = [
        [name, *(f"{took[name, kind]:.0f} ({took[name, kind] / took[name, 'step']:.2f})" for kind in resets)]
        for name in BLOCKS
    ]
    print(table([f"microseconds, {BATCH} rows, width {WIDTH}", *resets], rows))
    found = {"seconds": waited, "step_microseconds": {" ".join(key): value for key, value in took.items()}}
    print(f"written: {write_json(Path(__file__).stem, found)}")


if __name__ == "__main__":
    main()
