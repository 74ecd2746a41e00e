"""Run an unchanged script, or `-m MODULE`, with `mamba_ssm` and `causal_conv1d` on mambakit."""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import takewhile

from mambakit.compat.finder import ROOTS, install
from mambakit.compat.on_cpu import cuda_on_cpu

USAGE = "usage: python -m mambakit.compat [--force] [--cpu] (SCRIPT | -m MODULE) ARGS..."
HELP = """--force also hides packages that are installed.
--cpu gives the CPU to what asks for a GPU, and says at the end what that was."""


def main(arguments: list[str]) -> None:
    flags = list(takewhile(lambda argument: argument in ("--force", "--cpu"), arguments))
    arguments = arguments[len(flags) :]
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{__doc__}\n\n{USAGE}\n\n{HELP}")
        return
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[1:] if is_module else arguments
    if not arguments:
        stop(USAGE)
    target = arguments[0]
    if not is_module and not os.path.exists(target):
        stop(f"there is no script {target}\n{USAGE}")
    if not is_module:
        # As Python itself has it: the script's folder instead of the current one.
        sys.path[0] = os.path.dirname(os.path.abspath(target))
    kept = [root for root in ROOTS if root not in install("--force" in flags)]
    if kept:
        print(f"mambakit.compat: using the installed {' and '.join(kept)}; --force hides it", file=sys.stderr)
    sys.argv = arguments
    with reported() if "--cpu" in flags else nullcontext():
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")


@contextmanager
def reported() -> Iterator[None]:
    """Without a GPU, and with what was redirected on stderr, each once, however it ends."""
    seen: list[str] = []
    try:
        with cuda_on_cpu() as seen:
            yield
    finally:
        found = ", ".join(seen) if seen else "nothing asked for a GPU"
        print(f"mambakit.compat: redirected to the CPU: {found}", file=sys.stderr)


def stop(message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
