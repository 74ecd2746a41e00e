"""`mambakit generate MODEL_DIR --prompt ...`."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mambakit.checkpoints import load_model
from mambakit.cli.convert import model_folder
from mambakit.inference.generation import Stream
from mambakit.inference.speculation import KINDS
from mambakit.models.language_model import LanguageModel
from mambakit.text.tokenizer import find_tokens
from mambakit.text.tokens import Tokens, read_tokens

EXAMPLE = 'mambakit generate run/model --prompt "def " --max-new-tokens 200 --temperature 0.8'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_DIR", help="a checkpoint's folder, a run's, or a name on the hub")
    parser.add_argument("--prompt", help="text to continue; default: what comes in on standard input")
    parser.add_argument("--chat", action="store_true", help="turn by turn, each going on from the state of the last")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help='a tokenizer.json, a folder, a hub name or "bytes"; default: the model\'s own',
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: 256")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token; default: 1")
    parser.add_argument("--top-k", type=int, help="of the k most likely tokens only")
    parser.add_argument("--top-p", type=float, help="of the fewest tokens that have this probability together")
    parser.add_argument("--min-p", type=float, help="of tokens this likely, measured by the likeliest")
    parser.add_argument("--repetition-penalty", type=float, help="above 1, makes tokens rarer that were there before")
    parser.add_argument("--seed", type=int, help="the same seed, the same text")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end with this text")
    parser.add_argument("--keep-going", action="store_true", help="do not end where the document does")
    parser.add_argument(
        "--speculate", choices=KINDS, default="auto", help="several tokens at a time where the text repeats itself"
    )
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="default: that of the weights")
    parser.add_argument("--stats", action="store_true", help="tokens per second, of the prompt and of the new text")
    parser.add_argument("--json", action="store_true", help="print prompt, text and figures as JSON, at the end")


def run(args: argparse.Namespace) -> None:
    if args.chat and (args.json or args.prompt is not None):
        raise ValueError("--chat reads its prompts turn by turn; leave out --prompt and --json")
    folder = model_folder(args.model)
    tokens = find_tokens(args.tokenizer)[0] if args.tokenizer else read_tokens(Path(folder))
    model = load_model(folder, device=args.device, dtype=None if args.dtype is None else getattr(torch, args.dtype))
    if tokens.vocab_size > model.config.padded_vocab_size:
        raise ValueError(f"the tokenizer has {tokens.vocab_size} tokens, but the model knows {model.config.vocab_size}")
    if args.chat:
        chat(model, tokens, args)
        return
    prompt = sys.stdin.buffer.read() if args.prompt is None else args.prompt.encode()
    turn = Turn(model, tokens, args, start(tokens, model) + tokens.encode(prompt), None)
    text = "".join(turn.shown(sys.stdout if not args.json else None))
    if args.json:
        print(json.dumps({"prompt": prompt.decode(errors="replace"), "text": text, **turn.figures()}))
    else:
        print()
        if args.stats:
            print(turn.summary(), file=sys.stderr)


class Turn:
    """A prompt read and the text that follows it."""

    def __init__(self, model: LanguageModel, tokens: Tokens, args: argparse.Namespace, ids: list[int], cache: Any):
        if not ids:
            raise ValueError("the prompt is empty, and this model has no token to start from; give --prompt")
        self._tokens, self._prompt = tokens, len(ids)
        stops: list[Any] = [tokens.encode(text.encode()) for text in args.stop]
        if not args.keep_going and tokens.end < model.config.vocab_size:
            stops.append(tokens.end)
        began = time.perf_counter()
        self.stream = Stream(
            model,
            ids,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            stop=stops or None,
            seed=args.seed,
            cache=cache,
            speculate=args.speculate,
        )
        self._prefill = time.perf_counter() - began
        self._decode = 0.0

    def shown(self, file: Any) -> Iterator[str]:
        """The text piece by piece, written to `file` as it comes."""
        began = time.perf_counter()
        for piece in self._tokens.pieces(int(token_b[0]) for token_b in self.stream):
            if file is not None:
                file.write(piece)
                file.flush()
            yield piece
        self._decode = time.perf_counter() - began

    def figures(self) -> dict[str, float]:
        new = self.stream.tokens.shape[1]
        return {
            "prompt_tokens": self._prompt,
            "new_tokens": new,
            "prefill_tokens_per_second": self._prompt / max(self._prefill, 1e-9),
            "decode_tokens_per_second": new / max(self._decode, 1e-9),
        }

    def summary(self) -> str:
        figures = self.figures()
        return (
            f"prompt {figures['prompt_tokens']} tokens at {figures['prefill_tokens_per_second']:,.0f} tokens/s, "
            f"new {figures['new_tokens']} tokens at {figures['decode_tokens_per_second']:,.0f} tokens/s"
        )


def chat(model: LanguageModel, tokens: Tokens, args: argparse.Namespace) -> None:
    """Turn by turn until the input ends. The state of all turns before is what the next one starts from."""
    if sys.stdin.isatty():
        print("each line goes on from all before; an empty line or Ctrl-D ends", file=sys.stderr)
    ids, cache = start(tokens, model), None
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            break
        turn = Turn(model, tokens, args, ids + tokens.encode(line.encode()), cache)
        for _ in turn.shown(sys.stdout):
            pass
        print()
        if args.stats:
            print(turn.summary(), file=sys.stderr)
        ids, cache = [], turn.stream.cache


def start(tokens: Tokens, model: LanguageModel) -> list[int]:
    """What stands before a document, where the model knows it."""
    return [tokens.end] if tokens.end < model.config.vocab_size else []
