"""For processes that are to find no Triton, installed or not."""

import importlib.metadata
import sys

sys.modules["triton"] = None  # type: ignore[assignment]  # what Python takes for "not there"
version = importlib.metadata.version


def without_triton(name: str) -> str:
    if name == "triton":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)


importlib.metadata.version = without_triton
