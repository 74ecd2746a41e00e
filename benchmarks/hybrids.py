"""Hybrids of about 350M parameters against transformers on the CPU: prefill, decoding and peak memory in one run.

python -m benchmarks.hybrids            all three, 1,024 tokens of prefill, 32 tokens of decoding (minutes)
python -m benchmarks.hybrids --quick    a few layers, 256 tokens

Each side runs in a process of its own, both in turn, on the same random weights.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import torch

from benchmarks.measure import median, table, write_json

VOCABULARY = 32_000
GRANITE: dict[str, Any] = {
    **{"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 0},
    **{"shared_intermediate_size": 2560, "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128},
    **{"embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015},
    "tie_word_embeddings": True,
}
NEMOTRON: dict[str, Any] = {
    **{"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64},
    **{"intermediate_size": 4096, "ssm_state_size": 128, "mamba_num_heads": 32, "mamba_head_dim": 64, "n_groups": 8},
}
FALCON_H1: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
    **{"tie_word_embeddings": True, "mamba_rms_norm": False},
}


def make(kind: str, quick: bool) -> Any:
    import transformers

    torch.manual_seed(0)
    shared = {"vocab_size": VOCABULARY, "pad_token_id": 0, "initializer_range": 0.02}
    if kind == "granitemoehybrid":
        layers = (["mamba"] * 5 + ["attention"]) * (1 if quick else 4)
        config = transformers.GraniteMoeHybridConfig(
            **shared, **GRANITE, num_hidden_layers=len(layers), layer_types=layers
        )
        return transformers.GraniteMoeHybridForCausalLM(config)
    if kind == "nemotron_h":
        layers = ["mamba", "mlp", "mamba", "mlp", "mamba", "attention", "mlp"] * (1 if quick else 6)
        config = transformers.NemotronHConfig(**shared, **NEMOTRON, layers_block_type=layers)
        return transformers.NemotronHForCausalLM(config)
    config = transformers.FalconH1Config(**shared, **FALCON_H1, num_hidden_layers=4 if quick else 24)
    return transformers.FalconH1ForCausalLM(config)


KINDS = ("granitemoehybrid", "nemotron_h", "falcon_h1")


def timed(run: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def one_side(side: str, folder: str, tokens: int, new: int, threads: int) -> dict[str, float]:
    """In a process of its own: seconds of a prefill, of a decoded token, and bytes at most."""
    torch.set_num_threads(threads)
    ids = torch.randint(1, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    if side == "transformers":
        import transformers

        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

        def prefill() -> Any:
            return model(ids, use_cache=True, logits_to_keep=1)

        def decode() -> None:
            model.generate(ids[:, :32], max_new_tokens=new, min_new_tokens=new, do_sample=False)
    else:
        import mambakit as mk

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = mk.load_model(folder)

        def prefill() -> Any:
            return mk.generate(model, ids, max_new_tokens=1, temperature=0, prefill_chunk=tokens)

        def decode() -> None:
            mk.generate(model, ids[:, :32], max_new_tokens=new, temperature=0)

    with torch.no_grad():
        decode()
        seconds = {"prefill": timed(prefill, 3), "decode": timed(decode, 3) / new}
    return {**seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}


def measure(kind: str, quick: bool, tokens: int, new: int, threads: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = make(kind, quick)
        parameters = sum(p.numel() for p in model.parameters())
        model.save_pretrained(folder)
        del model
        sides: dict[str, list[dict[str, float]]] = {"mambakit": [], "transformers": []}
        for _ in range(rounds):
            for side, found in sides.items():
                arguments = [side, folder, str(tokens), str(new), str(threads)]
                command = [sys.executable, "-m", "benchmarks.hybrids", "--side", *arguments]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
    best = {side: {name: min(one[name] for one in found) for name in found[0]} for side, found in sides.items()}
    return {"kind": kind, "parameters": parameters, "tokens": tokens, "threads": threads, **best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side, folder, *numbers = args.side
        print(json.dumps(one_side(side, folder, *map(int, numbers))))
        return
    tokens, new = (256, 16) if args.quick else (1024, 32)
    rows = [measure(kind, args.quick, tokens, new, args.threads, args.rounds) for kind in args.kinds]
    shown = []
    for row in rows:
        ours, theirs = row["mambakit"], row["transformers"]
        cells = [row["kind"], f"{row['parameters'] / 1e6:.0f}M"]
        for name, unit in (("prefill", "s"), ("decode", "ms"), ("peak", "GB")):
            factor = {"s": 1.0, "ms": 1e3, "GB": 1e-9}[unit]
            ratio = theirs[name] / ours[name]
            cells.append(f"{ours[name] * factor:.2f} / {theirs[name] * factor:.2f} {unit} ({ratio:.2f}x)")
        shown.append(cells)
    print(table(["model", "size", f"prefill of {tokens}", "a token", "peak memory"], shown))
    print(f"written to {write_json('hybrids', {'rows': rows})}")


if __name__ == "__main__":
    main()
