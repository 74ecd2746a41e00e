"""Weights by format: prompts, decoding at many batches, and the memory of quantized models.

python -m benchmarks.products                     prompts and decoding of a 130M Mamba-2 (some minutes)
python -m benchmarks.products --family mamba1     another family
python -m benchmarks.products --what memory       peak memory of loading and decoding, each in a process of its own
python -m benchmarks.products --what decoding --batches 1 --formats int8    some cells, beside those of float32
MAMBAKIT_ISA=avx2 python -m benchmarks.products --what prompts --layers 4    a processor with less, and fewer layers
python -m benchmarks.products --what prompts --threads 1 --cpu-time          on a machine that others use meanwhile
python -m benchmarks.products --what decoding --in-a-row    16 tokens of one model after another, as a stream has them
python -m benchmarks.products --what joined       the tables of all cells that were measured so far

Every run replaces the cells that it measures in one file, so that a table may be made in pieces. Figures are medians,
and what is compared comes from the same rounds: "x float32" is relative to the float32 model, "% of bytes" is the time
in which a step's weights could be read and its states read and written, at the speed of a loop that only reads the
float32 weights, relative to that of the step. The machine's own products are those of large matrices in torch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode import (
    BLOCKS,
    IN_A_ROW,
    VOCABULARY,
    bytes_per_token,
    in_a_row,
    our_prefill,
    our_step,
    reader,
    state_bytes,
)
from benchmarks.measure import (
    RESULTS,
    gemm_task,
    interleaved,
    median,
    peak_resident_bytes,
    resident_bytes,
    table,
    write_json,
)
from mambakit import LanguageModel, ModelConfig, load_model, quantize, save_model
from mambakit.kernels.cpu.library import processor

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bits": 16},
    "int8": {"bits": 8},
    "int4": {"bits": 4},
    "bfloat16, weights alone": {"bits": 16, "activations": "float32"},
    "int8, weights alone": {"bits": 8, "activations": "float32"},
    "int4, weights alone": {"bits": 4, "activations": "float32"},
    "bfloat16, states too": {"bits": 16},
    "int8, states in bfloat16": {"bits": 8},
    "int4, states in bfloat16": {"bits": 4},
}
SHORT = ("float32", "bfloat16", "int8", "int4")
PROMPTS, BATCHES = (512, 2048), (1, 8, 16, 32, 64)
KEYS = ("family", "layers", "processor", "threads", "what", "size", "format")
"""What tells a cell from others."""

Cell = dict[str, Any]


def int8_task(size: int = 2048) -> tuple[Callable[[], Any], float]:
    left, right = (torch.randint(-127, 128, (size, size), dtype=torch.int8) for _ in range(2))
    return lambda: torch.ops.aten._int_mm(left, right), 2.0 * size**3


def machine_tasks() -> dict[str, tuple[Callable[[], Any], float]]:
    """Products that a machine's own library computes, with their operations."""
    return {"float32": gemm_task(), "bfloat16": gemm_task(torch.bfloat16), "int8": int8_task()}


def states_of(format: str) -> str:
    """What its states are kept in between tokens."""
    return "bfloat16" if "states" in format else "float32"


def make_model(family: str, layers: int, format: str, folder: Path | None) -> LanguageModel:
    """With 24 layers one of the 130M shapes; from `folder` if it was kept there."""
    kept = None if folder is None else place(folder, family, layers, format)
    format = format.partition(", states")[0]
    if kept is not None and kept.is_dir():
        return load_model(kept)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(block=BLOCKS[family], n_layer=layers, vocab_size=VOCABULARY)).eval()
    if FORMATS[format]:
        model = quantize(model, **FORMATS[format], in_place=True)
    if kept is not None:
        save_model(model, kept)
    return model


def place(folder: Path, family: str, layers: int, format: str) -> Path:
    return folder / f"{family}-{layers}-{format.partition(', states')[0]}"


def with_machine(
    tasks: dict[Any, Callable[[], Any]], repeats: int, clock: Callable[[], float]
) -> tuple[dict[Any, float], dict[str, float]]:
    """Seconds of each, and the machine's own operations per second in the same rounds."""
    products = machine_tasks()
    both = {**{("machine", name): task for name, (task, _) in products.items()}, **tasks}
    times = interleaved(both, repeats, clock=clock)
    speeds = {name: products[name][1] / median(times.pop(("machine", name))) for name in products}
    return {key: median(seconds) for key, seconds in times.items()}, speeds


