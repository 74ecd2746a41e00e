"""Tokens per second with and without guessed tokens, and what calls of several tokens take.

python -m benchmarks.speculation            trains two models once (kept in build/speculation), then measures
python -m benchmarks.speculation --calls    what calls of several tokens of a 130M model take, in steps

Both models are what `mambakit train` makes of Python's standard library, one token per byte: one of ten million
parameters, and a draft of 0.3 million. Training takes a quarter of an hour on two cores. Prompts are pieces of files
that they have not seen. Kinds are interleaved, prompt by prompt; times are those of all tokens but the first two, and
all kinds have to agree on these. With one thread they are the processor's, which others on the machine hardly change.
"hostile" is text without any order by a model that has learned nothing.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import mambakit as mk
from benchmarks.measure import interleaved, median, progress, table, write_json
from mambakit.cli.main import main as command
from mambakit.inference.decoder import Decoder
from mambakit.text.documents import hold_out, standard_library
from mambakit.text.tokens import Bytes

FOLDER = Path(__file__).parent.parent / "build" / "speculation"
TRAIN = {
    "model": "--d-model 512 --layers 6 --steps 300 --warmup 30 --autocast bfloat16",
    "draft": "--d-model 128 --layers 2 --steps 600 --warmup 50",
}
SHARE = 0.05
"""Of the text that `mambakit train` holds out unless told otherwise."""
PROMPT, NEW = 1000, 400
TEMPERATURES = (0.0, 0.7)
FORMATS = {"float32": None, "bfloat16": 16, "int8": 8, "int4": 4}
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def trained(name: str) -> mk.LanguageModel:
    folder = FOLDER / name
    if not (folder / "model").exists():
        again = ["--resume"] if (folder / "run.json").exists() else []
        words = [] if again else f"--family mamba2 --optimizer muon --no-tensorboard {TRAIN[name]}".split()
        command(["train", "--out", str(folder), *again, *words])
    return mk.load_model(folder / "model")


def prompts(count: int) -> list[list[int]]:
    """From the middle of files that were held out."""
    _, held = hold_out(standard_library(), SHARE)
    long = [document.content for document in held if len(document.content) > 4 * PROMPT]
    pieces = [content[len(content) // 2 :][:PROMPT] for content in long[:: max(1, len(long) // count)]]
    return [Bytes().encode(piece) for piece in pieces[:count]]


def measure(
    model: mk.LanguageModel, given: list[list[int]], kinds: dict[str, Any], temperature: float, rounds: int
) -> list[dict]:
    """Of each kind: tokens per second after the prompts, each by the median of its rounds, and what was guessed."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    guessed, accepted = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    times: dict[str, list[list[float]]] = {name: [[] for _ in given] for name in kinds}
    for turn, (number, ids) in enumerate((number, ids) for _ in range(rounds) for number, ids in enumerate(given)):
        said: dict[str, list[int]] = {}
        names = [*kinds][turn % len(kinds) :] + [*kinds][: turn % len(kinds)]
        for name in names:
            progress(f"prompt {number + 1} of {len(given)}: {name}")
            asked = "draft" if isinstance(kinds[name], mk.LanguageModel) else "speculate"
            given_options = {"max_new_tokens": NEW, "temperature": temperature, "seed": number, asked: kinds[name]}
            run = mk.stream(model, ids, **given_options)
            # With the second token a decoder is made and its memory gathered, whatever is guessed.
            said[name] = [int(next(run)), int(next(run))]
            begun = clock()
            said[name] += [int(token) for token in run]
            times[name][number].append(clock() - begun)
            if run._speculation is not None:
                guessed[name] += run._speculation.guessed
                accepted[name] += run._speculation.accepted
        assert all(tokens == said[names[0]] for tokens in said.values()), "guesses changed what was said"
    progress("")
    tokens = len(given) * (NEW - 2)
    seconds = {name: sum(map(median, times[name])) for name in kinds}
    return [
        {
            "temperature": temperature,
            "speculate": name,
            "tokens/s": round(tokens / seconds[name], 1),
            "guessed": guessed[name],
            "accepted": accepted[name],
            "x off": round(seconds["off"] / seconds[name], 2),
        }
        for name in kinds
    ]


def measure_texts(
    count: int, threads: int, formats: list[str], drafts: bool, kinds_of_text: list[str], rounds: int
) -> list[dict]:
    plain, given = trained("model"), prompts(count)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    untrained = mk.LanguageModel(plain.config)
    noise = torch.randint(256, (max(2, count // 3), PROMPT)).tolist()
    kinds: dict[str, Any] = {"off": "off", "ngram": "ngram", **({"a draft": trained("draft")} if drafts else {})}
    rows = []
    for name in formats:
        bits = FORMATS[name]
        model, knows_nothing = (one if bits is None else mk.quantize(one, bits) for one in (plain, untrained))
        texts = [("code", model, given, temperature) for temperature in TEMPERATURES]
        for text, one, some, temperature in [*texts, ("hostile", knows_nothing, noise, 1.0)]:
            if text not in kinds_of_text:
                continue
            for row in measure(one, some, kinds, temperature, rounds):
                rows.append({"threads": threads, "weights": name, "text": text, **row})
    return rows


def measure_calls(threads: int, repeats: int) -> list[dict]:
    """Of a 130M model with random weights: a call of so many tokens, in steps."""
    torch.set_num_threads(threads)
    rows = []
    for family, block in {"Mamba-2": mk.Mamba2Config(d_model=768), "Mamba-1": mk.Mamba1Config(d_model=768)}.items():
        torch.manual_seed(0)
        plain = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=24, vocab_size=50_288))
        for name, model in {"float32": plain, "int8": mk.quantize(plain, 8)}.items():
            decoder = Decoder(model)
            decoder.load(model.fresh_cache(1))
            tasks = {length: lambda own=[[1] * length], d=decoder: d.chains(own) for length in LENGTHS}
            times = interleaved(tasks, repeats)
            step = median(times[1])
            ratios = {str(length): round(median(times[length]) / step, 2) for length in LENGTHS}
            rows.append(
                {"threads": threads, "model": family, "weights": name, "step ms": round(1e3 * step, 2), **ratios}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="what calls of several tokens take, and nothing else")
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--weights", nargs="+", default=["float32", "int8"], choices=FORMATS)
    parser.add_argument("--without-draft", action="store_true", help="guesses from the text alone")
    parser.add_argument("--texts", nargs="+", default=["code", "hostile"], choices=("code", "hostile"))
    parser.add_argument("--rounds", type=int, default=1, help="of every prompt, of which the median counts")
    given = parser.parse_args()
    rows = []
    for threads in given.threads:
        if given.calls:
            rows += measure_calls(threads, given.repeats)
        else:
            rows += measure_texts(
                given.prompts, threads, given.weights, not given.without_draft, given.texts, given.rounds
            )
    print(table([*rows[0]], [[str(cell) for cell in row.values()] for row in rows]))
    write_json("speculation_calls" if given.calls else "speculation", {"rows": rows})


if __name__ == "__main__":
    main()
