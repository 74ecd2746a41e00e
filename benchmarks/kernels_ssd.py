"""The fused SSD kernel beside the same FLOPs in one large matrix product, and `torch.compile` of the plain form.

python -m benchmarks.kernels_ssd                 on 1 and on 2 threads
python -m benchmarks.kernels_ssd --no-compile    without the minute that compiling takes
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import gemm_task, interleaved, median, table, write_json
from benchmarks.ssd import forward, inputs, train
from mambakit import SsdPath, ssd
from mambakit.kernels.cpu.ssd import BACKWARD_ROWS, FORWARD_ROWS

KERNEL = SsdPath(backend="cpu")
# Mamba-2's, Mamba-3's with B and C per head, and that with four ranks: as many rows in all.
CASES = {
    "Mamba-2": {"tokens": 2048, "heads": 24, "per_head_dim": 64, "state_rank": 128, "groups": 1, "rank": 1},
    "Mamba-3": {"tokens": 2048, "heads": 24, "per_head_dim": 64, "state_rank": 128, "groups": 24, "rank": 1},
    "Mamba-3, rank 4": {"tokens": 512, "heads": 24, "per_head_dim": 64, "state_rank": 128, "groups": 24, "rank": 4},
}


def tensors_of(case: dict[str, int]) -> list[Tensor]:
    v, b, c, da, dt = inputs(tokens=case["tokens"], heads=case["heads"], groups=case["groups"])
    rank = case["rank"]
    return [*(torch.randn_like(t.expand(-1, -1, rank, -1, -1)) for t in (v, b, c)), da, dt]


def flops(case: dict[str, int], rows: int, *, triangle: bool) -> float:
    """Of one forward's products in chunks of `rows`: c.b, pairs with values, two with the state.

    Half of the pairs lie in the future. The kernel skips them, so `triangle` is what has to be computed; the full
    square is what batched products compute, and what the other tables count.
    """
    channels = case["heads"] * case["per_head_dim"]
    pairs = ((rows + case["rank"]) / 2 if triangle else rows) * (case["groups"] * case["state_rank"] + channels)
    return 2.0 * case["tokens"] * case["rank"] * (pairs + 2 * channels * case["state_rank"])


def compiled_form() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The plain chunked form, whose steps a compiler can fuse: forward, and forward with backward."""
    scan = torch.compile(
        lambda v, b, c, da, dt: ssd(v, b, c, da, dt, dt, path=SsdPath("minimal", 64, "torch")), dynamic=False
    )

    def run(tensors: list[Tensor]):
        with torch.no_grad():
            return scan(*tensors)

    def step(tensors: list[Tensor]):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        y, state = scan(*leaves)
        return torch.autograd.grad([y, state], leaves, [torch.ones_like(y), torch.ones_like(state)])

    return run, step


def measure(threads: int, repeats: int, compiling: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    gemm, gemm_flops = gemm_task()
    tasks: dict[Any, Callable[[], Any]] = {"gemm": gemm}
    for name, case in CASES.items():
        tensors = tensors_of(case)
        tasks[name, "forward"] = lambda t=tensors: forward(KERNEL, t)
        tasks[name, "train"] = lambda t=tensors: train(KERNEL, t)
    if compiling:
        run, step = compiled_form()
        tensors = tensors_of(CASES["Mamba-2"])
        tasks["compiled", "forward"] = lambda: run(tensors)
        tasks["compiled", "train"] = lambda: step(tensors)
    times = interleaved(tasks, repeats, seconds=60.0)
    rate = gemm_flops / median(times["gemm"])
    results = []
    for name, case in CASES.items():
        row: dict[str, Any] = {"case": name, "threads": threads, "gemm_gflops": rate / 1e9}
        for kind, multiple, rows in (("forward", 1, FORWARD_ROWS), ("train", 3, BACKWARD_ROWS)):
            seconds = median(times[name, kind])
            row[f"{kind}_ms"] = 1e3 * seconds
            for triangle in (False, True):
                floor = multiple * flops(case, rows, triangle=triangle) / rate
                row[f"{kind}_over_{'needed' if triangle else 'full'}"] = seconds / floor
        results.append(row)
    if compiling:
        for kind in ("forward", "train"):
            results[0][f"compiled_{kind}_ms"] = 1e3 * median(times["compiled", kind])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts to measure at")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved rounds (median)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments = parser.parse_args()
    results = [
        row for threads in arguments.threads for row in measure(threads, arguments.repeats, not arguments.no_compile)
    ]
    print(
        "\nfloat32, batch 1, 24 heads x 64 channels, state 128. Over GEMM: time over that of the FLOPs in 2048 x 2048\n"
        "products, training three times the forward's; once with the full square of pairs, once with the half needed\n"
    )
    columns = ["forward_ms", "forward_over_full", "forward_over_needed", "compiled_forward_ms"]
    columns += ["train_ms", "train_over_full", "train_over_needed", "compiled_train_ms"]
    print(
        table(
            ["threads", "case", *(column.replace("_", " ") for column in columns)],
            [[str(r["threads"]), r["case"], *(f"{r[c]:.2f}" if c in r else "" for c in columns)] for r in results],
        )
    )
    print(f"\nwritten to {write_json('kernels_ssd', {'cases': CASES, 'time': results}).name}")


if __name__ == "__main__":
    main()
