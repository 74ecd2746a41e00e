"""The options of a training run: which there are, and how a run's own are kept in its folder."""

import argparse
import hashlib
import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mambakit.blocks.family import FAMILIES
from mambakit.checkpoints.files import read_json
from mambakit.checkpoints.writing import sync
from mambakit.cli.layers import NAMES
from mambakit.training.examples import TOO_LONG
from mambakit.training.lock import LOCK
from mambakit.training.settings import BOUNDARIES, FREE, OPTIMIZERS, SCHEDULES

RUN, SPARE = "run.json", ".run.json"
"""The options of a run, for `--resume`, and a copy for the case that the file is damaged."""
UNFINISHED = {LOCK, f".{RUN}.tmp"}
"""What a run leaves that was killed before it had written its options: nothing."""
SUM = "sha256"
"""In both, of all that is there besides."""

OPTIONS: dict[str, dict[str, Any]] = {
    "init": {"default": None, "metavar": "MODEL", "help": "fine-tune this: a checkpoint's folder, a run's, a hub name"},
    "lora": {"default": None, "type": int, "metavar": "R", "help": "train adapters of rank R, with --init"},
    "full": {"default": False, "action": "store_true", "help": "train all weights, with --init; the default there"},
    "lora_alpha": {"default": None, "type": float, "help": "adapters count alpha / R; default: twice R"},
    "lora_targets": {"default": None, "metavar": "NAMES", "help": "like in_proj,out_proj; default: all projections"},
    "merge": {
        "default": True,
        "action": argparse.BooleanOptionalAction,
        "help": "beside an adapter, save the model with it merged in; default: yes",
    },
    "tokenizer": {
        "default": None,
        "metavar": "FILE",
        "help": "a tokenizer.json, a folder or a hub name; default: bytes, with --init the model's",
    },
    "records": {
        "default": True,
        "action": argparse.BooleanOptionalAction,
        "help": "read .jsonl, .csv, .parquet and .arrow as records, not as text; default: yes",
    },
    "template": {
        "default": True,
        "action": argparse.BooleanOptionalAction,
        "help": "write conversations by the chat template, or else one message after the other; default: yes",
    },
    "packing": {
        "default": True,
        "action": argparse.BooleanOptionalAction,
        "help": "several conversations to a row, unknown to each other; default: yes",
    },
    "too_long": {"default": "refuse", "choices": TOO_LONG, "help": "conversations longer than seq_len"},
    "binary": {"default": False, "action": "store_true", "help": "take files with zero bytes as they are"},
    "held_out": {"default": 0.05, "type": float, "help": "share of the text to evaluate on"},
    "family": {"default": "mamba3", "choices": FAMILIES, "help": "which block"},
    "d_model": {"default": 256, "type": int, "help": "width"},
    "layers": {"default": "4", "help": f'number of blocks, or a pattern like "3*M2 A" of {", ".join(NAMES)}'},
    "state_rank": {"default": None, "type": int, "help": "state entries per channel; default: the family's"},
    "head_dim": {"default": 64, "type": int, "help": "channels per head, in families that have heads"},
    "mimo_rank": {"default": 1, "type": int, "help": "writes and reads per token, in families that can have several"},
    "mlp": {"default": 0, "type": int, "help": "hidden width of an MLP after each block, and of F and E in a pattern"},
    "heads": {"default": None, "type": int, "help": "of attention; default: d_model / head_dim"},
    "window": {"default": None, "type": int, "help": "tokens that attention looks back on; default: seq_len"},
    "experts": {"default": 8, "type": int, "help": "in a mixture of experts, each token going to two"},
    "balance": {"default": 0.01, "type": float, "help": "share of the loss that keeps experts in use"},
    "checkpoint_layers": {"default": False, "action": "store_true", "help": "compute layers again instead of keeping"},
    "steps": {"default": 1000, "type": int, "help": "steps of the optimizer"},
    "batch": {"default": 8, "type": int, "help": "rows per step, over all processes"},
    "seq_len": {"default": 512, "type": int, "help": "tokens of a row that gradients reach back through"},
    "segment_len": {"default": None, "type": int, "help": "keep activations of so many tokens only"},
    "accumulate": {"default": 1, "type": int, "help": "parts in which a step's rows are gone through"},
    "boundaries": {"default": "reset", "choices": BOUNDARIES, "help": "the state where a document ends"},
    "optimizer": {"default": "adamw", "choices": OPTIMIZERS, "help": "which optimizer"},
    "lr": {
        "default": None,
        "type": float,
        "help": "peak learning rate; default: 0.002, with muon 0.005, with --init 0.0001, with --lora 0.001",
    },
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
    "async_checkpoints": {
        "default": False,
        "action": argparse.BooleanOptionalAction,
        "help": "write checkpoints while the run goes on, from a copy; default: no",
    },
    "skip_bad_steps": {"default": 0, "type": int, "help": "pass over so many steps with a loss or gradients like NaN"},
    "tensorboard": {
        "default": None,
        "action": argparse.BooleanOptionalAction,
        "help": "log to DIR/logs; default: where tensorboard is installed",
    },
}
CHANGEABLE = FREE | {"tensorboard", "merge", "async_checkpoints"}
"""Options that need not stay the same when a run is resumed."""


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: option["default"] for name, option in OPTIONS.items()} | dict(given)
    if options["lr"] is None:
        from_scratch = 5e-3 if options["optimizer"] == "muon" else 2e-3
        options["lr"] = 1e-3 if options["lora"] else 1e-4 if options["init"] else from_scratch
    return options


def holds_run(out: Path) -> bool:
    return (out / RUN).exists() or (out / SPARE).exists()


def read_options(out: Path) -> tuple[dict[str, Any], list[str]]:
    """The options of the run in `out`, and what was found damaged, a line each. ValueError names the files."""
    problems = []
    for name in (RUN, SPARE):
        try:
            return _read(out / name), problems
        except ValueError as error:
            problems.append(f"{out / name} is damaged: {error}")
    raise ValueError("; ".join(problems))


def write_options(out: Path, options: Mapping[str, Any]) -> None:
    """Each file is replaced at once, and never both at a time."""
    for name in (RUN, SPARE):
        fresh = out / f".{RUN}.tmp"
        fresh.write_text(json.dumps({**options, SUM: _sum(options)}, indent=1) + "\n", encoding="utf-8")
        sync(fresh)
        os.replace(fresh, out / name)


def _read(path: Path) -> dict[str, Any]:
    values = read_json(path)
    written = values.pop(SUM, None)  # runs from before it was written have none
    if written is not None and written != _sum(values):
        raise ValueError("its checksum is not that of its options")
    wrong = [name for name, value in values.items() if not _fits(name, value)]
    if wrong:
        raise ValueError(
            ", ".join(f"{name} = {reprlib.repr(values[name])}" for name in wrong) + " is no option of a run"
        )
    # Runs from before records were read took all files for text.
    return with_defaults({"records": False, **values})


def _fits(name: str, value: Any) -> bool:
    if name == "data":
        return isinstance(value, list) and all(isinstance(path, str) for path in value)
    if name == "layers":
        return type(value) in (int, str)  # a number in runs from before there were patterns
    if name in ("text", "weights"):
        return isinstance(value, str)
    option = OPTIONS.get(name)
    if option is None or value is None:
        return option is not None and option["default"] is None
    if "action" in option:
        return isinstance(value, bool)
    if "choices" in option:
        return value in list(option["choices"])
    kind = option.get("type", str)
    return type(value) is kind or (kind is float and type(value) is int)


def _sum(options: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
