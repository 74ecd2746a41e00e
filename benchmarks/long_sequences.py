"""Time and memory of training one block on a long sequence: one call, and in segments with the cache carried along.

python -m benchmarks.long_sequences
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import interleaved, median, peak_bytes, table, write_json
from mambakit import Mamba1, Mamba1Config, Mamba2, Mamba2Config, Mamba3, Mamba3Config
from mambakit.training.segments import run_in_segments, segments


def tasks(block: torch.nn.Module, x_bsd: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Forward and backward, the loss being the mean square of the outputs."""

    def whole(segment_len: int | None):
        leaf = x_bsd.detach().requires_grad_()
        y, _ = block(leaf) if segment_len is None else run_in_segments(block, leaf, segment_len=segment_len)
        y.square().mean().backward()

    def piecewise(segment_len: int):
        for _, y, _ in segments(block, x_bsd, segment_len=segment_len):
            (y.square().sum() / x_bsd.numel()).backward()

    return {
        "one call": lambda: whole(None),
        "segments of 2048": lambda: whole(2048),
        "segments of 512": lambda: whole(512),
        "truncated, piece by piece": lambda: piecewise(512),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds (median)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    width = arguments.width
    blocks = {
        "Mamba-1": Mamba1(Mamba1Config(d_model=width)),
        "Mamba-2": Mamba2(Mamba2Config(d_model=width)),
        "Mamba-3": Mamba3(Mamba3Config(d_model=width)),
    }
    x_bsd = torch.randn(1, arguments.tokens, width)
    runs = {family: tasks(block, x_bsd) for family, block in blocks.items()}
    times = interleaved({(f, way): run for f, ways in runs.items() for way, run in ways.items()}, arguments.repeats)
    rows = [
        {"family": family, "way": way, "seconds": median(seconds), "bytes": peak_bytes(runs[family][way])}
        for (family, way), seconds in times.items()
    ]
    cells = {(r["family"], r["way"]): f"{r['seconds']:.1f} s, {r['bytes'] / 2**20:.0f} MiB" for r in rows}
    ways = list(runs["Mamba-1"])
    print(f"\nforward and backward, {arguments.tokens} tokens, width {width}, float32, {arguments.threads} threads")
    print("memory beyond the input\n")
    print(table(["", *ways], [[family, *(cells[family, way] for way in ways)] for family in blocks]))
    print(f"\nwritten to {write_json('long_sequences', {'rows': rows}).name}")


if __name__ == "__main__":
    main()
