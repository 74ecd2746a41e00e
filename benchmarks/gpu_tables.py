"""The tables of docs/gpu.md, made without a GPU: what the compile gate found, what kernels move and multiply.

python -m benchmarks.gpu_tables                                                        put them into docs/gpu.md
TRITON_INTERPRET=1 MAMBAKIT_TRITON_PARTS=1 python -m benchmarks.gpu_tables --precision  errors of the two modes
"""

import argparse
import json
import re
from pathlib import Path

import torch

from benchmarks.gpu_traffic import Cost, kernels, official
from mambakit import SsdPath, ssd
from mambakit.kernels.triton.gate import TARGETS
from mambakit.kernels.triton.shapes import shapes
from mambakit.kernels.triton.tiles import CANDIDATES, TABLE

PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gate_table() -> str:
    """A line per shape and dtype: the most shared memory and registers on any target, and what does not fit."""
    rows = json.loads(TABLE.read_text("utf-8"))["rows"]
    lines = []
    every = [(shape.name, name) for name in ("bfloat16", "float32") for shape in shapes(getattr(torch, name))]
    for shape, dtype in sorted(every, key=lambda pair: not pair[0].startswith("ssd")):
        mine = [row for row in rows if (row["shape"], row["dtype"]) == (shape, dtype)]
        fits = [row for row in mine if row["reason"] is None]
        found = [facts for row in fits for facts in row["kernels"].values()]
        refused = "; ".join(f"{row['target']}: {row['reason']}" for row in mine if row["reason"] is not None)
        missing = [target for target in TARGETS if target not in {row["target"] for row in mine}]
        left = "all" if len(missing) == len(TARGETS) else ", ".join(missing)
        shown = [f"{max(f[name] for f in found):,}" if found else "-" for name in ("shared", "registers")]
        lines.append([shape, dtype, f"{len(fits)} of {len(mine)}", *shown, refused or "-", left or "-"])
    return markdown(
        ["shape", "dtype", "fits", "most shared bytes", "most registers", "goes to torch", "not compiled"], lines
    )


def tiles_table() -> str:
    """Of the heads that were compiled; per target and pass, bfloat16 and float32."""
    tiles = json.loads(TABLE.read_text("utf-8"))["tiles"]
    heads = list(dict.fromkeys(key.split()[2] for found in tiles.values() for key in found if "x" in key))
    dtypes = {"1": "bfloat16", "3": "float32"}

    def shown(found: list[int] | None) -> str:
        return (
            "-" if found is None else "x".join(map(str, found[:3])) + (f", {found[3]} warps" if found[3] != 4 else "")
        )

    lines = [
        [f"{pass_} {name}", head, *(shown(tiles.get(target, {}).get(f"{pass_} {parts} {head}")) for target in TARGETS)]
        for pass_ in CANDIDATES
        for parts, name in dtypes.items()
        for head in heads
    ]
    return markdown(["pass", "head", *TARGETS], lines)


def traffic_table() -> str:
    """Each kernel, and what an operation's come to beside the official ones."""
    theirs, lines = official(), []

    def shown(costs: list[Cost]) -> list[str]:
        return [f"{sum(c.moved for c in costs) / 1e6:,.0f}", f"{sum(c.computed for c in costs) / 1e9:,.2f}"]

    for operation, costs in kernels().items():
        other = theirs.get(operation)
        beside = ["-"] * 3 if other is None else [str(len(other)), *shown(other)]
        if len(costs) > 1:
            lines += [[operation, cost.kernel, *shown([cost]), "", "", ""] for cost in costs]
            lines.append([operation, "**together**", *(f"**{number}**" for number in shown(costs)), *beside])
        else:
            lines.append([operation, costs[0].kernel, *shown(costs), *beside])
    return markdown(["operation", "kernel", "MB", "GFLOP", "official kernels", "MB", "GFLOP"], lines)


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


def fill(page: str) -> str:
    for name, make in (("gate", gate_table), ("tiles", tiles_table), ("traffic", traffic_table)):
        page = put(page, name, make())
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", action="store_true")
    page = PAGE.read_text("utf-8")
    if parser.parse_args().precision:
        page = put(page, "precision", precision_table())
    else:
        page = fill(page)
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
