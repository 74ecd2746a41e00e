"""Two source trees beside each other: every cell of kernels, block and decode, interleaved in one run.

    python -m benchmarks.compare ../before            # another checkout, its kernels built
    python -m benchmarks.compare ../before --what decode --rounds 15

A process per tree holds the models; they take turns, cell by cell, in random order. Printed is the median over the
rounds of this tree's time over the other's in the same round.
"""

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import median, progress, table, write_json

HERE = Path(__file__).parents[1]
WHAT = ("kernels", "block", "decode")


def ratios(other: Path, what: str, threads: int, rounds: int) -> dict[str, tuple[float, float]]:
    """By cell: this tree's median seconds, and the median of its time over the other's."""
    sides = []
    for tree in (other, HERE):
        # A pool that waits actively would take the processor from the other side.
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, str(HERE / "benchmarks" / "compare_cells.py"), what, str(threads)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        sides.append(subprocess.Popen(command, env=environment, **pipes))
    names = [side.stdout.readline().strip().split("\t") for side in sides][1]
    times: dict[str, list[list[float]]] = {name: [[], []] for name in names}
    for turn in range(rounds):
        for name in names:
            progress(f"{what}, {threads} threads, round {turn + 1} of {rounds}: {name}")
            for i in random.sample(range(2), 2):
                sides[i].stdin.write(name + "\n")
                times[name][i].append(float(sides[i].stdout.readline()))
    progress("")
    for side in sides:
        side.stdin.close()
        side.wait()
    pairs = {name: [b / a for a, b in zip(*both, strict=True)] for name, both in times.items()}
    return {name: (median(times[name][1]), median(pairs[name])) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    rows = []
    for threads in args.threads:
        for what in args.what:
            for name, (seconds, ratio) in ratios(args.other.resolve(), what, threads, args.rounds).items():
                rows.append({"what": what, "threads": threads, "cell": name, "ms": 1e3 * seconds, "ratio": ratio})
    lines = [[r["what"], str(r["threads"]), r["cell"], f"{r['ms']:.2f}", f"{r['ratio']:.3f}"] for r in rows]
    print(table(["what", "threads", "cell", "ms", "x before"], lines))
    print(f"slowest: {max(r['ratio'] for r in rows):.3f}, fastest: {min(r['ratio'] for r in rows):.3f}")
    print(f"written to {write_json('compare', {'rows': rows}).name}")


if __name__ == "__main__":
    main()
