"""`mambakit train DATA... --out DIR`."""

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mambakit.checkpoints.files import ADAPTER, MODEL
from mambakit.cli.base_model import begin
from mambakit.cli.errors import say
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
from mambakit.optional import has, need
from mambakit.text.chat import read_chat
from mambakit.text.documents import Found, read_documents, standard_library
from mambakit.training.data import Choices, fingerprint, prepare
from mambakit.training.examples import HeldOutAnswers
from mambakit.training.lock import alone_in
from mambakit.training.loop import HeldOut, Trainer
from mambakit.training.processes import Ranks
from mambakit.training.run import CHECKPOINTS, Keep, go_on
from mambakit.training.run_checkpoints import RunCheckpoints
from mambakit.training.settings import PARALLEL, TrainSettings

EXAMPLE = "mambakit train notes/ book.txt --out run --steps 2000 --optimizer muon\n"
EXAMPLE += "  mambakit train chats.jsonl --init run --lora 8 --out tuned --seq-len 1024 --steps 500"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", nargs="*", metavar="DATA", help="texts, .jsonl, .csv, .parquet, folders; default: Python's own sources"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the run: checkpoints, logs, the model")
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR, whose options are kept")
    parser.add_argument("--parallel", choices=PARALLEL, default="ddp", help="under torchrun: whole models or shares")
    parser.add_argument(
        "--context-parallel", type=int, default=1, metavar="N", help="under torchrun: N processes share each sequence"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="under torchrun: N processes share each block's heads",
    )
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
    for name in ("tokenizer", "init"):
        if given.get(name) and Path(given[name]).exists():  # else a name on the hub
            given[name] = str(Path(given[name]).resolve())
    out, data = Path(args.out), [str(Path(path).resolve()) for path in args.data]
    ranks = Ranks(args.parallel, args.device)
    try:
        # Once all ranks know each other, so that one can speak for them.
        ranks.arrange(args.context_parallel, args.tensor_parallel)
        with alone_in(out, ranks):
            again = args.resume or (ranks.restarted and holds_run(out))
            options, notes = resumed(out, given, data) if again else (begun(out, given, data), [])
            # All ranks have read what is there before the first one writes.
            ranks.gather(None)
            final, held_out = start(options, out, ranks, given, notes)
    except (ValueError, OSError, ImportError) as error:
        if ranks.world == 1:
            raise
        if ranks.speaks(str(error)):
            # At once: torchrun ends all ranks when the first has ended.
            say("mambakit train", error)
        raise SystemExit(2) from error
    finally:
        ranks.close()
    if not ranks.is_first:
        return
    made = {name: str(out / name) for name in (ADAPTER, MODEL) if (out / name).is_dir()}
    if args.json:
        counted = "held_out_bytes" if isinstance(held_out, HeldOut) else "held_out_answer_tokens"
        print(json.dumps({held_out.measure: final, counted: held_out.size, **made}))
        return
    told = f"{final:.3f} bits/byte on {held_out.size:,} held-out bytes"
    if not isinstance(held_out, HeldOut):
        told = f"loss {final:.3f} per token on {held_out.size:,} tokens of held-out answers"
    print(f"{told}; {', '.join(f'the {name} is in {place}' for name, place in made.items())}")


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
    done = max(RunCheckpoints(out / CHECKPOINTS).steps(), default=0)
    if again.get("steps", done) < done:
        # Before the options are written, which would keep the smaller number.
        raise ValueError(f"the run is at step {done} already; --steps {again['steps']} is behind it")
    return options | again, [f"{note}; {SPARE} beside it is used" for note in notes]


def start(
    options: dict[str, Any], out: Path, ranks: Ranks, given: Iterable[str] = (), noted: Sequence[str] = ()
) -> tuple[float, HeldOut | HeldOutAnswers]:
    """Train as the options say; what the held-out data says of the result, and this data."""
    if options["tensorboard"]:
        need("--tensorboard", "tensorboard")
    settings = TrainSettings(**{name: options[name] for name in TrainSettings.__dataclass_fields__})
    model, tokens, folder, description = begin(options, given)
    # Before what may take long.
    ranks.check(model, settings)
    kinds = {"binary": options["binary"], "records": options["records"]}
    found = read_documents(options["data"], **kinds) if options["data"] else library()
    check_same_text(options, found)
    vocabulary = model.config.vocab_size
    data = prepare(
        found,
        tokens,
        lambda: read_chat(folder or Path(os.devnull), tokens, vocabulary),
        settings,
        Choices(**{name: options[name] for name in Choices._fields}),
    )
    model.backbone.checkpoint_layers = options["checkpoint_layers"]
    trainer = Trainer(model, settings, data.rows, data.held_out, ranks)
    watches: list[Any] = []
    if ranks.is_first:
        write_options(out, options)
        watches = [progress(settings, data.bits_per_nat)]
        if options["tensorboard"] is not False and has("tensorboard"):
            step = max(RunCheckpoints(out / CHECKPOINTS).steps(), default=0)
            watches.append(TensorBoard(out / "logs", step, data.bits_per_nat))
    with All(watches) as watch:
        size = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        much = f"{size:,} parameters" + (f", {trained:,} of them trained" if trained < size else "")
        for note in (*noted, *found.notes, *data.notes[:-1], f"{much}; {data.notes[-1]}"):
            watch.note(note)
        keep = Keep(tokens, description, options["init"] or "", options["merge"], options["async_checkpoints"])
        return go_on(trainer, out, keep, watch), data.held_out


def library() -> Found:
    return Found(standard_library(), ["no data given: training on the sources of Python's standard library"])


def check_same_text(options: dict[str, Any], found: Found) -> None:
    """Note a fingerprint of the data in the options of a new run; a resumed one has to have the same."""
    seen = fingerprint(found)
    if options.setdefault("text", seen) != seen:
        raise ValueError("the text has changed since the run began; a run goes on with the same files only")
