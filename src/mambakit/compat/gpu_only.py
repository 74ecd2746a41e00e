"""Official names that can be imported but have nothing behind them here: kernels, and what belongs to them."""

from collections.abc import Callable
from typing import Any

KERNEL = "it is a kernel for a GPU, whose arguments are pointers and strides"


class GpuOnly:
    """Raises when it is called, or launched with a grid as kernels are."""

    def __init__(self, name: str, reason: str):
        self.__name__ = self.__qualname__ = name
        self.reason = reason

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} does not run in mambakit.compat: {self.reason}")

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return f"<{self.__name__}, not available: {self.reason}>"


def gpu_only(module: str, **names_by_reason: str) -> Callable[[str], Any]:
    """A module's `__getattr__` with names, separated by blanks, that raise for the reason among `REASONS`."""
    found = {
        name: GpuOnly(f"{module.removeprefix('mambakit.compat.')}.{name}", REASONS[reason])
        for reason, names in names_by_reason.items()
        for name in names.split()
    }

    def attribute(name: str) -> Any:
        if name in found:
            return found[name]
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return attribute


REASONS = {
    "kernels": KERNEL,
    "triton": "it is code for Triton's compiler, to be called inside of kernels",
    "tiles": "it divides the work of a kernel, and there is none",
    "partial": "it is one step of what the official kernels compute; call the whole function and let autograd compute "
    "gradients",
    "unfinished": "the official function is unfinished or not to be used, and says so",
    "graphs": "it captures CUDA graphs, which only a GPU has; generate and decode run without",
    "operators": "it registers an operator of torch for the extension; call the function that ends in _function",
    "shared": "mambakit does not split embeddings over several processes; mambakit's own training shards whole models",
    "tests": "it is a test or benchmark of the official kernels",
}
