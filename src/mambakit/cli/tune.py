"""`mambakit tune`: the tiles of GPU kernels timed on this machine's devices, and the fastest kept."""

import argparse

from mambakit.ops.backends import BACKENDS
from mambakit.tools.measure import table

EXAMPLE = "mambakit tune"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> None:
    rows = []
    for backend in BACKENDS.values():
        if backend.tune is not None:
            reason = backend.why_missing()
            if reason is not None:
                raise ValueError(f'backend "{backend.name}" cannot be tuned: {reason}')
            rows += backend.tune()
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]) if rows else "nothing to tune")
