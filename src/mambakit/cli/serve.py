"""`mambakit serve MODEL`."""

import argparse
import os
from pathlib import Path

from mambakit.cli.convert import model_folder
from mambakit.inference.speculation import KINDS
from mambakit.optional import need
from mambakit.serving import loading

EXAMPLE = "mambakit serve run/model --port 8000 --sessions sessions"
KEY = "MAMBAKIT_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    parser.add_argument("--port", type=int, default=8000, help="0 takes one that is free; default: 8000")
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help=f"may be repeated; default: ${KEY}, or none"
    )
    parser.add_argument("--sessions", metavar="DIR", help="keep responses and their states here; default: in memory")
    parser.add_argument(
        "--max-session-bytes", type=int, metavar="N", help="of kept states, the oldest go first; default: no limit"
    )
    parser.add_argument("--max-waiting", type=int, default=256, metavar="N", help="more get 429; default: 256")
    parser.add_argument(
        "--max-body", type=int, default=10_000_000, metavar="BYTES", help="larger get 413; default: 10 MB"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=4096, metavar="N", help="of an answer that names no limit; default: 4096"
    )
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="an answer ends then; default: 600")
    parser.add_argument(
        "--grace", type=float, default=30, metavar="S", help="for running answers at the end; default: 30"
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, or a run's")
    parser.add_argument("--tokenizer", metavar="FILE", help='a tokenizer.json, or "bytes"; default: the model\'s own')
    parser.add_argument("--max-rows", type=int, default=64, metavar="N", help="answers at a time; default: 64")
    parser.add_argument("--quantize", type=int, choices=(8, 4), help="weights in so many bits")
    parser.add_argument(
        "--speculate",
        choices=KINDS,
        default="auto",
        help="several tokens at a time where a text repeats itself, while one answer is alone; default: auto",
    )


def load(args: argparse.Namespace) -> loading.Loaded:
    """The model that is named, how it is talked to, and an engine for it."""
    folder = Path(model_folder(args.model))
    return loading.load(
        folder, tokenizer=args.tokenizer, bits=args.quantize, max_rows=args.max_rows, speculate=args.speculate
    )


def run(args: argparse.Namespace) -> None:
    for name in ("max_waiting", "max_body", "max_tokens", "max_session_bytes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1")
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port is {args.port}, expected 0 to 65535")
    if not (args.timeout > 0 and args.grace >= 0):
        raise ValueError(f"--timeout is {args.timeout:g} and --grace {args.grace:g}, expected seconds")
    keys = args.api_key or [key for key in [os.environ.get(KEY)] if key]
    if not all(key.strip() for key in keys):
        raise ValueError("--api-key is empty; leave it out to take requests without one")
    need("serving", "starlette", "uvicorn", "prometheus_client")
    from mambakit.serving.server import serve
    from mambakit.serving.service import Limits

    limits = Limits(
        max_body=args.max_body,
        max_waiting=args.max_waiting,
        max_tokens=args.max_tokens,
        seconds=args.timeout,
        grace=args.grace,
    )
    sessions = None if args.sessions is None else Path(args.sessions)
    service = loading.make_service(
        model_name(args.model), load(args), limits, sessions=sessions, max_session_bytes=args.max_session_bytes
    )
    serve(
        service,
        args.host,
        args.port,
        keys=keys,
        ready=lambda address: print(f"{service.name} at {address}", flush=True),
    )


def model_name(given: str) -> str:
    """What clients call it: the folder's name, or of a run's model the run's."""
    path = Path(given).resolve()
    return path.parent.name if path.name == "model" else path.name