def measure_prompt(
    models: dict[str, LanguageModel], tokens: int, repeats: int, clock: Callable[[], float]
) -> list[Cell]:
    ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    tasks: dict[Any, Callable[[], Any]] = {name: our_prefill(model, ids) for name, model in models.items()}
    seconds, speeds = with_machine(tasks, repeats, clock)
    return [
        {
            "what": "prompts",
            "size": tokens,
            "format": name,
            "seconds": own,
            "beside": seconds["float32"],
            "speeds": speeds,
        }
        for name, own in seconds.items()
    ]


def measure_decoding(
    models: dict[str, LanguageModel], batches: Iterable[int], repeats: int, row: bool = False
) -> list[Cell]:
    read, bytes_read = reader(models["float32"])
    tasks: dict[Any, Callable[[], Any]] = {"read": read}
    for batch in batches:
        for name, model in models.items():
            step = our_step(model, batch, "auto", states_of(name))
            tasks[name, batch] = in_a_row(step) if row else step
    times = {key: median(seconds) for key, seconds in interleaved(tasks, repeats).items()}
    bandwidth = bytes_read / times.pop("read")
    if row:
        times = {key: seconds / IN_A_ROW for key, seconds in times.items()}
    cells = []
    for (name, batch), own in times.items():
        read_and_written = bytes_per_token(models[name]) + state_bytes(models[name], batch, states_of(name))
        cells.append(
            {
                "what": "in a row" if row else "decoding",
                "size": batch,
                "format": name,
                "seconds": own,
                "beside": times["float32", batch],
                "floor": read_and_written / bandwidth,
                "bandwidth": bandwidth,
            }
        )
    return cells


def peak_of(folder: str) -> None:
    """In a process of its own: loads the model, reads a short prompt and decodes 32 tokens."""
    started = peak_resident_bytes()
    step = our_step(load_model(folder), 1, "auto")
    for _ in range(32):
        step()
    print(started, peak_resident_bytes(), resident_bytes())


