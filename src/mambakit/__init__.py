"""mambakit: Mamba-1, Mamba-2 and Mamba-3 state-space models for PyTorch, on any device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mambakit.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """The public names and the parts, all imported when the first one is asked for.

    `mambakit --help` and whoever imports this package without using it do not wait for torch.
    """
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = import_module("mambakit.public")
    globals().update({known: getattr(public, known) for known in ("__all__", *public.__all__)})
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("mambakit.public").__all__})
