"""The tables of docs/gpu.md, made without a GPU: what the compile gate found, what kernels move and multiply.

python -m benchmarks.gpu_tables                                                        put them into docs/gpu.md
TRITON_INTERPRET=1 MAMBAKIT_TRITON_PARTS=1 python -m benchmarks.gpu_tables --precision  errors of the two modes
"""

import argparse
import json
import re
from pathlib import Path

import torch
from torch import Tensor

from mambakit import SsdPath, ssd
from mambakit.kernels.triton import ssd as kernels
from mambakit.kernels.triton.backend import EXACT
from mambakit.kernels.triton.gate import TARGETS
from mambakit.kernels.triton.launch import Launch, recording
from mambakit.kernels.triton.tiles import CANDIDATES, TABLE

PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"
B, S, H, P, R = 8, 2048, 24, 64, 128


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gate_table() -> str:
    """A line per shape and dtype: the most shared memory and registers on any target, and what does not fit."""
    rows = json.loads(TABLE.read_text("utf-8"))["rows"]
    lines = []
    for shape, dtype in dict.fromkeys((row["shape"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["shape"], row["dtype"]) == (shape, dtype)]
        fits = [row for row in mine if row["reason"] is None]
        found = [facts for row in fits for facts in row["kernels"].values()]
        refused = "; ".join(f"{row['target']}: {row['reason']}" for row in mine if row["reason"] is not None)
        missing = [target for target in TARGETS if target not in {row["target"] for row in mine}]
        left = ", ".join(missing)
        shown = [f"{max(f[name] for f in found):,}" if found else "-" for name in ("shared", "registers")]
        lines.append([shape, dtype, f"{len(fits)} of {len(mine)}", *shown, refused or "-", left or "-"])
    return markdown(
        ["shape", "dtype", "fits", "most shared bytes", "most registers", "goes to torch", "not compiled"], lines
    )


def tiles_table() -> str:
    tiles = json.loads(TABLE.read_text("utf-8"))["tiles"]
    keys = [f"{pass_} {parts}{ranks}" for parts in (1, 3) for ranks in ("", " ranks") for pass_ in CANDIDATES]
    head = ["target", *(re.sub("[13]", lambda m: {"1": "bfloat16", "3": "float32"}[m[0]], key) for key in keys)]
    shown = [
        [target, *("x".join(map(str, found[k][:3])) if k in found else "-" for k in keys)]
        for target, found in tiles.items()
    ]
    return markdown(head, shown)


def bytes_of(launch: Launch) -> int:
    """Every tensor once: what has to move at least."""
    return sum(x.numel() * x.element_size() for x in launch.arguments if isinstance(x, Tensor))


def multiplications(launch: Launch) -> float:
    """Of the matrix products, each counted once, however many parts it is taken in."""
    n = launch.sizes
    rows, own = B * S, n["BT"]
    state, pairs_r, pairs_p = 2.0 * rows * H * P * R, 2.0 * rows * H * own * R, 2.0 * rows * H * own * P
    return {
        "ssd.walk_states": state,
        "ssd.read_chunks": state + pairs_r + pairs_p,
        "ssd.grad_values": 2 * state + pairs_r + 2 * pairs_p + 2.0 * rows * H * own * own,
        "ssd.grad_keys": 2 * state + pairs_p * (R // n["BR"]) + 4.0 * rows * own * R,
    }[launch.kernel]


def traffic_table() -> str:
    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    wide = torch.float32
    v, b = empty(B, S, 1, H, P), empty(B, S, 1, 1, R)
    state = empty(B, H, P, R, dtype=wide)
    inputs = (v, b, b, *(empty(B, S, H, dtype=wide) for _ in range(3)), state, None, 0)
    lines = []
    for name, call in (
        ("forward", lambda: kernels.forward(EXACT, *inputs)),
        ("backward", lambda: kernels.backward(EXACT, [v, state], *inputs, [True] * 7)),
    ):
        with recording() as log:
            call()
        for launch in log:
            mirrored = ", mirrored" if launch.sizes.get("BACK") else ""
            moved, products = bytes_of(launch) / 1e6, multiplications(launch) / 1e9
            lines.append([name, launch.kernel.removeprefix("ssd.") + mirrored, f"{moved:.0f}", f"{products:.1f}"])
        total = (sum(map(bytes_of, log)) / 1e6, sum(map(multiplications, log)) / 1e9)
        lines.append([name, "**together**", f"**{total[0]:.0f}**", f"**{total[1]:.1f}**"])
    for name, moved, products in official():
        lines.append(["official forward", name, f"{moved / 1e6:.0f}", f"{products / 1e9:.1f}"])
    moved, products = sum(row[1] for row in official()) / 1e6, sum(row[2] for row in official()) / 1e9
    lines.append(["official forward", "**together**", f"**{moved:.0f}**", f"**{products:.1f}**"])
    return markdown(["pass", "kernel", "MB", "GFLOP"], lines)


def official(chunk: int = 256) -> list[tuple[str, float, float]]:
    """The five kernels of the official Mamba-2 forward, counted from the tensors they exchange."""
    x, bc, per_head = 2.0 * B * S * H * P, 2.0 * B * S * R, 4.0 * B * S * H
    states, pairs = 4.0 * B * (S // chunk) * H * P * R, 4.0 * B * S * chunk
    state = 2.0 * B * S * H * P * R
    return [
        ("cumulative sums", per_head / 2 + 2 * per_head, 0),
        ("chunk states", x + bc + 2 * per_head + states, state),
        ("state passing", 2 * states, 0),
        ("C B of a chunk", 2 * bc + pairs, 2.0 * B * S * chunk * R),
        ("chunk scan", pairs + 2 * x + 2 * per_head + bc + states, state + 2.0 * B * S * H * chunk * P),
    ]


def precision_table() -> str:
    torch.manual_seed(0)
    b, s, h, p, r = 1, 256, 2, 64, 128
    v, k, c = (torch.randn(b, s, 1, *size) for size in ((h, p), (1, r), (1, r)))
    weights = [-torch.rand(b, s, h), torch.rand(b, s, h), torch.rand(b, s, h)]
    lines = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = [t.to(dtype) for t in (v, k / r**0.5, c)]
        exact = ssd(*(t.double() for t in (*narrow, *weights)), path=SsdPath("serial", backend="torch"))
        for backend in ("torch", "triton", "triton_fast"):
            got = ssd(*narrow, *weights, path=SsdPath(backend=backend))
            errors = [float((a.double() - e).norm() / e.norm()) for a, e in zip(got, exact, strict=True)]
            lines.append([str(dtype).removeprefix("torch."), backend, *(f"{error:.1e}" for error in errors)])
    return markdown(["dtype", "backend", "error of y", "error of the state"], lines)


def put(page: str, name: str, made: str) -> str:
    return re.sub(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", lambda m: m[1] + made + m[2], page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", action="store_true")
    page = PAGE.read_text("utf-8")
    if parser.parse_args().precision:
        page = put(page, "precision", precision_table())
    else:
        for name, make in (("gate", gate_table), ("tiles", tiles_table), ("traffic", traffic_table)):
            page = put(page, name, make())
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
