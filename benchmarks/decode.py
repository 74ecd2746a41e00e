"""Decoding and prefill of a 130M model, beside transformers and beside the time it takes to read the weights.

python -m benchmarks.decode                   Mamba-2 on 1 and 2 threads, with the peer (about five minutes)
python -m benchmarks.decode --family mamba1   another family; the peer knows Mamba-2 only
python -m benchmarks.decode --quick           1 thread, few rounds
python -m benchmarks.decode --quantization    the loss of small models on Python's own source, before and after

"decode" is a token that comes between those of other models, "in a row" one of several of the same, as a stream has
them: what fits into the cache, its states for one, is still there. "x weights" is relative to reading the weights once,
at the speed of a loop that only reads the float32 weights where they lie; "x bytes" to reading the weights and reading
and writing every row's state, "x matvecs" to torch's products of all float32 projections with one token, "x floor" to
a prompt's matrix products at the speed of one large `torch.mm` of the same rounds. "torch" is our step in torch's
operators (`backend="torch"`), "ours" that of "auto". The peer gets our weights and its logits are compared. It needs
the `bench` extra; without it, only ours is measured.
"""

import argparse
import importlib.util
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import gemm_task, interleaved, median, peak_bytes, progress, table, write_json
from mambakit import LanguageModel, Mamba1Config, Mamba2Config, Mamba3Config, ModelConfig, quantize, stream
from mambakit.kernels.cpu.library import run, why_missing
from mambakit.kernels.cpu.structs import ReadMemory
from mambakit.models.quantization import quantization_report, weight_bytes
from mambakit.ops.backends import use_backend
from mambakit.tools.benchmark import module_flops

PROMPTS = (512, 2048)
BATCHES = (1, 8)
IN_A_ROW = 16
BLOCKS = {
    "mamba1": Mamba1Config(d_model=768),
    "mamba2": Mamba2Config(d_model=768),
    "mamba3": Mamba3Config(d_model=768),
}
VOCABULARY = 50_288
SMALL = {
    "Mamba-1": Mamba1Config(d_model=128),
    "Mamba-2": Mamba2Config(d_model=128, state_rank=32, per_head_dim=32),
    "Mamba-3": Mamba3Config(d_model=128, state_rank=32, per_head_dim=32),
}


def bytes_per_token(model: LanguageModel) -> int:
    """Of the weights that a step reads: of an embedding that is not also the head, that is one row."""
    tied = isinstance(model.lm_head, nn.Linear) and model.lm_head.weight is model.backbone.embedding.weight
    return weight_bytes(model) - (0 if tied else model.backbone.embedding.weight.nbytes)


