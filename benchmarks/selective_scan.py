"""Mamba-1's scan: Python loops, torch's operators and the fused kernel, forward and with gradients, time and memory.

python -m benchmarks.selective_scan                on 1 and 2 threads (a few minutes)
python -m benchmarks.selective_scan --quick        512 tokens
python -m benchmarks.selective_scan --reference    also autograd through the reference loop, once (minutes more)

All do what a block does between its projections: softplus of the step sizes, scan, skip and gate. "loop" is the leanest
loop we know; "reference" computes all decays and writes first and then indexes them token by token, as published
references of the scan do: the gradient of each index is as large as the tensor.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import gemm_task, interleaved, median, peak_bytes, table, write_json
from mambakit import selective_scan

CHANNELS, RANK, TOKENS = 1536, 16, 2048
FORMS = ("loop", "reference", "torch", "cpu")


def inputs(tokens: int, rank: int = RANK) -> dict[str, Tensor]:
    """As a block makes them: x and z, b and c are slices of projections; a is what training starts from."""
    torch.manual_seed(0)
    x_bsi, z_bsi = torch.randn(1, tokens, 2 * CHANNELS).chunk(2, dim=-1)
    b_bsr, c_bsr = torch.randn(1, tokens, 48 + 2 * rank)[..., 48:].chunk(2, dim=-1)
    return {
        "x_bsi": x_bsi,
        "dt_bsi": torch.randn(1, tokens, CHANNELS) - 4,
        "a_ir": -torch.arange(1.0, rank + 1).repeat(CHANNELS, 1),
        "b_bsgr": b_bsr[:, :, None],
        "c_bsgr": c_bsr[:, :, None],
        "skip_i": torch.ones(CHANNELS),
        "z_bsi": z_bsi,
    }


def loop(x_bsi: Tensor, dt_bsi: Tensor, a_ir: Tensor, b_bsgr: Tensor, c_bsgr: Tensor, skip_i: Tensor, z_bsi: Tensor):
    """Token by token. Unbound, because the gradient of an index is as large as the tensor it was taken from."""
    state_bir = x_bsi.new_zeros(len(x_bsi), *a_ir.shape)
    y = []
    per_token = (x_bsi, F.softplus(dt_bsi), b_bsgr.squeeze(2), c_bsgr.squeeze(2))
    for x_bi, dt_bi, b_br, c_br in zip(*(t.unbind(1) for t in per_token), strict=True):
        write_bir = (dt_bi * x_bi)[..., None] * b_br[:, None]
        state_bir = torch.exp(dt_bi[..., None] * a_ir) * state_bir + write_bir
        y.append((state_bir @ c_br[..., None]).squeeze(-1))
    return (torch.stack(y, dim=1) + skip_i * x_bsi) * F.silu(z_bsi), state_bir


def reference(
    x_bsi: Tensor, dt_bsi: Tensor, a_ir: Tensor, b_bsgr: Tensor, c_bsgr: Tensor, skip_i: Tensor, z_bsi: Tensor
):
    """Token by token through tensors of all tokens' states."""
    dt_bsi = F.softplus(dt_bsi)
    decay_bsir = torch.exp(dt_bsi[..., None] * a_ir)
    write_bsir = (dt_bsi * x_bsi)[..., None] * b_bsgr
    state_bir = x_bsi.new_zeros(len(x_bsi), *a_ir.shape)
    y = []
    for t in range(x_bsi.shape[1]):
        state_bir = decay_bsir[:, t] * state_bir + write_bsir[:, t]
        y.append(torch.einsum("bir,br->bi", state_bir, c_bsgr[:, t, 0]))
    return (torch.stack(y, dim=1) + skip_i * x_bsi) * F.silu(z_bsi), state_bir


LOOPS = {"loop": loop, "reference": reference}


def run(form: str, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if form in LOOPS:
        return LOOPS[form](**tensors)
    return selective_scan(**tensors, dt_softplus=True, backend=form)


def forward(form: str, tensors: dict[str, Tensor]) -> Callable[[], Any]:
    def task():
        with torch.no_grad():
            return run(form, tensors)

    return task


def train(form: str, tensors: dict[str, Tensor]) -> Callable[[], Any]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    head_bsi = torch.randn(tensors["x_bsi"].shape)
    return lambda: torch.autograd.grad(run(form, leaves)[0], list(leaves.values()), head_bsi)


def check(tensors: dict[str, Tensor]) -> None:
    """All forms compute the same."""
    want, _ = forward("loop", tensors)()
    for form in FORMS[1:]:
        got, _ = forward(form, tensors)()
        error = ((got - want).abs().max() / want.abs().max()).item()
        assert error < 1e-4, f"{form} differs from the loop by {error:.1e}"


def measure(tokens: int, threads: int, repeats: int, with_reference: bool) -> list[dict[str, Any]]:
    """Everything in the same rounds but the reference's gradients, which take minutes and are measured once."""
    torch.set_num_threads(threads)
    tensors = inputs(tokens)
    check(tensors)
    gemm, flops = gemm_task()
    kinds = {"forward": forward, "train": train}
    tasks = {(kind, form): make(form, tensors) for kind, make in kinds.items() for form in FORMS}
    slow = tasks.pop(("train", "reference"))
    times = interleaved({"gemm": gemm, **tasks}, repeats)
    if with_reference:
        start = time.perf_counter()
        slow()
        times["train", "reference"] = [time.perf_counter() - start]
    rows = []
    for kind, form in (key for key in times if key != "gemm"):
        took, loops = median(times[kind, form]), {name: times.get((kind, name)) for name in LOOPS}
        row = {"threads": threads, "kind": kind, "form": form, "ms": took * 1e3}
        row |= {f"times_faster_than_{name}": median(loop) / took for name, loop in loops.items() if loop}
        rows.append(row | {"gemm_gflops": flops / median(times["gemm"]) / 1e9})
    return rows


def memory(tokens: int) -> list[dict[str, Any]]:
    """Of a kernel's training step: the same for any rank but for b and c, and twice as much for twice the tokens."""
    torch.set_num_threads(1)
    rows = []
    for length, rank in ((tokens // 2, RANK), (tokens, RANK), (tokens, 4 * RANK)):
        used = peak_bytes(train("cpu", inputs(length, rank)))
        row = {"tokens": length, "rank": rank, "bytes": used, "per_element": used / (4 * length * CHANNELS)}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    tokens = 512 if options.quick else TOKENS
    rows = [row for threads in (1, 2) for row in measure(tokens, threads, options.repeats, options.reference)]
    print(f"{CHANNELS} channels, state {RANK}, {tokens} tokens, batch 1, float32\n")
    cells = [
        [str(r["threads"]), r["kind"], r["form"], f"{r['ms']:.1f}"]
        + [f"{r[key]:.1f}" if (key := f"times_faster_than_{name}") in r else "" for name in LOOPS]
        for r in rows
    ]
    print(table(["threads", "what", "form", "ms", *(f"x faster than {name}" for name in LOOPS)], cells))
    used = memory(tokens)
    print("\nPeak memory of a training step of the kernel, in float32 numbers per token and channel\n")
    cells = [[str(r["tokens"]), str(r["rank"]), f"{r['per_element']:.2f}"] for r in used]
    print(table(["tokens", "state", "numbers"], cells))
    print(f"\n{write_json('selective_scan', {'times': rows, 'memory': used})}")


if __name__ == "__main__":
    main()
