"""`mambakit VERB ...`: one module per verb, imported when its verb is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol, cast

from mambakit import __version__
from mambakit.cli.errors import say


class Entry(NamedTuple):
    """A verb of the command line."""

    name: str
    help: str
    """One line, for `mambakit --help` and `mambakit VERB --help`."""

    module: str
    """Where it is done: a module as `Verb` says, imported when the verb is called."""


VERBS = (
    Entry("train", "train a language model on files or folders", "mambakit.cli.train"),
    Entry("tokenizer", "learn a vocabulary from files or folders", "mambakit.cli.tokenizer"),
    Entry("generate", "stream text from a checkpoint", "mambakit.cli.generate"),
    Entry("chat", "talk with a model in the terminal", "mambakit.cli.chat"),
    Entry("serve", "answer OpenAI's clients and a web page", "mambakit.cli.serve"),
    Entry("demo", "train a small Mamba-3 in minutes and compare it with compressors", "mambakit.cli.demo"),
    Entry("experiment", "reproduce results: state tracking, recall, digits", "mambakit.cli.experiment"),
    Entry("bench", "time and memory beside this machine's limits", "mambakit.cli.bench"),
    Entry("doctor", "what is installed, what is used, and whether its numbers are right", "mambakit.cli.doctor"),
    Entry("tune", "time the tiles of GPU kernels on this machine and keep the fastest", "mambakit.cli.tune"),
    Entry("convert", "change the format of a checkpoint", "mambakit.cli.convert"),
    Entry("quantize", "a checkpoint with weights in 8 or 4 bits", "mambakit.cli.quantize"),
    Entry("export", "files for llama.cpp, ONNX runtimes or AOTInductor", "mambakit.cli.export"),
    Entry("push", "publish a model on the hub, with a card", "mambakit.cli.push"),
)


OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "Storage size calculation overflowed")
"""What torch says in a RuntimeError for sizes that no machine, or not this one, has room for."""


class Verb(Protocol):
    """What a verb's module holds."""

    EXAMPLE: str
    """A command that works, for the end of `--help`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> None:
        """Do it. `ValueError`, `OSError` and `ImportError` are what a caller can mend: one line and exit code 2.

        So is a model that needs more memory than there is.
        """


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    entry = next((entry for entry in VERBS if argv[:1] == [entry.name]), None)
    try:
        # Only the verb asked for is imported: `mambakit --help` needs no torch.
        verb = None if entry is None else cast(Verb, importlib.import_module(entry.module))
        args = parse(argv, entry, verb)
        assert verb is not None, "argparse lets only known verbs pass"
        verb.run(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in OUT_OF_MEMORY):
            raise
        say("mambakit" if entry is None else f"mambakit {entry.name}", error)
        return 2
    return 0


def parse(argv: Sequence[str], entry: Entry | None, verb: Verb | None) -> argparse.Namespace:
    """The arguments of the verb asked for, or the end of the program: help, the version, or what is wrong."""
    parser = argparse.ArgumentParser(prog="mambakit", description="Mamba-1, Mamba-2 and Mamba-3 on any device.")
    parser.add_argument("--version", action="version", version=f"mambakit {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for each in VERBS:
        options = verbs.add_parser(
            each.name,
            help=each.help,
            description=each.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if each is entry and verb is not None:
            options.epilog = f"example:\n  {verb.EXAMPLE}"
            verb.add_arguments(options)
    for word in takewhile(lambda word: word != "--", argv):
        if word.startswith("--") and word.endswith("=--"):  # argparse would make an empty list of it
            raise ValueError(f"{word}: two dashes by themselves are no value; they end the options")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