def measure_memory(family: str, layers: int, formats: Iterable[str], threads: int, folder: Path) -> list[Cell]:
    cells = []
    for name in formats:
        kept = place(folder, family, layers, name)
        if not kept.is_dir():
            make_model(family, layers, name, folder)
        command = [sys.executable, "-m", "benchmarks.products", "--threads", str(threads), "--peak-of", str(kept)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        started, peak, after = map(int, done.stdout.split())
        size = sum(path.stat().st_size for path in kept.glob("*.safetensors"))
        own = {"file": size, "started": started, "peak": peak - started, "after": after - started}
        cells.append({"what": "memory", "size": 1, "format": name, **own})
    return cells


def show_prompts(cells: list[Cell]) -> None:
    for tokens in sorted({cell["size"] for cell in cells}):
        own = [cell for cell in cells if cell["size"] == tokens]
        speeds = ", ".join(f"{name} {speed / 1e9:,.0f}" for name, speed in own[0]["speeds"].items())
        print(f"\nprompts of {tokens}; torch's products, Gop/s: {speeds}\n")
        lines = [
            [
                c["format"],
                f"{1e3 * c['seconds']:.0f}",
                f"{tokens / c['seconds']:,.0f}",
                f"{c['beside'] / c['seconds']:.2f}",
            ]
            for c in own
        ]
        print(table(["weights", "ms", "tokens/s", "x float32"], lines))


def show_decoding(cells: list[Cell]) -> None:
    batches = sorted({cell["size"] for cell in cells})
    found = {(cell["format"], cell["size"]): cell for cell in cells}
    read = ", ".join(sorted({f"{cell['bandwidth'] / 1e9:.1f}" for cell in cells}))
    what = {"decoding": "a token between those of other models"}.get(cells[0]["what"], "tokens in a row")
    print(f"\ndecoding, {what}, tokens/s (% of bytes; x float32); memory is read at {read} GB/s\n")
    lines = []
    for name in dict.fromkeys(cell["format"] for cell in cells):
        own = [found.get((name, batch)) for batch in batches]
        lines.append([name, *("" if cell is None else shown(cell) for cell in own)])
    print(table(["weights", *(f"batch {batch}" for batch in batches)], lines))


def shown(cell: Cell) -> str:
    rate, share = cell["size"] / cell["seconds"], cell["floor"] / cell["seconds"]
    return f"{rate:,.0f} ({share:.0%}; {cell['beside'] / cell['seconds']:.2f})"


def show_memory(cells: list[Cell]) -> None:
    lines = [
        [c["format"], *(f"{c[key] / 1e6:,.0f}" for key in ("file", "peak", "after")), f"{c['peak'] / c['file']:.2f}"]
        for c in cells
    ]
    print("\nmemory\n")
    print(table(["weights", "MB on disk", "peak MB beyond imports", "MB while decoding", "peak / file"], lines))


def show(cells: list[Cell]) -> None:
    for model in dict.fromkeys(tuple(cell[key] for key in KEYS[:4]) for cell in cells):
        family, layers, isa, threads = model
        print(f"\n{family}, {layers} layers, {isa}, {threads} thread{'s' if threads > 1 else ''}")
        kinds = (
            ("prompts", show_prompts),
            ("decoding", show_decoding),
            ("in a row", show_decoding),
            ("memory", show_memory),
        )
        for what, tell in kinds:
            own = [c for c in cells if tuple(c[key] for key in KEYS[:5]) == (*model, what)]
            if own:
                tell(own)


def measured_before() -> list[Cell]:
    file = RESULTS / "products.json"
    cells = json.loads(file.read_text())["cells"] if file.is_file() else []
    return [cell for cell in cells if {*KEYS} <= {*cell}]


def joined(before: list[Cell], new: list[Cell]) -> list[Cell]:
    """Each cell as it was measured last, in the order of the tables."""

    def key(cell: Cell) -> tuple[Any, ...]:
        return tuple(cell[name] for name in KEYS)

    found = {key(cell): cell for cell in [*before, *new]}
    return sorted(found.values(), key=lambda cell: (*key(cell)[:-1], [*FORMATS].index(cell["format"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = ("prompts", "decoding", "memory", "joined")
    parser.add_argument("--what", choices=words, nargs="+", default=["prompts", "decoding"])
    parser.add_argument("--family", choices=BLOCKS, default="mamba2")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=list(SHORT), help="beside float32")
    parser.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS), help="their lengths")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="rows that are decoded")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--repeats", type=int, default=7, help="interleaved rounds (median); three times as many of decoding"
    )
    parser.add_argument("--in-a-row", action="store_true", help="decode several tokens of one model at a time")
    parser.add_argument("--keep", type=Path, help="a folder for the models, from which the next run takes them")
    parser.add_argument("--cpu-time", action="store_true", help="of prompts, on one thread: seconds of the processor")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads > 1:
        parser.error("--cpu-time is that of one thread: --threads 1")
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(arguments.threads)
    if arguments.peak_of:
        peak_of(arguments.peak_of)
        return
    formats, new = list(dict.fromkeys(["float32", *arguments.formats])), []
    if {"prompts", "decoding"} & {*arguments.what}:
        models = {name: make_model(arguments.family, arguments.layers, name, arguments.keep) for name in formats}
        for tokens in arguments.prompts if "prompts" in arguments.what else ():
            new += measure_prompt(models, tokens, arguments.repeats, clock)
        if "decoding" in arguments.what:
            rounds = arguments.repeats * (1 if arguments.in_a_row else 3)
            new += measure_decoding(models, arguments.batches, rounds, arguments.in_a_row)
    if "memory" in arguments.what:
        with tempfile.TemporaryDirectory() as own:
            folder = arguments.keep or Path(own)
            new += measure_memory(arguments.family, arguments.layers, arguments.formats, arguments.threads, folder)
    setting = {key: getattr(arguments, key) for key in ("family", "layers", "threads")}
    for cell in new:
        cell |= setting | {"processor": " ".join(processor())}
    cells = joined(measured_before(), new)
    show(cells if "joined" in arguments.what else joined([], new))
    print(f"\nwritten to {write_json('products', {'cells': cells}).name}")


if __name__ == "__main__":
    main()
