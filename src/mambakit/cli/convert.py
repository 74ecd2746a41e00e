"""`mambakit convert SRC DST --format ...`."""

import argparse
import json
from pathlib import Path

import torch

from mambakit.checkpoints import load_model, save_model
from mambakit.checkpoints.files import find_directory
from mambakit.checkpoints.formats import FORMATS
from mambakit.cli.run_options import holds_run, read_options
from mambakit.models.language_model import LanguageModel
from mambakit.text.tokenizer import find_tokens
from mambakit.text.tokens import Bytes, copy_description
from mambakit.training.run_checkpoints import is_checkpoint, model_of

EXAMPLE = "mambakit convert run/model exported --format official"
ALIASES = {"hf": "transformers"}
DTYPES = ("float16", "bfloat16", "float32", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SRC", help="a checkpoint's folder in any format, a training run's too, or a hub name"
    )
    parser.add_argument("target", metavar="DST", help="a new or empty folder, or one with a checkpoint to replace")
    parser.add_argument("--format", choices=(*FORMATS, *ALIASES), required=True, help="hf is transformers")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as they are")
    parser.add_argument("--a-activation", choices=("heavy_tail", "softplus"), help="of official Mamba-3 weights")
    parser.add_argument("--norm-group-size", type=int, metavar="N", help="of Mamba-2 weights of transformers")
    parser.add_argument("--dt-limit", type=float, nargs=2, metavar=("LOW", "HIGH"), help="of Nemotron's step sizes")
    parser.add_argument("--max-shard-bytes", type=int, metavar="N", help="divide the weights into files of this size")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> None:
    format: str = ALIASES.get(args.format) or args.format
    if is_checkpoint(Path(args.source)):
        model = from_checkpoint(args, format)
    else:
        model = from_folder(args, format)
    size = sum(parameter.numel() for parameter in model.parameters())
    if args.json:
        print(json.dumps({"target": args.target, "format": format, "parameters": size}))
    else:
        print(f"{size:,} parameters in the format {format!r}: {args.target}")


def from_folder(args: argparse.Namespace, format: str) -> LanguageModel:
    source = model_folder(args.source)
    model = load_model(
        source,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        a_activation=args.a_activation,
        norm_group_size=args.norm_group_size,
        dt_limit=None if args.dt_limit is None else tuple(args.dt_limit),
    )
    save_model(model, args.target, format, max_shard_bytes=args.max_shard_bytes)
    copy_description(Path(source), Path(args.target))
    return model


def from_checkpoint(args: argparse.Namespace, format: str) -> LanguageModel:
    """Of a training run, with the tokens that its options name."""
    given = [name for name in ("a_activation", "norm_group_size", "dt_limit") if getattr(args, name) is not None]
    if given:
        told = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{told} is for checkpoints of others; {args.source} says itself what its model is like")
    path, target = Path(args.source), Path(args.target)
    model = model_of(path)
    save_model(
        model if args.dtype is None else model.to(getattr(torch, args.dtype)),
        target,
        format,
        max_shard_bytes=args.max_shard_bytes,
    )
    run = path.resolve().parent.parent
    if holds_run(run):
        options, _ = read_options(run)
        named = options["tokenizer"] or options["init"]
        tokens, folder = find_tokens(named) if named else (Bytes(), None)
        tokens.save(target)
        if folder is not None:
            copy_description(folder, target)
    return model


def model_folder(name: str) -> str:
    """The folder of a model, given by itself, by its run or by its name on the hub; a file is what it is."""
    return name if Path(name).is_file() else str(find_directory(name))
