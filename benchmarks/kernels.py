"""The fused CPU kernels beside this machine's limits: the SSD core alone, and whole blocks.

python -m benchmarks.kernels                on 1 and 2 threads (a few minutes)
python -m benchmarks.kernels --compiled     also torch.compile of the plain SSD (a minute more)

"x floor" is the time over that of the same FLOPs in one large `torch.mm` of the same rounds. FLOPs of the scan are
those of chunks of 64 with full squares; training counts three times a forward. Forward takes 2048 tokens, training of
blocks 512, of the scan alone 2048.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import ssd as core
from benchmarks.block import ours
from benchmarks.measure import gemm_task, interleaved, median, peak_bytes, table, write_json
from mambakit import SsdPath
from mambakit.tools.benchmark import module_flops

WIDE = {"d_model": 768, "state_rank": 128, "per_head_dim": 64}
BACKENDS = ("cpu", "torch")
FIGURES = {"ms": 1, "over_floor": 2, "peak_mb": 0}


def ssd_tasks(compiled: bool) -> dict[Any, tuple[Callable[[], Any], float]]:
    tensors, flops = core.inputs(), core.flops(64)
    paths = {name: SsdPath(backend=name) for name in BACKENDS}
    tasks: dict[Any, tuple[Callable[[], Any], float]] = {}
    for name, path in paths.items():
        tasks["SSD", "forward", name] = (lambda path=path: core.forward(path, tensors), flops)
        tasks["SSD", "train", name] = (lambda path=path: core.train(path, tensors), 3 * flops)
    if compiled:
        plain = SsdPath("minimal", 64, "torch")
        forward, train = torch.compile(core.forward), torch.compile(core.train)
        tasks["SSD", "forward", "compiled"] = (lambda: forward(plain, tensors), flops)
        tasks["SSD", "train", "compiled"] = (lambda: train(plain, tensors), 3 * flops)
    return tasks


def block_tasks() -> dict[Any, tuple[Callable[[], Any], float]]:
    tasks: dict[Any, tuple[Callable[[], Any], float]] = {}
    long, short = torch.randn(1, 2048, 768), torch.randn(1, 512, 768)
    for family, block in ours(WIDE).items():
        for backend in BACKENDS:
            path = SsdPath(backend=backend)
            tasks[family, "forward", backend] = (forward_of(block, long, path), module_flops(block, 2048))
            tasks[family, "train", backend] = (train_of(block, short, path), 3 * module_flops(block, 512))
    return tasks


def forward_of(block: nn.Module, x: torch.Tensor, path: SsdPath) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad():
            block(x, path=path)

    return run


def train_of(block: nn.Module, x: torch.Tensor, path: SsdPath) -> Callable[[], Any]:
    def run() -> None:
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        block(leaf, path=path)[0].square().mean().backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        tasks = {**ssd_tasks(args.compiled), **block_tasks()}
        gemm, gemm_flops = gemm_task()
        times = interleaved({"mm": gemm, **{key: task for key, (task, _) in tasks.items()}}, args.repeats)
        rate = gemm_flops / median(times["mm"])
        for (what, kind, backend), (task, flops) in tasks.items():
            seconds = median(times[what, kind, backend])
            row = {"threads": threads, "what": what, "kind": kind, "backend": backend, "ms": 1e3 * seconds}
            row |= {"over_floor": seconds * rate / flops, "gflops_mm": rate / 1e9, "peak_mb": peak_bytes(task) / 1e6}
            rows.append(row)
    lines = [
        [
            str(r["threads"]),
            r["what"],
            r["kind"],
            r["backend"],
            *(f"{r[x]:.{digits}f}" for x, digits in FIGURES.items()),
        ]
        for r in rows
    ]
    print(table(["threads", "what", "kind", "backend", "ms", "x floor", "peak MB"], lines))
    print({r["threads"]: f"torch.mm {r['gflops_mm']:.0f} GFLOP/s" for r in rows})
    print(write_json("kernels", {"rows": rows}))


if __name__ == "__main__":
    main()
