"""Memory and time of training a block with `SsdPath(lean=...)`, beside an ordinary call.

python -m benchmarks.lean     one block of width 768, 512 tokens, on 1 and 2 threads (two minutes)

"x needed" is peak memory over the bytes of input, output and parameters' gradients, "x time" over the ordinary call.
"""

import argparse
from typing import Any

import torch

from benchmarks.block import ours
from benchmarks.kernels import WIDE, train_of
from benchmarks.measure import interleaved, median, peak_bytes, table, write_json
from mambakit import SsdPath

SHARES = (None, 1.0, 0.5, 0.3, 0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--families", nargs="+", default=["Mamba-2", "Mamba-3", "Mamba-3 MIMO"])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        x = torch.randn(1, options.tokens, WIDE["d_model"])
        blocks = {family: block for family, block in ours(WIDE).items() if family in options.families}
        tasks = {
            (family, lean): train_of(block, x, SsdPath(lean=lean))
            for family, block in blocks.items()
            for lean in SHARES
        }
        times = interleaved(tasks, options.repeats)
        for (family, lean), task in tasks.items():
            needed = sum(p.nbytes for p in blocks[family].parameters()) + 2 * x.nbytes
            seconds, peak = median(times[family, lean]), peak_bytes(task)
            row = {"threads": threads, "family": family, "lean": lean, "ms": 1e3 * seconds, "peak_mb": peak / 1e6}
            rows.append(row | {"needed": peak / needed, "time": seconds / median(times[family, None])})
    cells = [
        [
            *(str(row["threads"]), row["family"], "" if row["lean"] is None else str(row["lean"])),
            *(f"{row['ms']:.0f}", f"{row['time']:.2f}", f"{row['peak_mb']:.1f}", f"{row['needed']:.2f}"),
        ]
        for row in rows
    ]
    print(table(["threads", "family", "lean", "ms", "x time", "peak MB", "x needed"], cells))
    print(write_json("lean", {"tokens": options.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
