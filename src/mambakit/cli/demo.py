"""`mambakit demo`: a small Mamba-3 trained in minutes, against compressors and beside a Transformer."""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mambakit.blocks.mamba3 import Mamba3Config
from mambakit.checkpoints import load_model
from mambakit.checkpoints.files import MODEL
from mambakit.cli import why_mamba
from mambakit.cli.compressors import Compressed, compress_all, find_zstd
from mambakit.cli.progress import All, minutes, progress
from mambakit.inference.generation import Stream
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.optional import has
from mambakit.text.documents import Document, hold_out, standard_library
from mambakit.text.tokens import Bytes
from mambakit.training.batches import Rows, encode
from mambakit.training.lock import LOCK, alone_in
from mambakit.training.loop import HeldOut, Trainer
from mambakit.training.objective import bits_per_byte
from mambakit.training.processes import Ranks
from mambakit.training.run import LOG, go_on, read_log
from mambakit.training.settings import TrainSettings

EXAMPLE = "mambakit demo --out mambakit-demo"
REPORT, PICTURE, WHY = "demo.json", "loss.png", "why.png"
SHARE = 0.025
"""Of the library, held out."""
BLOCK = Mamba3Config(d_model=128, state_rank=64, per_head_dim=64)
LAYERS = 3
# Few tokens per step and many steps: what counts here is what is learned per second.
SETTINGS: dict[str, Any] = {
    "steps": 1000,
    "batch": 16,
    "seq_len": 128,
    "optimizer": "muon",
    "lr": 1e-2,
    "warmup": 50,
    "floor": 0.02,
    "evaluate_every": 250,
    "evaluate_bytes": 50_000,
    "save_every": 500,
}
PROMPT = b"class "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="mambakit-demo", metavar="DIR", help="default: mambakit-demo")
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"], help=f"default: {SETTINGS['steps']}")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> None:
    settings = TrainSettings(**{**SETTINGS, "steps": args.steps})
    out, ranks = Path(args.out), Ranks()
    with alone_in(out, ranks):
        show(args, settings, out, ranks)


def show(args: argparse.Namespace, settings: TrainSettings, out: Path, ranks: Ranks) -> None:
    began = time.perf_counter()
    make_empty(out)
    for_training, held_out = hold_out(standard_library(), SHARE)
    print(
        f"text: {size_of(for_training) / 1e6:.1f} MB in {len(for_training)} files of Python's standard library "
        f"to learn from, {size_of(held_out) / 1e6:.2f} MB in {len(held_out)} other files to be judged by",
        file=sys.stderr,
    )
    bits, as_one, size = learn(for_training, held_out, settings, out, ranks)
    compressed = compress_all([content for _, content in held_out])
    sample = write_sample(out, None if args.json else sys.stdout)
    report = {
        "bits_per_byte": bits,
        "bits_per_byte_as_one_stream": as_one,
        "parameters": size,
        "steps": settings.steps,
        "trained_on_bytes": settings.steps * settings.tokens_per_step,
        "compressors": {each.name: each._asdict() for each in compressed},
        "sample": sample,
    }
    drawn = has("matplotlib")
    if drawn:
        draw(read_log(out / LOG), compressed, out / PICTURE)
    # What can differ between two runs is kept apart.
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(report))
        return
    set_beside_a_transformer(out)
    print(table(bits, as_one, compressed))
    pictures = f"{out / PICTURE}, {out / WHY}" if drawn else "none (pip install matplotlib)"
    read = settings.steps * settings.tokens_per_step
    print(
        f"\nThe model, {size:,} parameters, has read {read / 1e6:.1f} MB of other files; "
        "compressors start from nothing.\n"
        f"All of it took {minutes(time.perf_counter() - began)}. Loss curve, picture and figures: "
        f"{pictures}, {out / REPORT}\n\n"
        "What to type next:\n" + in_columns(next_commands(out / MODEL))
    )


def next_commands(model: Path) -> dict[str, str]:
    return {
        f'mambakit generate {model} --prompt "def "': "let it write",
        f"mambakit serve {model}": "a page to chat with it, and OpenAI's interface",
        "mambakit train FILES --out run": "one of your own text",
    }


def in_columns(told: dict[str, str]) -> str:
    width = max(map(len, told))
    return "".join(f"  {command:{width}}  {what}\n" for command, what in told.items())


