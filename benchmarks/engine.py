"""An engine's streams at once, and the time to the first token after a beginning that is known.

python -m benchmarks.engine              a byte model of 4 million parameters and a Mamba-2 of 130M (about ten minutes)
python -m benchmarks.engine --quick      the byte model alone, few rounds
python -m benchmarks.engine --memory     resident memory over a thousand requests, a third of them cancelled

"tokens/s" are those of all streams together, "x one" is relative to one stream of the same rounds, and every stream's
tokens are compared with those it gets alone. "x own" is the time to the first token of a prompt whose beginning is
known, relative to that of its own tokens alone, in an engine without known states.
"""

import argparse
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.measure import interleaved, median, progress, resident_bytes, table, write_json
from mambakit import LanguageModel, Mamba2Config, ModelConfig, PrefixCache, quantize
from mambakit.inference import Engine, Request

STREAMS = (1, 2, 4, 8, 16, 17, 32, 33, 64)
WORKLOADS = ((1600, 600), (1500, 700))
SIZES = {
    "bytes 4M": ModelConfig(block=Mamba2Config(d_model=256), n_layer=8, vocab_size=257),
    "Mamba-2 130M": ModelConfig(block=Mamba2Config(d_model=768), n_layer=24, vocab_size=50_288),
}


def prompt(tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(tokens)]


def begin(model: LanguageModel, streams: int) -> tuple[Engine, list[Request]]:
    """An engine in which every stream has its first token."""
    engine = Engine(model)
    requests = [engine.add(prompt(8, seed), temperature=0.8, top_k=40, seed=seed) for seed in range(streams)]
    while engine.waiting:
        engine.step()
    return engine, requests


def measure_streams(
    name: str, model: LanguageModel, repeats: int, steps: int, numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Steps at every number of streams, interleaved; the first and the last stream of each are compared with alone."""
    engines = {streams: begin(model, streams) for streams in numbers}

    def run(streams: int) -> None:
        for _ in range(steps):
            engines[streams][0].step()

    times = interleaved({streams: partial(run, streams) for streams in numbers}, repeats)
    rows = []
    for streams, seconds in times.items():
        equal = True
        for place in {0, streams - 1}:
            told = engines[streams][1][place].tokens
            engine = Engine(model)
            alone = engine.add(prompt(8, place), len(told), temperature=0.8, top_k=40, seed=place)
            engine.run()
            equal = equal and alone.tokens == told
        per_second = streams * steps / median(seconds)
        rows.append({"model": name, "streams": streams, "tokens_per_second": per_second, "equal": equal})
    for row in rows:
        row["x_one"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    return rows


def first_token(engine: Engine, ids: list[int]) -> tuple[float, int]:
    """Seconds until its first token, and how many of its tokens were known; the engine is left as it was."""
    begun = time.perf_counter()
    request = engine.add(ids, temperature=0)
    while not request.tokens:
        engine.step()
    seconds = time.perf_counter() - begun
    request.cancel()
    engine.step()
    return seconds, request.reused_tokens


def measure_first_tokens(name: str, model: LanguageModel, requests: int) -> list[dict[str, Any]]:
    """The first request shows the beginning, the second where others leave it; those after it are measured."""
    rows = []
    for shared, own in WORKLOADS:
        prompts = [[*prompt(shared, 1), *prompt(own, 2 + place)] for place in range(requests)]
        knows, plain = Engine(model, prefix_cache=PrefixCache()), Engine(model)
        first_token(plain, prompts[0][shared:])
        for ids in prompts[:2]:
            first_token(knows, ids)
        known, alone, reused = [], [], 0
        for place, ids in enumerate(prompts[2:]):
            progress(f"{name}: {shared} + {own} tokens, request {place + 3}")
            seconds, tokens = first_token(knows, ids)
            known.append(seconds)
            alone.append(first_token(plain, ids[shared:])[0])
            reused += tokens == shared
        progress("")
        ratios = [a / b for a, b in zip(known, alone, strict=True)]
        row = {"model": name, "shared": shared, "own": own, "requests": requests - 2, "reused_all": reused}
        rows.append({**row, "known_ms": 1e3 * median(known), "own_ms": 1e3 * median(alone), "x_own": median(ratios)})
    return rows


def measure_memory(requests: int) -> list[dict[str, Any]]:
    """Resident bytes at every tenth of many requests, eight at a time, of which some are cancelled."""
    torch.manual_seed(0)
    engine = Engine(LanguageModel(SIZES["bytes 4M"]), max_rows=8, prefix_cache=PrefixCache(max_bytes=1 << 26))
    draw, rows, running = random.Random(0), [], []
    for place in range(requests):
        running.append(engine.add(prompt(draw.randrange(1, 200), place), draw.randrange(1, 40), seed=place))
        while sum(not one.done for one in running) >= 8:
            engine.step()
            if draw.random() < 0.05:
                draw.choice(running).cancel()
        running = [one for one in running if not one.done]
        if (place + 1) % (requests // 10) == 0:
            rows.append({"requests": place + 1, "resident_bytes": resident_bytes()})
    engine.run()
    return rows


def show(streams: list[dict[str, Any]], first: list[dict[str, Any]]) -> None:
    lines = []
    for row in streams:
        line = [row["model"], str(row["streams"]), f"{row['tokens_per_second']:.0f}", f"{row['x_one']:.2f}"]
        lines.append([*line, "yes" if row["equal"] else "NO"])
    print(table(["model", "streams", "tokens/s", "x one", "as alone"], lines))
    lines = []
    for row in first:
        line = [row["model"], f"{row['shared']} + {row['own']}", f"{row['reused_all']} of {row['requests']}"]
        lines.append([*line, f"{row['known_ms']:.1f}", f"{row['own_ms']:.1f}", f"{row['x_own']:.3f}"])
    heads = ["model", "shared + own", "reuse all", "first token ms", "own tokens alone ms", "x own"]
    print("\n" + table(heads, lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the byte model alone, three rounds")
    parser.add_argument("--model", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--what", choices=("streams", "first"), nargs="+", default=["streams", "first"])
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS), metavar="N")
    parser.add_argument("--weights", choices=("float32", "int8"), nargs="+", default=["float32", "int8"])
    parser.add_argument("--memory", action="store_true", help="resident memory instead of times")
    parser.add_argument("--requests", type=int, default=1000, help="of --memory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9, help="interleaved rounds (median)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory:
        rows = measure_memory(arguments.requests)
        print(
            table(["requests", "resident MB"], [[str(r["requests"]), f"{r['resident_bytes'] / 1e6:.1f}"] for r in rows])
        )
        print(f"\nwritten to {write_json('engine_memory', {'rows': rows}).name}")
        return
    repeats = 3 if arguments.quick else arguments.repeats
    streams, first = [], []
    for name in ["bytes 4M"] if arguments.quick else arguments.model:
        small = name == "bytes 4M"
        torch.manual_seed(0)
        model = LanguageModel(SIZES[name])
        if "streams" in arguments.what:
            for kind in arguments.weights:
                one = model if kind == "float32" else quantize(model, 8)
                streams += measure_streams(f"{name} {kind}", one, repeats, 20 if small else 2, arguments.streams)
        if "first" in arguments.what:
            first += measure_first_tokens(name, model, 66 if small else 2 + repeats)
    show(streams, first)
    print(f"\nwritten to {write_json('engine', {'streams': streams, 'first_tokens': first}).name}")


if __name__ == "__main__":
    main()
