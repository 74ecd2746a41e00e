"""How far states in bfloat16 drift: a trained Mamba-2 reads a long text token by token, with both kinds of states.

python -m benchmarks.states                     100,000 bytes after a minute of training (some minutes)
python -m benchmarks.states --tokens 10000      a shorter text
python -m benchmarks.states --nearest           states rounded to the nearest after every token beside them, in torch

Both read the same bytes of Python's standard library, of modules that were not learned from, as one text. "change" is
in bits per byte since the line before; "apart" is the difference of all states relative to those in float32.
"""

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode import SMALL, library_text, train
from benchmarks.measure import progress, table, write_json
from mambakit import LanguageModel, ModelConfig
from mambakit.inference.decoder import Decoder


def held_text(tokens: int) -> Tensor:
    """Modules that `library_text` leaves for testing, one after the other, as often as it takes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::10]
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text * (tokens // len(text) + 1)), dtype=torch.uint8)[: tokens + 1].long()


class Nearest:
    """A decoder whose states are rounded to the nearest after every token."""

    def __init__(self, model: LanguageModel):
        self._decoder = Decoder(model, "cpu")

    def load(self, cache: Any) -> None:
        self._decoder.load(cache)

    def step(self, ids_b: Tensor) -> Tensor:
        logits_bw = self._decoder.step(ids_b)
        self.load([one._replace(ssm_bhpr=one.ssm_bhpr.bfloat16().float()) for one in self._decoder.cache()])
        return logits_bw

    def cache(self) -> Any:
        return self._decoder.cache()


def bits(logits_1w: Tensor, byte: int) -> float:
    return -float(logits_1w[0].double().log_softmax(-1)[byte]) / math.log(2)


def apart(got: Any, want: Any) -> float:
    pairs = [(a.ssm_bhpr.double(), b.ssm_bhpr.double()) for a, b in zip(got, want, strict=True)]
    distance, size = (
        sum(float((a - b).square().sum()) for a, b in pairs),
        sum(float(b.square().sum()) for _, b in pairs),
    )
    return math.sqrt(distance / size)


def measure(model: LanguageModel, text: Tensor, lines: int, nearest: bool) -> list[dict[str, Any]]:
    decoders: dict[str, Any] = {name: Decoder(model, "cpu", name) for name in ("float32", "bfloat16")}
    if nearest:
        decoders["nearest"] = Nearest(model)
    for decoder in decoders.values():
        decoder.load(model.fresh_cache(1))
    rows, total, tokens = [], dict.fromkeys(decoders, 0.0), len(text) - 1
    for place in range(tokens):
        for name, decoder in decoders.items():
            total[name] += bits(decoder.step(text[place : place + 1]), int(text[place + 1]))
        if (place + 1) % (tokens // lines) == 0:
            states = {name: decoder.cache() for name, decoder in decoders.items()}
            since = tokens // lines
            others = [name for name in decoders if name != "float32"]
            rows.append(
                {
                    "tokens": place + 1,
                    "float32": total["float32"] / since,
                    **{f"change {name}": (total[name] - total["float32"]) / since for name in others},
                    **{f"apart {name}": apart(states[name], states["float32"]) for name in others},
                }
            )
            total = dict.fromkeys(decoders, 0.0)
            progress(f"{place + 1} of {tokens} tokens")
    progress("")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--lines", type=int, default=10, help="of the table")
    parser.add_argument("--seconds", type=float, default=60, help="training time")
    parser.add_argument("--nearest", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LanguageModel(ModelConfig(block=SMALL["Mamba-2"], n_layer=4, vocab_size=256))
    steps = train(model, library_text()[0], arguments.seconds)
    with torch.no_grad():
        rows = measure(model.eval(), held_text(arguments.tokens), arguments.lines, arguments.nearest)
    keys = list(rows[0])
    shown = [[f"{row['tokens']:,}", *(f"{row[key]:.4f}" for key in keys[1:])] for row in rows]
    print(table(["tokens", "bits per byte, float32", *keys[2:]], shown))
    print(f"\n{steps} steps of training; written to {write_json('states', {'rows': rows}).name}")


if __name__ == "__main__":
    main()
