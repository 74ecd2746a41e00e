"""Run an unchanged script, or `-m MODULE`, with `mamba_ssm` and `causal_conv1d` on mambakit."""

import os
import runpy
import sys

from mambakit.compat.finder import ROOTS, install

USAGE = "usage: python -m mambakit.compat [--force] (SCRIPT | -m MODULE) ARGS..."


def main(arguments: list[str]) -> None:
    force = arguments[:1] == ["--force"]
    arguments = arguments[1:] if force else arguments
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{__doc__}\n\n{USAGE}\n\n--force also hides packages that are installed.")
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
    kept = [root for root in ROOTS if root not in install(force)]
    if kept:
        print(f"mambakit.compat: using the installed {' and '.join(kept)}; --force hides it", file=sys.stderr)
    sys.argv = arguments
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def stop(message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
