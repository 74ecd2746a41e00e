"""Weights by format: prompts, decoding at many batches, and the memory of quantized models.

python -m benchmarks.products                     prompts and decoding of a 130M Mamba-2 (some minutes)
python -m benchmarks.products --family mamba1     another family
python -m benchmarks.products --what memory       peak memory of loading and decoding, each in a process of its own
python -m benchmarks.products --quick             few rounds

All figures of a table are medians of the same rounds, with the machine's own beside: torch's products of large matrices
in float32, bfloat16 and int8, and a loop that only reads the float32 weights. "x float32" is relative to the float32
model of the same table. "% of bytes" is the time in which a step's weights could be read and its states read and
written, relative to that of the step.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode import BLOCKS, VOCABULARY, bytes_per_token, our_prefill, our_step, reader, state_bytes
from benchmarks.measure import gemm_task, interleaved, median, resident_bytes, table, write_json
from mambakit import LanguageModel, ModelConfig, load_model, quantize, save_model

FORMATS: dict[str, Callable[[LanguageModel], LanguageModel]] = {
    "float32": lambda model: model,
    "bfloat16": lambda model: quantize(model, 16),
    "int8": lambda model: quantize(model, 8),
    "int4": lambda model: quantize(model, 4),
    "bfloat16, weights alone": lambda model: quantize(model, 16, activations="float32"),
    "int8, weights alone": lambda model: quantize(model, 8, activations="float32"),
    "int4, weights alone": lambda model: quantize(model, 4, activations="float32"),
}
SHORT = ("float32", "bfloat16", "int8", "int4")
PROMPTS, BATCHES = (512, 2048), (1, 8, 16, 32, 64)


def int8_task(size: int = 2048) -> tuple[Callable[[], Any], float]:
    left, right = (torch.randint(-127, 128, (size, size), dtype=torch.int8) for _ in range(2))
    return lambda: torch.ops.aten._int_mm(left, right), 2.0 * size**3


def machine_tasks() -> dict[str, tuple[Callable[[], Any], float]]:
    """Products that a machine's own library computes, with their operations."""
    return {"float32": gemm_task(), "bfloat16": gemm_task(torch.bfloat16), "int8": int8_task()}


def in_its_rounds(tasks: dict[Any, Callable[[], Any]], repeats: int) -> tuple[dict[Any, float], str]:
    """Seconds of each, and a line about the machine in the same rounds."""
    products = machine_tasks()
    times = interleaved({**{("machine", name): task for name, (task, _) in products.items()}, **tasks}, repeats)
    speeds = [
        f"{name} {products[name][1] / median(times.pop(('machine', name))) / 1e9:,.0f} Gop/s" for name in products
    ]
    told = f"{torch.get_num_threads()} threads; torch's products: {', '.join(speeds)}"
    return {key: median(seconds) for key, seconds in times.items()}, told


def measure_prompts(models: dict[str, LanguageModel], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for tokens in PROMPTS:
        ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
        seconds, told = in_its_rounds({name: our_prefill(model, ids) for name, model in models.items()}, repeats)
        print(f"\nprompts of {tokens}, {told}\n")
        rows += [{"tokens": tokens, "format": name, "seconds": own, "machine": told} for name, own in seconds.items()]
        lines = [
            [name, f"{1e3 * own:.0f}", f"{tokens / own:,.0f}", f"{seconds['float32'] / own:.2f}"]
            for name, own in seconds.items()
        ]
        print(table(["weights", "ms", "tokens/s", "x float32"], lines))
    return rows


def measure_decoding(models: dict[str, LanguageModel], repeats: int, batches: tuple[int, ...]) -> list[dict[str, Any]]:
    read, bytes_read = reader(models["float32"])
    tasks: dict[Any, Callable[[], Any]] = {"read": read}
    for batch in batches:
        tasks |= {(name, batch): our_step(model, batch, "auto") for name, model in models.items()}
    seconds, told = in_its_rounds(tasks, repeats)
    bandwidth = bytes_read / seconds.pop("read")
    print(f"\ndecoding, {told}; memory {bandwidth / 1e9:.1f} GB/s; tokens/s (% of bytes)\n")
    rows = []
    for (name, batch), own in seconds.items():
        floor = (bytes_per_token(models[name]) + state_bytes(models[name], batch)) / bandwidth
        rows.append({"format": name, "batch": batch, "seconds": own, "floor": floor, "machine": told})
    found = {(row["format"], row["batch"]): row for row in rows}
    lines = []
    for name in models:
        own = [found[name, batch] for batch in batches]
        lines.append([name, *(f"{r['batch'] / r['seconds']:,.0f} ({r['floor'] / r['seconds']:.0%})" for r in own)])
    print(table(["weights", *(f"batch {batch}" for batch in batches)], lines))
    return rows


def peak_of(folder: str) -> None:
    """In a process of its own: loads the model, reads a short prompt and decodes 32 tokens."""
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    step = our_step(load_model(folder), 1, "auto")
    for _ in range(32):
        step()
    print(started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, resident_bytes())


def measure_memory(model: LanguageModel) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as parent:
        for name in SHORT:
            folder = Path(parent, name)
            save_model(FORMATS[name](model), folder)
            command = [sys.executable, "-m", "benchmarks.products", "--peak-of", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            started, peak, after = map(int, done.stdout.split())
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            rows.append({"format": name, "file": size, "peak": peak - started, "after": after - started})
    lines = [
        [
            row["format"],
            *(f"{row[key] / 1e6:,.0f}" for key in ("file", "peak", "after")),
            f"{row['peak'] / row['file']:.2f}",
        ]
        for row in rows
    ]
    print(table(["weights", "MB on disk", "peak MB beyond imports", "MB while decoding", "peak / file"], lines))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds, without weights alone")
    parser.add_argument("--family", choices=BLOCKS, default="mamba2")
    parser.add_argument("--what", choices=("prompts", "decoding", "memory"), nargs="+", default=["prompts", "decoding"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7, help="interleaved rounds (median)")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        peak_of(arguments.peak_of)
        return
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(block=BLOCKS[arguments.family], n_layer=24, vocab_size=VOCABULARY)).eval()
    repeats = 3 if arguments.quick else arguments.repeats
    names = SHORT if arguments.quick else FORMATS
    models = {} if arguments.what == ["memory"] else {name: FORMATS[name](model) for name in names}
    found: dict[str, Any] = {"family": arguments.family}
    if "prompts" in arguments.what:
        found["prompts"] = measure_prompts(models, repeats)
    if "decoding" in arguments.what:
        found["decoding"] = measure_decoding(models, 3 * repeats, tuple(arguments.batches))
    if "memory" in arguments.what:
        found["memory"] = measure_memory(model)
    print(f"\nwritten to {write_json('products', found).name}")


if __name__ == "__main__":
    main()
