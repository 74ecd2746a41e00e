"""`mambakit export MODEL OUT --format onnx|aoti|gguf`."""

import argparse
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mambakit.checkpoints import load_model
from mambakit.checkpoints.files import find_directory, read_json
from mambakit.checkpoints.gguf.vocabulary import Vocabulary, bpe_vocabulary, byte_vocabulary
from mambakit.checkpoints.gguf.writing import KINDS, save_gguf
from mambakit.cli.convert import model_folder
from mambakit.cli.quantize import new_folder
from mambakit.inference.export import save_onnx, save_step_package
from mambakit.models.language_model import LanguageModel
from mambakit.text.tokens import Bytes, TokenizerFile, copy_description, describes_text, read_tokens

EXAMPLE = "mambakit export run/model exported --format gguf --type Q8_0"
FILES = {"aoti": "step.pt2", "gguf": "model.gguf"}
"""What is written into a folder, where that is one file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, a run's, or a name on the hub")
    parser.add_argument("out", metavar="OUT", help="a new folder, or a new file that ends in .gguf or .pt2")
    parser.add_argument("--format", choices=("onnx", *FILES), required=True, help="for onnxruntime, torch or llama.cpp")
    parser.add_argument("--type", choices=tuple(KINDS), help="of the matrices in a GGUF file; default: F16")
    parser.add_argument("--tokens", type=int, metavar="N", help="of ONNX's prefill; default: any number")
    parser.add_argument("--tokenizer", metavar="FILE", help='for GGUF; default: the model\'s own, or "bytes"')
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> None:
    for name, format in {"type": "gguf", "tokenizer": "gguf", "tokens": "onnx"}.items():
        if getattr(args, name) is not None and args.format != format:
            raise ValueError(f"--{name} is for --format {format}")
    out = Path(args.out)
    if args.format in FILES and out.suffix == Path(FILES[args.format]).suffix:
        if out.exists():
            raise ValueError(f"{out} exists already; give a new file, or remove it first")
        file, folder = out, None
    else:
        folder = new_folder(args.out)
        file = folder / FILES.get(args.format, "")
    source = find_directory(model_folder(args.model))
    writers: dict[str, Callable[[LanguageModel], list[Path]]] = {
        "onnx": lambda model: list(save_onnx(model, file, tokens=args.tokens)),
        "aoti": lambda model: [save_step_package(model, file)],
        "gguf": lambda model: [save_gguf(model, file, args.type or "F16", vocabulary(source, args.tokenizer, model))],
    }
    with quietly():
        written = writers[args.format](load_model(source).eval())
    if folder is not None:
        copy_description(source, folder)
    sizes = {str(path): path.stat().st_size for path in written}
    if args.json:
        print(json.dumps({"format": args.format, "files": sizes}))
    else:
        print("\n".join(f"{path}: {size / 1e6:,.2f} MB" for path, size in sizes.items()))


def vocabulary(source: Path, chosen: str | None, model: LanguageModel) -> Vocabulary | None:
    """The tokenizer for llama.cpp; None where the model has none."""
    if chosen is None and not describes_text(source):
        return None
    tokens = read_tokens(source, chosen)
    if isinstance(tokens, Bytes):
        return byte_vocabulary(tokens.end)
    assert isinstance(tokens, TokenizerFile)
    return bpe_vocabulary(read_json(tokens.path), tokens.end)


@contextmanager
def quietly() -> Iterator[None]:
    """Without what torch's exporters have to say about themselves."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.|onnx|copyreg")
            yield
    finally:
        log.setLevel(level)
