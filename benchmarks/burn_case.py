"""burn-mamba's published case beside the times it published.

python -m benchmarks.burn_case     on 1 and 2 threads (about a minute)

One block, batch 2, 256 tokens, width 256, state 64, heads of 64. Its times are those of its CPU backend ("flex") in the
table of 18 August 2026 in its repository, which does not say on what machine; so they say where the crate stood, not
which of two machines is faster.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.block import STEPS, our_tasks, repeated
from benchmarks.measure import gemm_task, interleaved, median, table, write_json
from mambakit import Mamba1, Mamba1Config, Mamba2, Mamba2Config, Mamba3, Mamba3Config

SIZES: dict[str, Any] = {"d_model": 256, "state_rank": 64, "per_head_dim": 64}
KINDS = ("forward", "train", "step")
PUBLISHED_MS = {
    "mamba1": (71.78, 6670.0, 0.346),
    "mamba2": (23.79, 80.88, 0.296),
    "mamba3/siso": (23.89, 77.21, 0.337),
    "mamba3/mimo-rank1": (24.96, 79.96, 0.362),
    "mamba3/mimo-rank4": (122.58, 347.28, 0.533),
    "mamba3/quaternion4d": (31.37, 114.86, 0.366),
    "mamba3/siso-double-ssd": (30.55, 107.20, 0.321),
}
"""Of forward, train and step."""


def blocks() -> dict[str, nn.Module]:
    def mamba3(**options: Any) -> nn.Module:
        return Mamba3(Mamba3Config.burn(**SIZES, **options))

    return {
        "mamba1": Mamba1(Mamba1Config(d_model=256)),
        "mamba2": Mamba2(Mamba2Config(**SIZES)),
        "mamba3/siso": mamba3(),
        "mamba3/mimo-rank1": mamba3(is_mimo=True, mimo_rank=1),
        "mamba3/mimo-rank4": mamba3(is_mimo=True, mimo_rank=4),
        "mamba3/quaternion4d": mamba3(rotation="quaternion"),
        "mamba3/siso-double-ssd": mamba3(),
    }


def tasks(case: str, block: Any, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The pathway is chosen by the cache, so a fresh one of the other pathway goes in."""
    if not case.endswith("double-ssd"):
        return our_tasks(block, x, x.shape[1])
    fresh = block.fresh_cache(len(x), pathway="double")

    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> Any:
            return block(x, fresh)

        def step(self, x: torch.Tensor, cache: Any) -> Any:
            return block.step(x, cache)

    return our_tasks(Double(), x, x.shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        x = torch.randn(2, 256, 256)
        runs = {case: tasks(case, block, x) for case, block in blocks().items()}
        flat = {(case, kind): run for case, kinds in runs.items() for kind, run in kinds.items() if kind != "step"}
        steps = {(case, "step"): repeated(kinds["step"]) for case, kinds in runs.items()}
        gemm, flops = gemm_task()
        times = interleaved({"gemm": gemm, **flat}, options.repeats) | interleaved(steps, options.repeats)
        for case, published in PUBLISHED_MS.items():
            for kind, theirs in zip(KINDS, published, strict=True):
                ms = 1e3 * median(times[case, kind]) / (STEPS if kind == "step" else 1)
                row = {"threads": threads, "case": case, "kind": kind, "ms": ms, "published_ms": theirs}
                rows.append(row | {"gemm_gflops": flops / median(times["gemm"]) / 1e9})
    found = {(r["case"], r["kind"], r["threads"]): r["ms"] for r in rows}
    cells = [
        [case, kind, f"{theirs:.2f}", *(f"{found[case, kind, threads]:.2f}" for threads in options.threads)]
        for kind in KINDS
        for case, theirs in ((case, times[KINDS.index(kind)]) for case, times in PUBLISHED_MS.items())
    ]
    threads = [f"ours, {n} thread{'s' * (n > 1)}" for n in options.threads]
    print(table(["case", "kind", "burn-mamba, CPU, ms", *threads], cells))
    print(write_json("burn_case", {"rows": rows}))


if __name__ == "__main__":
    main()
