"""`mambakit train DATA... --out DIR`."""

import argparse
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mambakit.cli.layers import model_config
from mambakit.cli.progress import All, TensorBoard, progress
from mambakit.cli.run_options import (
    CHANGEABLE,
    OPTIONS,
    RUN,
    SPARE,
    UNFINISHED,
    holds_run,
    read_options,
    with_defaults,
    write_options,
)
from mambakit.models.language_model import LanguageModel
from mambakit.optional import has, need
from mambakit.text.documents import Document, hold_out, read_documents, standard_library
from mambakit.text.tokens import Bytes, TokenizerFile
from mambakit.training.batches import Rows, encode
from mambakit.training.lock import alone_in
from mambakit.training.loop import HeldOut, Trainer
from mambakit.training.processes import Ranks
from mambakit.training.run import CHECKPOINTS, MODEL, go_on
from mambakit.training.run_checkpoints import RunCheckpoints
from mambakit.training.settings import PARALLEL, TrainSettings

EXAMPLE = "mambakit train notes/ book.txt --out run --steps 2000 --optimizer muon"


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
    if given.get("tokenizer"):
        given["tokenizer"] = str(Path(given["tokenizer"]).resolve())
    out, data = Path(args.out), [str(Path(path).resolve()) for path in args.data]
    ranks = Ranks(args.parallel, args.device)
    try:
        with alone_in(out, ranks):
            options, notes = resumed(out, given, data) if args.resume else (begun(out, given, data), [])
            # All ranks have read what is there before the first one writes.
            ranks.gather(None)
            final, bytes_read = start(options, out, ranks, notes)
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
    if holds_run(out):
        raise ValueError(f"{out} holds a run already; --resume goes on with it, another --out starts anew")
    # Not there on a machine that does not see the first rank's disk.
    if out.exists() and any(path.name not in UNFINISHED for path in out.iterdir()):
        raise ValueError(f"{out} is not an empty folder; choose another --out")
    return with_defaults({**given, "data": data})


def resumed(out: Path, given: Mapping[str, Any], data: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of the run in `out`, of which some may be given anew, and what was found damaged."""
    if not holds_run(out):
        raise ValueError(f"{out} holds no run to resume: there is no {RUN} in it")
    options, notes = read_options(out)
    again = {**given, "data": data} if data else dict(given)
    for name, value in again.items():
        if name not in CHANGEABLE and value != options[name]:
            raise ValueError(f"the run in {out} has {name} = {options[name]!r}; resuming cannot make it {value!r}")
    return options | again, [f"{note}; {SPARE} beside it is used" for note in notes]


def start(options: dict[str, Any], out: Path, ranks: Ranks, noted: Sequence[str] = ()) -> tuple[float, int]:
    """Train as the options say; bits per byte of the held-out text, and its size."""
    if options["tensorboard"]:
        need("--tensorboard", "tensorboard")
    documents, notes = read_documents(options["data"], binary=options["binary"]) if options["data"] else library()
    tokens = TokenizerFile(Path(options["tokenizer"])) if options["tokenizer"] else Bytes()
    check_same_text(options, documents)
    for_training, held_out = hold_out(documents, options["held_out"])
    settings = TrainSettings(**{name: options[name] for name in TrainSettings.__dataclass_fields__})
    rows = Rows(encode(for_training, tokens), tokens.end, settings)
    bytes_of = [len(content) for _, content in held_out]
    torch.manual_seed(settings.seed)
    model = LanguageModel(model_config(options, tokens.vocab_size))
    model.backbone.checkpoint_layers = options["checkpoint_layers"]
    trainer = Trainer(model, settings, rows, HeldOut(encode(held_out, tokens), bytes_of), ranks)
    bits_per_nat = rows.tokens / sum(len(content) for _, content in for_training) / math.log(2)
    watches: list[Any] = []
    if ranks.is_first:
        write_options(out, options)
        watches = [progress(settings, bits_per_nat)]
        if options["tensorboard"] is not False and has("tensorboard"):
            step = max(RunCheckpoints(out / CHECKPOINTS).steps(), default=0)
            watches.append(TensorBoard(out / "logs", step, bits_per_nat))
    with All(watches) as watch:
        size = sum(p.numel() for p in model.parameters())
        for note in (*noted, *notes, f"{size:,} parameters, {rows.tokens:,} tokens in {len(for_training)} documents"):
            watch.note(note)
        return go_on(trainer, out, tokens, watch), sum(bytes_of)


def library() -> tuple[list[Document], list[str]]:
    return standard_library(), ["no data given: training on the sources of Python's standard library"]


def check_same_text(options: dict[str, Any], documents: Sequence[Document]) -> None:
    """Note a fingerprint of the text in the options of a new run; a resumed one has to have the same."""
    digest = hashlib.sha256()
    for name, content in documents:
        digest.update(f"{name} {len(content)} ".encode() + content)
    found = digest.hexdigest()
    if options.setdefault("text", found) != found:
        raise ValueError("the text has changed since the run began; a run goes on with the same files only")
