"""transformers' Mamba models before and after `mambakit.accelerate`: prefill, decoding and peak memory in one run.

python -m benchmarks.transformers            130M shapes, 2048 tokens (minutes: the plain Mamba-1 is slow)
python -m benchmarks.transformers --quick    4 layers, 512 tokens
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.measure import interleaved, median, peak_bytes, table, write_json
from mambakit import accelerate

# transformers' own initializer_range of 0.1 makes a Mamba whose logits move by 5e-4 when its inputs move by an ulp.
SIZES = {"vocab_size": 50_288, "hidden_size": 768, "initializer_range": 0.02}


def models(layers: int) -> dict[str, Any]:
    return {
        "mamba": transformers.MambaForCausalLM(
            transformers.MambaConfig(**SIZES, state_size=16, num_hidden_layers=layers)  # type: ignore[arg-type]
        ),
        "mamba2": transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(
                **SIZES,  # type: ignore[arg-type]
                state_size=128,
                num_hidden_layers=layers,
                num_heads=24,
                head_dim=64,
                n_groups=1,
            )
        ),
    }


def prefill(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, logits_to_keep=1).logits


def decode(model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)


def measure(layers: int, tokens: int, threads: int, repeats: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    ids = torch.randint(1, SIZES["vocab_size"], (1, tokens))
    tasks: dict[Any, Callable[[], Any]] = {}
    errors = {}
    for name, plain in models(layers).items():
        ours = copy.deepcopy(plain.eval())
        accelerate(ours)
        before, after = prefill(plain, ids), prefill(ours, ids)
        errors[name] = float((after - before).abs().max() / before.abs().max())
        for library, model in (("transformers", plain), ("accelerated", ours)):
            tasks[name, "prefill", library] = lambda model=model: prefill(model, ids)
            tasks[name, "decode 16", library] = lambda model=model: decode(model, ids[:, :8], 16)
    times = interleaved(tasks, repeats, seconds=60)
    return [
        {
            "model": name,
            "what": what,
            "library": library,
            "ms": 1e3 * median(seconds),
            "times": len(seconds),
            "peak_mb": peak_bytes(tasks[name, what, library]) / 1e6 if what == "prefill" else None,
            "logits_error": errors[name],
        }
        for (name, what, library), seconds in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    layers, tokens = (4, 512) if args.quick else (24, 2048)
    rows = measure(layers, tokens, args.threads, args.repeats)
    lines = []
    for row in rows:
        same = (r for r in rows if (r["model"], r["what"]) == (row["model"], row["what"]))
        ratio = next(r["ms"] for r in same if r["library"] == "transformers") / row["ms"]
        peak = "" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"
        lines.append(
            [
                row["model"],
                row["what"],
                row["library"],
                f"{row['ms']:.0f}",
                f"{ratio:.1f}",
                peak,
                f"{row['logits_error']:.0e}",
            ]
        )
    print(f"{layers} layers of 768, {tokens} tokens, {args.threads} threads, float32\n")
    print(table(["model", "what", "library", "ms", "times faster", "peak MB", "logits differ"], lines))
    print(write_json("transformers", {"layers": layers, "tokens": tokens, "threads": args.threads, "rows": rows}))


if __name__ == "__main__":
    main()
