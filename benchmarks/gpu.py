"""`make gpu-check`: what a person with a GPU runs to send us a report: numbers, times, one JSON and one table.

Times are of the SSD core's forward and backward beside torch's operators and, if it is installed, the official package.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import table
from mambakit import SsdPath, __version__, ssd
from mambakit.ops.backends import BACKENDS

SHAPES = {"mamba2-130m": (8, 2048, 1, 24, 64, 1, 128), "mamba3-mimo": (4, 2048, 4, 24, 64, 1, 128)}


def milliseconds(call: Callable[[], Any], repeat: int = 20) -> float:
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeat


def times(name: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    b, s, m, h, p, g, r = SHAPES[name]
    data = [
        torch.randn(size, device="cuda", dtype=dtype) for size in ((b, s, m, h, p), (b, s, m, g, r), (b, s, m, g, r))
    ]
    dt = torch.rand(b, s, h, device="cuda") / 10
    leaves = [tensor.requires_grad_() for tensor in (*data, -dt, dt)]

    def run(backend: str) -> torch.Tensor:
        v, b_, c, da, w = leaves
        return ssd(v, b_, c, da, w, w, path=SsdPath(backend=backend))[0]

    def forward(backend: str) -> None:
        with torch.no_grad():
            run(backend)

    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        backend: (
            lambda backend=backend: forward(backend),
            lambda backend=backend: torch.autograd.grad(run(backend).sum(), leaves),
        )
        for backend in ("torch", "triton", "triton_fast")
    }
    if m == 1 and importlib.util.find_spec("mamba_ssm") is not None:
        scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        a = -torch.rand(h, device="cuda")
        x, k, c = (leaf[:, :, 0] for leaf in leaves[:3])

        def official() -> torch.Tensor:
            return scan(x, leaves[4], a, k, c, 256)

        calls["official"] = (official, lambda: torch.autograd.grad(official().sum(), leaves[:3]))
    return [
        {"shape": name, "dtype": str(dtype).removeprefix("torch."), "who": who}
        | {"forward_ms": round(milliseconds(first), 3), "forward_and_backward_ms": round(milliseconds(both), 3)}
        for who, (first, both) in calls.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check.json"))
    args = parser.parse_args()
    backend = BACKENDS["triton"]
    reason = backend.why_missing()
    if reason is not None or not torch.cuda.is_available():
        sys.exit(f"gpu-check needs a GPU and Triton: {reason or 'torch finds no GPU here'}")
    proofs = backend.prove()
    measured = [row for name in SHAPES for dtype in (torch.bfloat16, torch.float32) for row in times(name, dtype)]
    about = {"mambakit": __version__, "torch": torch.__version__, **backend.about()}
    about["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"about": about, "proofs": proofs, "times": measured}, indent=1), "utf-8")
    shown = [[row["operation"], row["dtype"], row["case"], f"{row['error']:.1e}", str(row["passed"])] for row in proofs]
    print(table(["operation", "dtype", "case", "error", "passed"], shown))
    print(table(list(measured[0]), [[str(value) for value in row.values()] for row in measured]))
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
