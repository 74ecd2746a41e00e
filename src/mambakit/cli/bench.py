"""`mambakit bench`: time and memory of a block or a model, beside this machine's limits."""

import argparse
import base64
import html
import io
import json
from pathlib import Path
from typing import Any

import torch

from mambakit.arguments import check_count
from mambakit.blocks.family import presets
from mambakit.cli.layers import model_config
from mambakit.cli.run_options import with_defaults
from mambakit.models.language_model import LanguageModel
from mambakit.ops.backends import backend_names
from mambakit.ops.ssd_path import ALGORITHMS, SsdPath
from mambakit.optional import need
from mambakit.tools.benchmark import KINDS, Subject, make_model, measure
from mambakit.tools.checks import kernels
from mambakit.tools.measure import environment, table

EXAMPLE = "mambakit bench --family mamba2 --d-model 256 --tokens 512 --out bench"
REPORT = "a report (--out)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--what", choices=("block", "model"), default="block", help="one block, or a language model")
    parser.add_argument("--family", choices=presets(), default="mamba2")
    parser.add_argument("--d-model", type=int, default=768, metavar="WIDTH")
    parser.add_argument("--state-rank", type=int, metavar="RANK", help="default: the family's")
    parser.add_argument("--per-head-dim", type=int, metavar="WIDTH", help="default: the family's")
    parser.add_argument("--layers", default="4", help='of a model: their number, or a pattern like "3*M2 A"')
    parser.add_argument("--vocabulary", type=int, default=50_288, help="of a model")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512, help="of forward and training; a step takes one")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=["serial_recalculated"])
    parser.add_argument("--chunk-lens", nargs="+", type=int, metavar="L", help="default: what each path chooses")
    parser.add_argument("--backends", nargs="+", choices=backend_names(), default=["auto", "torch"])
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--repeats", type=int, default=7, help="rounds; times are medians")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write bench.json, bench.png and bench.html there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(args: argparse.Namespace) -> None:
    is_pattern = not args.layers.lstrip("+-").isdigit()
    if is_pattern and args.what != "model":
        raise ValueError(f"--layers {args.layers!r} is a pattern of a model's layers; add --what model")
    args.layers = args.layers if is_pattern else int(args.layers)
    for name in ("batch", "tokens", "vocabulary", "repeats", *([] if is_pattern else ["layers"])):
        check_count(f"--{name}", getattr(args, name), least=1, most=2**31 - 1)
    check_count("--threads", args.threads, least=1, most=1024, optional=True)
    if args.out is not None:
        need(REPORT, "matplotlib")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rows, limits = measure(make_subject(args), args.kinds, args.repeats)
    result = {
        "options": {name: value for name, value in vars(args).items() if name not in ("out", "json", "verb")},
        "machine": environment(),
        "kernels": kernels(),
        "limits": limits,
        "rows": rows,
    }
    if args.out is not None:
        write_report(args.out, result)
    if args.json:
        print(json.dumps(result))
    else:
        print(describe(result))
        if args.out is not None:
            print(f"\n{args.out / 'bench.html'}, bench.png and bench.json written")


def make_subject(args: argparse.Namespace) -> Subject:
    family, given = presets()[args.family]
    sizes = {name: getattr(args, name) for name in ("d_model", "state_rank", "per_head_dim")}
    config = family.configure(given, sizes)
    paths = [
        SsdPath(algorithm, chunk_len, backend)
        for algorithm in args.algorithms
        for chunk_len in args.chunk_lens or [None]
        for backend in args.backends
    ]
    torch.manual_seed(0)
    if args.what == "model":
        ids = torch.randint(args.vocabulary, (args.batch, args.tokens))
        if isinstance(args.layers, str):
            given = {"layers": args.layers, "d_model": args.d_model, "state_rank": args.state_rank}
            given |= {"seq_len": args.tokens} | ({"head_dim": args.per_head_dim} if args.per_head_dim else {})
            return Subject(LanguageModel(model_config(with_defaults(given), args.vocabulary)), ids, paths)
        return Subject(make_model(config, args.layers, args.vocabulary), ids, paths)
    return Subject(family.block(config), torch.randn(args.batch, args.tokens, args.d_model), paths)


