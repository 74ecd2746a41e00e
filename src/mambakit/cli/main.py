"""`mambakit VERB ...`: one module per verb, imported when its verb is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

VERBS = {
    "train": "train a language model on files or folders",
    "tokenizer": "learn a vocabulary from files or folders",
    "generate": "stream text from a checkpoint",
    "chat": "talk with a model in the terminal",
    "serve": "answer OpenAI's clients and a web page",
    "demo": "train a small Mamba-3 in minutes and compare it with compressors",
    "experiment": "reproduce results: state tracking, recall, digits",
    "bench": "time and memory beside this machine's limits",
    "doctor": "what is installed, what is used, and whether its numbers are right",
    "convert": "change the format of a checkpoint",
}


class Verb(Protocol):
    """What a verb's module holds: `mambakit/cli/VERB.py`."""

    EXAMPLE: str
    """A command that works, for the end of `--help`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> None:
        """Do it. `ValueError`, `OSError` and `ImportError` are what a caller can mend: one line and exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mambakit", description="Mamba-1, Mamba-2 and Mamba-3 on any device.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen: Verb | None = None
    for name, help in VERBS.items():
        verb = verbs.add_parser(
            name, help=help, description=help, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        # Only the verb asked for is imported: `mambakit --help` needs no torch.
        if argv[:1] == [name]:
            chosen = cast(Verb, importlib.import_module(f"mambakit.cli.{name}"))
            verb.epilog = f"example:\n  {chosen.EXAMPLE}"
            chosen.add_arguments(verb)
    args = parser.parse_args(argv)
    assert chosen is not None, "argparse lets only known verbs pass"
    try:
        chosen.run(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"mambakit {args.verb}: {one_line(str(error))}", file=sys.stderr)
        return 2
    return 0


def one_line(text: str) -> str:
    """Whatever a file made an error say: no line breaks, and nothing that a terminal would obey."""
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


if __name__ == "__main__":
    sys.exit(main())
