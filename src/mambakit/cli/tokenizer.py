"""`mambakit tokenizer DATA... --out FILE --vocab-size N`."""

import argparse
import json
import sys
from pathlib import Path

from mambakit.text.documents import read_documents
from mambakit.text.vocabulary import learn, save, texts

EXAMPLE = "mambakit tokenizer notes/ book.txt --out tokenizer.json --vocab-size 4096"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="+", metavar="DATA", help="texts, .jsonl, .csv, .parquet, folders")
    parser.add_argument("--out", required=True, metavar="FILE", help="the tokenizer.json to write")
    parser.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="tokens in all; default: 4096")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    if out.exists():
        raise ValueError(f"{out} is there already; choose another --out")
    found = read_documents(args.data)
    read = list(texts(found))
    size = sum(len(text.encode()) for text in read)
    for note in (*found.notes, f"learning {args.vocab_size:,} tokens from {size:,} bytes"):
        print(note, file=sys.stderr)
    made = learn(read, args.vocab_size)
    out.parent.mkdir(parents=True, exist_ok=True)
    save(made, out)
    count = sum(len(one.ids) for one in made.encode_batch(read, add_special_tokens=False))
    figures = {"tokenizer": str(out), "vocab_size": made.get_vocab_size(), "bytes_per_token": size / max(count, 1)}
    if args.json:
        print(json.dumps(figures))
    else:
        known, width = figures["vocab_size"], figures["bytes_per_token"]
        print(f"{known:,} tokens, {width:.2f} bytes each on this text; mambakit train --tokenizer {out}")