def state_bytes(model: LanguageModel, batch: int, states: str = "float32") -> int:
    """Of the states that a step reads and writes."""
    carried = [field for cache in model.fresh_cache(batch) for field in cache._asdict().items()]
    halved = {"ssm_bhpr"} if states == "bfloat16" else set()
    return 2 * sum(t.nbytes // (2 if name in halved else 1) for name, t in carried if isinstance(t, Tensor))


def prefill_flops(model: LanguageModel, tokens: int) -> float:
    """Of a prompt's matrix products; the head meets its last token only."""
    return module_flops(model.backbone, tokens) + module_flops(model.lm_head, 1)


def reader(model: LanguageModel) -> tuple[Callable[[], Any], int]:
    """One pass over the weights where they lie, and its bytes: how fast memory can be read depends on its pages."""
    weights = [linear.weight.detach() for linear in model.modules() if isinstance(linear, nn.Linear)]
    bytes_read = sum(weight.nbytes for weight in weights)
    if why_missing() is not None:
        return lambda: [weight.sum() for weight in weights], bytes_read
    result = torch.zeros(1)

    def read() -> None:
        for weight in weights:
            run(ReadMemory(data=weight.data_ptr(), floats=weight.numel(), result=result.data_ptr()))

    return read, bytes_read


def our_step(model: LanguageModel, batch: int, backend: str, states: str = "float32") -> Callable[[], Any]:
    ids = torch.ones(batch, 8, dtype=torch.int64)
    run = stream(model, ids, max_new_tokens=1 << 30, temperature=0, backend=backend, states=states)
    return lambda: next(run)


def in_a_row(step: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: [step() for _ in range(IN_A_ROW)]


def our_prefill(model: LanguageModel, ids: Tensor) -> Callable[[], Any]:
    return lambda: stream(model, ids, max_new_tokens=0)


def matvecs(model: LanguageModel) -> Callable[[], Any]:
    """Every projection on one token and nothing else: what torch's own products leave for the rest."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {linear.in_features: torch.randn(1, linear.in_features) for linear in linears}

    def run() -> None:
        with torch.no_grad(), use_backend("torch"):
            for linear in linears:
                linear(inputs[linear.in_features])

    return run


def make_peer(model: LanguageModel) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    block = model.config.block
    assert isinstance(block, Mamba2Config)
    settings = transformers.Mamba2Config(
        vocab_size=model.config.padded_vocab_size,
        hidden_size=block.d_model,
        num_hidden_layers=model.config.n_layer,
        state_size=block.state_rank,
        head_dim=block.per_head_dim,
        num_heads=block.nheads,
        n_groups=block.ngroups,
        tie_word_embeddings=True,
    )
    peer = transformers.Mamba2ForCausalLM(settings).eval()
    weights = {key.replace("backbone.embedding.", "backbone.embeddings."): t for key, t in model.state_dict().items()}
    peer.load_state_dict(weights)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        want, got = model(ids)[0], peer(ids).logits[..., : model.config.vocab_size]
    difference = float((got - want).abs().max() / want.abs().max())
    assert difference < 1e-3, f"transformers computes another model: {difference}"
    return peer


def peer_step(peer: Any, batch: int) -> Callable[[], Any]:
    with torch.no_grad():
        cache = peer(torch.ones(batch, 8, dtype=torch.int64), use_cache=True).cache_params
    latest = [torch.ones(batch, 1, dtype=torch.int64)]

    def step() -> None:
        with torch.no_grad():
            latest[0] = peer(latest[0], cache_params=cache, use_cache=True).logits[:, -1:].argmax(-1)

    return step


def peer_prefill(peer: Any, ids: Tensor) -> Callable[[], Any]:
    def prefill() -> None:
        with torch.no_grad():
            peer(ids, use_cache=True, logits_to_keep=1)

    return prefill


def measure(threads: int, repeats: int, model: LanguageModel, peer: Any) -> list[dict[str, Any]]:
    """Seconds of everything at this number of threads, the reading of memory measured in the same rounds."""
    torch.set_num_threads(threads)
    read, bytes_read = reader(model)
    steps: dict[Any, Callable[[], Any]] = {
        "read": read,
        ("matvecs", "torch", 1): matvecs(model),
    }
    models = {"ours": model, "ours bfloat16": quantize(model, 16)}
    models |= {"ours int8": quantize(model, 8), "ours int4": quantize(model, 4)}
    for batch in BATCHES:
        steps |= {("decode", name, batch): our_step(one, batch, "auto") for name, one in models.items()}
        steps |= {("in a row", name, batch): in_a_row(our_step(one, batch, "auto")) for name, one in models.items()}
        steps["decode", "torch", batch] = our_step(model, batch, "torch")
        if peer is not None:
            steps["decode", "transformers", batch] = peer_step(peer, batch)
    gemm, gemm_flops = gemm_task()
    prefills: dict[Any, Callable[[], Any]] = {}
    for tokens in PROMPTS:
        ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
        prefills[f"prefill {tokens}", "ours", tokens] = our_prefill(model, ids)
        if peer is not None:
            prefills[f"prefill {tokens}", "transformers", tokens] = peer_prefill(peer, ids)
    times = {**interleaved(steps, repeats), **interleaved({"gemm": gemm, **prefills}, max(repeats // 3, 1))}
    flops_per_second = gemm_flops / median(times.pop("gemm"))
    bandwidth = bytes_read / median(times.pop("read"))
    peaks = {key: peak_bytes(task) for key, task in prefills.items()}
    return [
        {
            "threads": threads,
            "what": what,
            "library": library,
            "tokens": tokens,
            "ms": 1e3 * median(seconds) / (IN_A_ROW if what == "in a row" else 1),
            "times": len(seconds),
            "bandwidth_gb_s": bandwidth / 1e9,
            "weights_ms": 1e3 * bytes_per_token(models.get(library, model)) / bandwidth,
            "state_ms": 1e3 * state_bytes(model, tokens) / bandwidth if what in ("decode", "in a row") else 0.0,
            "floor_ms": 1e3 * prefill_flops(model, tokens) / flops_per_second,
            "peak_bytes": peaks.get((what, library, tokens)),
        }
        for (what, library, tokens), seconds in times.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    matvecs = {row["threads"]: row["ms"] for row in rows if row["what"] == "matvecs"}
    lines = []
    for row in rows:
        line = [str(row["threads"]), row["what"], row["library"], str(row["tokens"]), f"{row['ms']:.1f}"]
        line.append(f"{1e3 * row['tokens'] / row['ms']:.1f}")
        if row["what"].startswith("prefill"):
            line += ["", "", "", f"{row['ms'] / row['floor_ms']:.2f}", f"{row['peak_bytes'] / 1e6:.0f}"]
        else:
            floors = (row["weights_ms"], row["weights_ms"] + row["state_ms"], matvecs[row["threads"]])
            line += [*(f"{row['ms'] / floor:.2f}" for floor in floors), "", ""]
        lines.append(line)
    heads = ["threads", "what", "library", "tokens", "ms", "tokens/s", "x weights", "x bytes", "x matvecs", "x floor"]
    print(table([*heads, "peak MB"], lines))
    for threads, ms in matvecs.items():
        row = next(row for row in rows if row["threads"] == threads and row["library"] == "ours")
        print(
            f"{threads} threads: memory is read at {row['bandwidth_gb_s']:.1f} GB/s, the float32 weights in "
            f"{row['weights_ms']:.1f} ms; torch's products of all projections take {ms:.1f} ms"
        )


def library_text() -> tuple[Tensor, Tensor]:
    """Bytes of Python's standard library to learn from, and of other modules of it to be tested on."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held = [file for place, file in enumerate(files) if place % 10 == 0]
    learned = [file for file in files if file not in held]
    text, test = (
        torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in part)), dtype=torch.uint8)
        for part in (learned, held)
    )
    return text, test[: 64 * 512].view(64, 512).long()