def set_beside_a_transformer(out: Path) -> None:
    """Measure both and show why one reads on and on; figures of this moment, so they are not in the report."""
    mamba = load_model(out / MODEL)
    transformer = why_mamba.transformer_like(mamba)
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (mamba, transformer)]
    ours, theirs = why_mamba.measure([mamba, transformer])
    print(f"one more token, beside a Transformer of {counts[1]:,} parameters, with what both remember:\n")
    print(why_mamba.table(ours, theirs) + "\n")
    if has("matplotlib"):
        why_mamba.draw(ours, theirs, out / WHY)


def make_empty(out: Path) -> None:
    """Remove what an earlier demo left; ValueError if there is anything else."""
    inside = [path for path in out.iterdir() if path.name != LOCK]
    if inside and not (out / REPORT).exists():
        raise ValueError(f"{out} is there and not from an earlier demo; choose another --out")
    for path in inside:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (out / REPORT).write_text("{}\n", encoding="utf-8")


def learn(
    for_training: Sequence[Document],
    held_out: Sequence[Document],
    settings: TrainSettings,
    out: Path,
    ranks: Ranks,
) -> tuple[float, float, int]:
    """Train and save; bits per byte of the held-out files, one by one and as one, and the number of parameters."""
    tokens = Bytes()
    torch.manual_seed(settings.seed)
    model = LanguageModel(ModelConfig(block=BLOCK, n_layer=LAYERS, vocab_size=tokens.vocab_size))
    rows = Rows(encode(for_training, tokens), tokens.end, settings)
    judged = HeldOut(encode(held_out, tokens), [len(content) for _, content in held_out])
    trainer = Trainer(model, settings, rows, judged, ranks)
    with All([progress(settings, 1 / math.log(2))]) as watch:
        bits = go_on(trainer, out, tokens, watch)
    # Where a file ends, the state is kept for the next one, as a compressor keeps what it has seen.
    as_one = bits_per_byte(model, [torch.cat(list(judged.documents_s))], sum(judged.bytes_of))
    return bits, as_one, sum(parameter.numel() for parameter in model.parameters())


def write_sample(out: Path, file: Any) -> str:
    """A text of the model's own, written to `file` as it comes."""
    tokens = Bytes()
    ids = [tokens.end, *tokens.encode(PROMPT)]
    stream = Stream(load_model(out / MODEL), ids, max_new_tokens=400, temperature=0.7, top_p=0.95, seed=0)
    shown = [PROMPT.decode()]
    if file is not None:
        print(f"\nwhat the model writes after {PROMPT.decode()!r}:\n\n{PROMPT.decode()}", end="", file=file, flush=True)
    for piece in tokens.pieces(int(token_b[0]) for token_b in stream):
        shown.append(piece)
        if file is not None:
            print(piece, end="", file=file, flush=True)
    if file is not None:
        print("\n", file=file)
    return "".join(shown)


def table(bits: float, as_one: float, compressed: Sequence[Compressed]) -> str:
    """Bits per byte, the fewest first."""
    lines = [Compressed("mambakit (Mamba-3)", bits, as_one), *compressed]
    written = [f"{'bits per byte':20} {'file by file':>12} {'as one stream':>14}"]
    for each in sorted(lines, key=lambda line: line.file_by_file):
        written.append(f"{each.name:20} {each.file_by_file:12.3f} {each.as_one:14.3f}")
    if find_zstd() is None:
        written.append("zstd was not measured: it needs Python 3.14 or pip install zstandard")
    return "\n".join(written)


def draw(log: Sequence[Mapping[str, Any]], compressed: Sequence[Compressed], path: Path) -> None:
    """The loss curve with the compressors' figures as lines."""
    from matplotlib.figure import Figure

    steps = [line for line in log if "loss" in line]
    bits = [line["loss"] / math.log(2) for line in steps]
    width = max(len(bits) // 50, 1)
    smooth = [sum(bits[max(i - width, 0) : i + 1]) / len(bits[max(i - width, 0) : i + 1]) for i in range(len(bits))]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([line["step"] for line in steps], bits, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot([line["step"] for line in steps], smooth, color="tab:blue", label="training text")
    judged = [line for line in log if "bits_per_byte" in line]
    axes.plot(
        [line["step"] for line in judged],
        [line["bits_per_byte"] for line in judged],
        "o",
        color="tab:red",
        label="held-out files",
    )
    for each, style in zip(compressed, ("-", "--", "-.", ":"), strict=False):
        axes.axhline(
            each.file_by_file, color="gray", linestyle=style, linewidth=0.9, label=f"{each.name}, held-out files"
        )
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(1.0, 4.5), title="Mamba-3 reading Python's standard library")
    axes.legend()
    figure.savefig(path, dpi=110)


def size_of(documents: Sequence[Document]) -> int:
    return sum(len(content) for _, content in documents)