HEADINGS = ["kind", "algorithm", "chunk", "backend", "ran", "ms", "x floor", "peak MB"]


def cells(row: dict[str, Any]) -> list[str]:
    return [
        row["kind"],
        row["algorithm"],
        str(row["chunk_len"] or "auto"),
        row["backend"],
        row["ran"],
        f"{row['ms']:.2f}",
        f"{row['over_floor']:.2f}",
        f"{row['peak_mb']:.1f}",
    ]


def title(result: dict[str, Any]) -> str:
    options, machine = result["options"], result["machine"]
    what = options["family"] + (f" model of {options['layers']} layers" if options["what"] == "model" else " block")
    if isinstance(options["layers"], str):
        what = f"model of the layers {options['layers']}"
    shape = f"d_model {options['d_model']}, {options['batch']} x {options['tokens']} tokens"
    return f"{what}, {shape}, {machine['threads']} threads"


def limits_line(result: dict[str, Any]) -> str:
    limits, built = result["limits"], result["kernels"]
    used = built["instruction_set"] if built["built"] else f"none, {built['reason']}"
    return (
        f"{result['machine']['processor']}: {limits['gemm_gflops']:.0f} GFLOP/s in one large matrix product, "
        f"{limits['read_gb_s']:.1f} GB/s reading; CPU kernels: {used}"
    )


def describe(result: dict[str, Any]) -> str:
    return "\n".join([title(result), limits_line(result), "", table(HEADINGS, [cells(row) for row in result["rows"]])])


def write_report(folder: Path, result: dict[str, Any]) -> None:
    """JSON, a picture, and a page that holds both and needs nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    picture = draw(result)
    (folder / "bench.png").write_bytes(picture)
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in cells(row))}</tr>\n" for row in result["rows"])
    page = f"""<!doctype html>
<meta charset="utf-8"><title>mambakit bench</title>
<style>body {{ font: 15px sans-serif; max-width: 60em; margin: 2em auto }} img {{ max-width: 100% }}
td, th {{ padding: .2em .8em; text-align: left }} tr:nth-child(even) {{ background: #f3f3f3 }}</style>
<h1>mambakit bench</h1><p>{html.escape(title(result))}<br>{html.escape(limits_line(result))}</p>
<table><tr>{"".join(f"<th>{name}</th>" for name in HEADINGS)}</tr>
{lines}</table>
<p><img alt="times and memory as bars" src="data:image/png;base64,{base64.b64encode(picture).decode()}">
<p>Floor: the matrix products at the rate of one large one (training: three times as many);
for a step, the weights read once.
"""
    (folder / "bench.html").write_text(page, encoding="utf-8")


def draw(result: dict[str, Any]) -> bytes:
    """Bars of time over its floor and of peak memory, one group per kind."""
    rows = result["rows"]
    names = [f"{r['kind']}\n{r['algorithm']} {r['chunk_len'] or ''}\n{r['backend']}" for r in rows]
    figure = need(REPORT, "matplotlib.figure").Figure(figsize=(max(6, 1.3 * len(rows)), 7), layout="constrained")
    figure.suptitle(title(result))
    above, below = figure.subplots(2, 1)
    colors = ["#1f77b4" if r["ran"] == "cpu" else "#aaaaaa" for r in rows]
    bars = above.bar(names, [r["over_floor"] for r in rows], color=colors)
    above.bar_label(bars, [f"{r['ms']:.1f} ms" for r in rows], fontsize=8)
    above.axhline(1, color="black", linewidth=0.8)
    above.set_ylabel("time over the machine's floor")
    below.bar(names, [r["peak_mb"] for r in rows], color=colors)
    below.set_ylabel("peak memory, MB")
    for axes in (above, below):
        axes.tick_params(axis="x", labelsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