def train(model: LanguageModel, text: Tensor, seconds: float) -> int:
    """A few seconds of next-byte prediction; the number of steps."""
    optimizer, steps, end = torch.optim.AdamW(model.parameters(), lr=2e-3), 0, time.monotonic() + seconds
    make = torch.Generator().manual_seed(0)
    while time.monotonic() < end:
        starts = torch.randint(len(text) - 257, (8,), generator=make)
        ids = torch.stack([text[start : start + 257] for start in starts.tolist()]).long()
        loss = F.cross_entropy(model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        progress(f"step {steps}: {loss.item() / 0.6931:.2f} bits per byte")
    progress("")
    return steps


def compare_losses(seconds: float) -> list[dict[str, Any]]:
    text, held = library_text()
    rows = []
    for family, block in SMALL.items():
        torch.manual_seed(0)
        model = LanguageModel(ModelConfig(block=block, n_layer=4, vocab_size=256))
        steps = train(model, text, seconds)
        for bits in (16, 8, 4):
            report = quantization_report(model, quantize(model, bits), held)
            rows.append({"family": family, "bits": bits, "steps": steps, **report})
    return rows


def show_losses(rows: list[dict[str, Any]]) -> None:
    lines = [
        [
            row["family"],
            str(row["bits"]),
            f"{row['bits_per_token']:.4f}",
            f"{row['bits_per_token_quantized']:.4f}",
            f"{row['change']:+.4f}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['bytes_quantized'] / 1e6:.2f}",
        ]
        for row in rows
    ]
    print(table(["family", "bits", "bits/byte float32", "quantized", "change", "MB float32", "MB quantized"], lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one thread, three rounds")
    parser.add_argument("--family", choices=BLOCKS, default="mamba2")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts to measure at")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved rounds (median)")
    parser.add_argument("--quantization", action="store_true", help="losses instead of times")
    parser.add_argument("--seconds", type=float, default=30, help="training time of each model of --quantization")
    arguments = parser.parse_args()
    if arguments.quantization:
        torch.set_num_threads(arguments.threads[0])
        rows = compare_losses(arguments.seconds)
        show_losses(rows)
        print(f"\nwritten to {write_json('quantization', {'rows': rows}).name}")
        return
    torch.manual_seed(0)
    config = ModelConfig(block=BLOCKS[arguments.family], n_layer=24, vocab_size=VOCABULARY)
    model = LanguageModel(config)
    has_peer = arguments.family == "mamba2" and importlib.util.find_spec("transformers") is not None
    peer = make_peer(model) if has_peer else None
    threads, repeats = ([1], 3) if arguments.quick else (arguments.threads, arguments.repeats)
    rows = [row for count in threads for row in measure(count, repeats, model, peer)]
    print(f"\nfloat32 {arguments.family}, {weight_bytes(model) / 1e6:.0f} MB of weights; tokens: batch or prompt\n")
    show(rows)
    print(f"\nwritten to {write_json('decode', {'config': config.to_dict(), 'rows': rows}).name}")


if __name__ == "__main__":
    main()
