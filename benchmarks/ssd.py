"""Time and memory of the SSD core per algorithm and chunk length, beside the same FLOPs in large matrix products.

python -m benchmarks.ssd             the table of docs/benchmarks.md (a few minutes)
python -m benchmarks.ssd --demo      agreement, time and memory of the three algorithms (seconds)
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import gemm_task, interleaved, median, peak_bytes, table, write_json
from mambakit import SsdPath, ssd

SHAPE = {"batch": 1, "tokens": 2048, "heads": 24, "per_head_dim": 64, "state_rank": 128, "groups": 1}
ALGORITHMS = ("minimal", "serial", "serial_recalculated")


def inputs(**changed: int) -> list[Tensor]:
    """v, b, c, da, dt as a Mamba-2 block makes them."""
    n = {**SHAPE, **changed}
    torch.manual_seed(0)
    b, s, h = n["batch"], n["tokens"], n["heads"]
    dt = torch.rand(b, s, h) * 0.1
    return [
        torch.randn(b, s, 1, h, n["per_head_dim"]),
        torch.randn(b, s, 1, n["groups"], n["state_rank"]),
        torch.randn(b, s, 1, n["groups"], n["state_rank"]),
        -dt * (1 + 15 * torch.rand(h)),
        dt,
    ]


def flops(chunk_len: int, **changed: int) -> float:
    """Of one forward's matrix products: c.b per group, the pairs of a chunk, and the two with the state."""
    n = {**SHAPE, **changed}
    channels = n["heads"] * n["per_head_dim"]
    pairs = chunk_len * (n["groups"] * n["state_rank"] + channels)
    return 2.0 * n["batch"] * n["tokens"] * (pairs + 2 * channels * n["state_rank"])


def forward(path: SsdPath, tensors: list[Tensor]):
    with torch.no_grad():
        v, b, c, da, dt = tensors
        return ssd(v, b, c, da, dt, dt, path=path)


def train(path: SsdPath, tensors: list[Tensor]):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    v, b, c, da, dt = leaves
    y, state = ssd(v, b, c, da, dt, dt, path=path)
    return torch.autograd.grad([y, state], leaves, [torch.ones_like(y), torch.ones_like(state)])


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.0f}"


def full(threads: list[int], repeats: int) -> None:
    results, tensors = [], inputs()
    for count in threads:
        torch.set_num_threads(count)
        gemm, gemm_flops = gemm_task()
        paths = [SsdPath(name, chunk_len, "torch") for name in ALGORITHMS for chunk_len in (64, 96, 128, 256)]
        tasks: dict[Any, Callable[[], Any]] = {"gemm": gemm}
        for path in paths:
            tasks[path, "forward"] = lambda path=path: forward(path, tensors)
            tasks[path, "train"] = lambda path=path: train(path, tensors)
        times = interleaved(tasks, repeats)
        rate = gemm_flops / median(times["gemm"])
        for path in paths:
            row = {
                "threads": count,
                "algorithm": path.algorithm,
                "chunk_len": path.chunk_len,
                "gemm_gflops": rate / 1e9,
            }
            for kind, multiple in (("forward", 1), ("train", 3)):
                seconds = median(times[path, kind])
                row[f"{kind}_ms"] = 1e3 * seconds
                row[f"{kind}_over_gemm"] = seconds * rate / (multiple * flops(path.chunk_len or 0))
            results.append(row)
    print(
        f"\n{SHAPE}, float32\nover GEMM: time over that of its FLOPs in 2048 x 2048 products (training: three times)\n"
    )
    print(
        table(
            ["threads", "algorithm", "chunk", "forward ms", "over GEMM", "train ms", "over GEMM"],
            [
                [
                    str(r["threads"]),
                    r["algorithm"],
                    str(r["chunk_len"]),
                    f"{r['forward_ms']:.1f}",
                    f"{r['forward_over_gemm']:.2f}",
                    f"{r['train_ms']:.1f}",
                    f"{r['train_over_gemm']:.2f}",
                ]
                for r in results
            ],
        )
    )
    shapes = [(2048, 64), (2048, 96), (2048, 128), (2048, 256), (1024, 96), (4096, 96)]
    memory = [memory_row(name, *shape) for name in ALGORITHMS for shape in shapes]
    print("\nPeak memory, MiB. `own`: what training holds beyond outputs, their gradients and the inputs'\n")
    print(
        table(
            ["algorithm", "tokens", "chunk", "inputs", "forward", "train", "own"],
            [
                [
                    r["algorithm"],
                    str(r["tokens"]),
                    str(r["chunk_len"]),
                    *(mebibytes(r[key]) for key in ("inputs", "forward", "train", "own")),
                ]
                for r in memory
            ],
        )
    )
    print(f"\nwritten to {write_json('ssd', {'shape': SHAPE, 'time': results, 'memory': memory}).name}")


def memory_row(algorithm: str, tokens: int, chunk_len: int) -> dict:
    """Bytes beyond the inputs. What any algorithm holds in training is `y`, its gradient and the inputs' gradients."""
    tensors, path = inputs(tokens=tokens), SsdPath(algorithm, chunk_len, "torch")
    given = sum(tensor.nbytes for tensor in tensors)
    y, state = forward(path, tensors)
    training = peak_bytes(lambda: train(path, tensors))
    return {
        "algorithm": algorithm,
        "tokens": tokens,
        "chunk_len": chunk_len,
        "inputs": given,
        "forward": peak_bytes(lambda: forward(path, tensors)),
        "train": training,
        "own": training - 2 * (y.nbytes + state.nbytes) - given,
    }


def demo() -> None:
    """The three algorithms on one input: how far from a float64 recurrence, how fast, how much memory."""
    torch.set_num_threads(1)
    small = {"tokens": 512, "heads": 8}
    tensors = inputs(**small)
    wide = [tensor.double() for tensor in tensors]
    want = [*token_by_token(wide), *train(SsdPath.serial(32), wide)]
    paths = [SsdPath(name, 64, "torch") for name in ALGORITHMS]
    times = interleaved({(p, f): (lambda p=p, f=f: f(p, tensors)) for p in paths for f in (forward, train)}, repeats=10)
    rows = []
    for path in paths:
        got = [*forward(path, tensors), *train(path, tensors)]
        errors = [((g - w).abs().max() / w.abs().max()).item() for g, w in zip(got, want, strict=True)]
        rows.append(
            [
                path.algorithm,
                f"{max(errors[:2]):.1e}",
                f"{max(errors[2:]):.1e}",
                f"{1e3 * median(times[path, forward]):.1f}",
                f"{1e3 * median(times[path, train]):.1f}",
                mebibytes(peak_bytes(lambda path=path: train(path, tensors))),
            ]
        )
    print(f"\nOne scan, three algorithms: { ({**SHAPE, **small}) }, float32, chunks of 64, one thread")
    print("errors over the largest element: values against token by token, gradients against serial, in float64\n")
    print(table(["algorithm", "values", "gradients", "forward ms", "train ms", "train MiB"], rows))


def token_by_token(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The recurrence: `ssd` on one token at a time is its plain branch."""
    state, outputs = None, []
    for t in range(tensors[0].shape[1]):
        v, b, c, da, dt = (tensor[:, t : t + 1] for tensor in tensors)
        y, state = ssd(v, b, c, da, dt, dt, state)
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, 1), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="the short agreement table")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts to measure at")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved rounds (median)")
    arguments = parser.parse_args()
    demo() if arguments.demo else full(arguments.threads, arguments.repeats)


if __name__ == "__main__":
    main()
