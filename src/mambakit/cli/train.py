"""`mambakit train DATA... --out DIR`."""

import argparse
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mambakit.blocks.family import FAMILIES
from mambakit.cli.progress import All, TensorBoard, progress
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.text.documents import Document, hold_out, read_documents, standard_library
from mambakit.text.tokens import Bytes, TokenizerFile
from mambakit.training.batches import Rows, encode
from mambakit.training.loop import HeldOut, Trainer
from mambakit.training.processes import Ranks
from mambakit.training.run import CHECKPOINTS, MODEL, train
from mambakit.training.run_checkpoints import RunCheckpoints
from mambakit.training.settings import BOUNDARIES, FREE, OPTIMIZERS, PARALLEL, SCHEDULES, TrainSettings

EXAMPLE = "mambakit train notes/ book.txt --out run --steps 2000 --optimizer muon"
RUN = "run.json"
"""The options of a run, for `--resume`."""

OPTIONS: dict[str, dict[str, Any]] = {
    "tokenizer": {"default": None, "metavar": "FILE", "help": "a tokenizer.json; default: bytes"},
    "binary": {"default": False, "action": "store_true", "help": "take files with zero bytes as they are"},
    "held_out": {"default": 0.05, "type": float, "help": "share of the text to evaluate on"},
    "family": {"default": "mamba3", "choices": FAMILIES, "help": "which block"},
    "d_model": {"default": 256, "type": int, "help": "width"},
    "layers": {"default": 4, "type": int, "help": "number of blocks"},
    "state_rank": {"default": None, "type": int, "help": "state entries per channel; default: the family's"},
    "head_dim": {"default": 64, "type": int, "help": "channels per head, in families that have heads"},
    "mimo_rank": {"default": 1, "type": int, "help": "writes and reads per token, in families that can have several"},
    "mlp": {"default": 0, "type": int, "help": "hidden width of an MLP after each block"},
    "steps": {"default": 1000, "type": int, "help": "steps of the optimizer"},
    "batch": {"default": 8, "type": int, "help": "rows per step, over all processes"},
    "seq_len": {"default": 512, "type": int, "help": "tokens of a row that gradients reach back through"},
    "segment_len": {"default": None, "type": int, "help": "keep activations of so many tokens only"},
    "accumulate": {"default": 1, "type": int, "help": "parts in which a step's rows are gone through"},
    "boundaries": {"default": "reset", "choices": BOUNDARIES, "help": "the state where a document ends"},
    "optimizer": {"default": "adamw", "choices": OPTIMIZERS, "help": "which optimizer"},
    "lr": {"default": None, "type": float, "help": "peak learning rate; default: 0.002, with muon 0.005"},
    "weight_decay": {"default": 0.1, "type": float, "help": "of matrices"},
    "clip": {"default": 1.0, "type": float, "help": "longest gradient"},
    "schedule": {"default": "cosine", "choices": SCHEDULES, "help": "how the learning rate falls"},
    "warmup": {"default": 100, "type": int, "help": "steps in which the learning rate rises"},
    "decay": {"default": 0.2, "type": float, "help": "share of the steps in which wsd falls"},
    "floor": {"default": 0.1, "type": float, "help": "where the learning rate ends, as a share of its peak"},
    "autocast": {"default": None, "choices": ("bfloat16",), "help": "compute in this dtype where it is safe"},
    "seed": {"default": 0, "type": int, "help": "of weights and of the order of documents"},
    "evaluate_every": {"default": 250, "type": int, "help": "steps between evaluations"},
    "evaluate_bytes": {"default": 200_000, "type": int, "help": "held-out text of each but the last"},
    "save_every": {"default": 250, "type": int, "help": "steps between checkpoints"},
    "skip_bad_steps": {"default": 0, "type": int, "help": "pass over so many steps with a loss or gradients like NaN"},
    "tensorboard": {"default": True, "action": argparse.BooleanOptionalAction, "help": "log to DIR/logs"},
}
CHANGEABLE = FREE | {"tensorboard"}
"""Options that need not stay the same when a run is resumed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="*", metavar="DATA", help="files and folders; default: Python's standard library")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the run: checkpoints, logs, the model")
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR, whose options are kept")
    parser.add_argument("--parallel", choices=PARALLEL, default="ddp", help="under torchrun: whole models or shares")
    parser.add_argument("--device", help="cpu, cuda or mps; default: cuda if there is one")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    for name, option in OPTIONS.items():
        told = {key: value for key, value in option.items() if key != "default"}
        if option["default"] not in (None, False, True):
            told["help"] += f"; default: {option['default']}"
        # Absent unless given, so that a resumed run keeps its own.
        parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **told)


def run(args: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    out = Path(args.out)
    ranks = Ranks(args.parallel, args.device)
    try:
        options = resumed(out, given, args.data) if args.resume else begun(out, given, args.data)
        # All ranks have read what is there before the first one writes.
        ranks.gather(None)
        final, bytes_read = start(options, out, ranks)
    finally:
        ranks.close()
    if not ranks.is_first:
        return
    if args.json:
        print(json.dumps({"bits_per_byte": final, "held_out_bytes": bytes_read, "model": str(out / MODEL)}))
    else:
        print(f"{final:.3f} bits/byte on {bytes_read:,} held-out bytes; the model is in {out / MODEL}")


def begun(out: Path, given: Mapping[str, Any], data: Sequence[str]) -> dict[str, Any]:
    """The options of a new run."""
    if (out / RUN).exists():
        raise ValueError(f"{out} holds a run already; --resume goes on with it, another --out starts anew")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder; choose another --out")
    options = {name: option["default"] for name, option in OPTIONS.items()} | dict(given)
    options["data"] = [str(Path(path).resolve()) for path in data]
    if options["tokenizer"]:
        options["tokenizer"] = str(Path(options["tokenizer"]).resolve())
    if options["lr"] is None:
        options["lr"] = 5e-3 if options["optimizer"] == "muon" else 2e-3
    return options


def resumed(out: Path, given: Mapping[str, Any], data: Sequence[str]) -> dict[str, Any]:
    """The options of the run in `out`. Of those given again, some may differ."""
    if not (out / RUN).exists():
        raise ValueError(f"{out} holds no run to resume: there is no {RUN} in it")
    options = json.loads((out / RUN).read_text("utf-8"))
    again = dict(given)
    if data:
        again["data"] = [str(Path(path).resolve()) for path in data]
    if again.get("tokenizer"):
        again["tokenizer"] = str(Path(again["tokenizer"]).resolve())
    for name, value in again.items():
        if name not in CHANGEABLE and value != options[name]:
            raise ValueError(f"the run in {out} has {name} = {options[name]!r}; resuming cannot make it {value!r}")
    return options | again


def start(options: dict[str, Any], out: Path, ranks: Ranks) -> tuple[float, int]:
    """Train as the options say; bits per byte of the held-out text, and its size."""
    documents, notes = read_documents(options["data"], binary=options["binary"]) if options["data"] else library()
    tokens = TokenizerFile(Path(options["tokenizer"])) if options["tokenizer"] else Bytes()
    check_same_text(options, documents)
    for_training, held_out = hold_out(documents, options["held_out"])
    settings = TrainSettings(**{name: options[name] for name in TrainSettings.__dataclass_fields__})
    rows = Rows(encode(for_training, tokens), tokens.end, settings)
    bytes_of = [len(content) for _, content in held_out]
    torch.manual_seed(settings.seed)
    model = LanguageModel(model_config(options, tokens.vocab_size))
    trainer = Trainer(model, settings, rows, HeldOut(encode(held_out, tokens), bytes_of), ranks)
    bits_per_nat = rows.tokens / sum(len(content) for _, content in for_training) / math.log(2)
    watches: list[Any] = []
    if ranks.is_first:
        write_options(out, options)
        watches = [progress(settings, bits_per_nat)]
        if options["tensorboard"]:
            step = max(RunCheckpoints(out / CHECKPOINTS).steps(), default=0)
            watches.append(TensorBoard(out / "logs", step, bits_per_nat))
    with All(watches) as watch:
        size = sum(p.numel() for p in model.parameters())
        for note in (*notes, f"{size:,} parameters, {rows.tokens:,} tokens in {len(for_training)} documents"):
            watch.note(note)
        return train(trainer, out, tokens, watch), sum(bytes_of)


def library() -> tuple[list[Document], list[str]]:
    return standard_library(), ["no data given: training on the sources of Python's standard library"]


def model_config(options: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    family, ranks = FAMILIES[options["family"]], options["mimo_rank"]
    if ranks != 1 and not family.has("mimo_rank"):
        able = [name for name, other in FAMILIES.items() if other.has("mimo_rank")]
        raise ValueError(f"--mimo-rank is for {' and '.join(able)}, and --family is {family.name}")
    sizes = {name: options[name] for name in ("d_model", "state_rank", "mimo_rank")}
    given = {**sizes, "per_head_dim": options["head_dim"], "is_mimo": ranks > 1}
    block = family.configure(family.at_hand, given)
    return ModelConfig(block=block, n_layer=options["layers"], vocab_size=vocab_size, d_intermediate=options["mlp"])


def check_same_text(options: dict[str, Any], documents: Sequence[Document]) -> None:
    """Note a fingerprint of the text in the options of a new run; a resumed one has to have the same."""
    digest = hashlib.sha256()
    for name, content in documents:
        digest.update(f"{name} {len(content)} ".encode() + content)
    found = digest.hexdigest()
    if options.setdefault("text", found) != found:
        raise ValueError("the text has changed since the run began; a run goes on with the same files only")


def write_options(out: Path, options: Mapping[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    fresh = out / f".{RUN}.tmp"
    fresh.write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, out / RUN)
