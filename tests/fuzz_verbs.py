"""Calls of the command line with one or two options made wrong: it ends well, or with exit code 2 and one line."""

import argparse
import contextlib
import importlib
import io
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

import mambakit as mk
from blocks import CONFIGS
from mambakit.cli.main import VERBS, main
from mambakit.text.tokens import Bytes

WORDS = ("", "x", "-1", "0", "1", "1.5", "nan", "inf", "-inf", "1e400", "9" * 30, "é\n\x1b[31m", "\0", "a" * 5000, "{}")
WORDS += (
    "/",
    ".",
    "..",
    "/dev/null",
    "\ud800",
    "--",
    "bytes",
    "auto",
    "None",
    "1,2",
    "2*(M2 A+F)",
    "16",
    "8",
    "nowhere",
)
ENDLESS = {"--steps", "--max-new-tokens", "--count", "--vocab-size"}
"""Large numbers are right there, and take their time."""
NEVER = {"--help", "--resume", "--device", "--compile", "--parallel", "--context-parallel", "--tensorboard", "--wandb"}
SMALL = ("--steps=1", "--d-model=16", "--head-dim=8", "--layers=1", "--batch=1", "--seq-len=8")
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("{model}", "--prompt=a", "--max-new-tokens=2"),
    "convert": ("{model}", "{out}"),
    "quantize": ("{model}", "{out}"),
    "export": ("{model}", "{out}.gguf"),
    "train": ("{text}", "--out={out}", *SMALL),
    "tokenizer": ("{text}", "--out={out}", "--vocab-size=270"),
}
"""Such as work."""


@cache
def options_of(verb: str) -> list[str]:
    """Those that take a value."""
    parser = argparse.ArgumentParser()
    module: Any = importlib.import_module(next(entry.module for entry in VERBS if entry.name == verb))
    module.add_arguments(parser)
    takes = [action for action in parser._actions if action.option_strings and action.nargs != 0]
    return [name for name in (action.option_strings[-1] for action in takes) if name not in NEVER]


@cache
def sources() -> Path:
    folder = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    mk.save_model(
        mk.LanguageModel(mk.ModelConfig(block=CONFIGS["mamba2"], n_layer=1, vocab_size=257)), folder / "model"
    )
    Bytes().save(folder / "model")
    (folder / "text").write_text("some text and some more of it. " * 40)
    return folder


def typed(draw: random.Random) -> dict[str, Any]:
    verb = draw.choice(list(COMMANDS))
    words = list(COMMANDS[verb])
    for _ in range(draw.choice((0, 1, 1, 2))):
        name, value = draw.choice(options_of(verb)), draw.choice(WORDS)
        if name not in ENDLESS or not value.isdigit() or len(value) < 20:
            words.append(f"{name}={value}")
    if draw.random() < 0.1:
        words[draw.randrange(len(words))] = draw.choice(WORDS)
    return {"verb": verb, "words": words}


def command(verb: str, words: list[str]) -> None:
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        named = {"model": sources() / "model", "text": sources() / "text", "out": Path(folder) / "out"}
        for name, path in named.items():
            words = [word.replace(f"{{{name}}}", str(path)) for word in words]
        # A program of its own computes gradients.
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), torch.enable_grad():
            try:
                code = main([verb, *words])
            except SystemExit as ended:  # argparse says what is wrong with a word
                if ended.code == 2:
                    return
                raise RuntimeError(f"exit code {ended.code}") from ended
    lines = said.getvalue().splitlines()
    last = lines[-1] if lines else ""
    assert code == 0 or (code == 2 and last.startswith(f"mambakit {verb}: ") and "Traceback" not in said.getvalue()), (
        code,
        lines[-3:],
    )
