"""`mambakit quantize MODEL OUT --bits 8|4`."""

import argparse
import json
from collections import Counter
from pathlib import Path

from mambakit.checkpoints import load_model, save_model
from mambakit.checkpoints.files import find_directory
from mambakit.cli.convert import model_folder
from mambakit.models.language_model import LanguageModel
from mambakit.models.quantization import quantize, quantized_in
from mambakit.text.documents import read_documents
from mambakit.text.tokens import copy_description, read_tokens
from mambakit.training.batches import encode
from mambakit.training.objective import bits_per_byte

EXAMPLE = "mambakit quantize run/model small --bits 4 --report notes.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, a run's, or a name on the hub")
    parser.add_argument("out", metavar="OUT", help="a new folder: a checkpoint that every verb reads")
    # Not `choices`, whose message is the usage and more: what else is given is refused in one line.
    parser.add_argument("--bits", type=int, required=True, help="8 or 4, or 16 for bfloat16")
    parser.add_argument("--group-size", type=int, metavar="N", help="weights that share a scale at 4 bits; default: 32")
    parser.add_argument("--activations", metavar="TYPE", help="float32, or int8 (bfloat16 at 16 bits), the default")
    parser.add_argument("--head-bits", type=int, metavar="N", help="of the output head; default: those of --bits")
    parser.add_argument("--report", metavar="TEXT", help="compare bits per byte of this file before and after")
    parser.add_argument("--tokenizer", metavar="FILE", help='for --report; default: the model\'s own, or "bytes"')
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> None:
    target = new_folder(args.out)
    source = find_directory(model_folder(args.model))
    measured = None if args.report is None else Text(args.report, source, args.tokenizer)
    model = load_model(source)
    unrounded = 0.0 if measured is None else measured.bits_per_byte(model)
    kinds = {"activations": args.activations, "head_bits": args.head_bits}
    small = quantize(model, args.bits, args.group_size, **kinds, in_place=True)
    save_model(small, target)
    copy_description(source, target)
    matrices = Counter(module.format for module in quantized_in(small).values())
    before, after = size_of(source), size_of(target)
    found = {"target": str(target), "bits": args.bits, "matrices": sum(matrices.values())}
    found |= {"bytes": before, "bytes_quantized": after}
    if measured is not None:
        # What is on the disk, not what is in memory.
        found["bits_per_byte"] = unrounded
        found["bits_per_byte_quantized"] = measured.bits_per_byte(load_model(target))
    if args.json:
        print(json.dumps(found))
        return
    told = ", ".join(f"{count} in {format}" for format, count in matrices.items())
    print(f"{told}: {before / 1e6:,.2f} MB on disk become {after / 1e6:,.2f} MB ({after / before:.0%}) in {target}")
    if measured is not None:
        change = found["bits_per_byte_quantized"] - unrounded
        print(
            f"bits per byte of {args.report} ({measured.bytes:,} bytes): {unrounded:.4f} before, "
            f"{found['bits_per_byte_quantized']:.4f} after ({change:+.4f})"
        )


class Text:
    """A text to measure models by, read before any work is done."""

    def __init__(self, file: str, model: Path, tokenizer: str | None):
        self.documents = read_documents([file]).documents
        self.tokens = read_tokens(model, tokenizer)
        self.bytes = sum(len(content) for _, content in self.documents)

    def bits_per_byte(self, model: LanguageModel) -> float:
        most = max(self.tokens.vocab_size, self.tokens.end + 1)
        if most > model.config.padded_vocab_size:
            raise ValueError(f"the tokenizer has {most} tokens, but the model knows {model.config.vocab_size}")
        return bits_per_byte(model.eval(), encode(self.documents, self.tokens), self.bytes)


def new_folder(name: str) -> Path:
    """Where nothing is yet."""
    path = Path(name)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists already; give a new folder, or remove it first")
    return path


def size_of(folder: Path) -> int:
    """Bytes of all weights in it."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
