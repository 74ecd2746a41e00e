"""How `import mamba_ssm` finds the modules of the same names in this package."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

HOME = "mambakit.compat"
ROOTS = ("mamba_ssm", "causal_conv1d")
EXTENSIONS = {
    name: f"{HOME}.extensions.{name}"
    for name in (
        "causal_conv1d_cuda",
        "selective_scan_cuda",
        "selective_scan_cuda_core",
        "selective_scan_cuda_ndstate",
        "selective_scan_cuda_nrow",
        "selective_scan_cuda_oflex",
        "selective_scan_cuda_oflex_rh",
    )
}
"""Compiled extensions, taken wherever there is no such module."""
TRITON = "ops.triton."
# As it is now: `--cpu` lets it say yes.
has_gpu = torch.cuda.is_available
NOW = "GenerateDecoderOnlyOutput"
GONE = ("GreedySearchDecoderOnlyOutput", "SampleDecoderOnlyOutput")
"""What `utils.generation` of older copies imports from transformers, which has one class for all ways now."""


class Alias(Loader):
    """Gives a module of ours under its official name: one module, two names."""

    def __init__(self, own: ModuleSpec) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self.own.name)

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just put the alias's spec in its place.
        module.__spec__ = self.own


class CompatFinder(MetaPathFinder):
    """Asked at every import, so that a package which comes to lie on the path later is not hidden either."""

    def __init__(self) -> None:
        self.forced = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root = root_of(fullname)
        if root == root_of(HOME):
            return None
        if fullname in EXTENSIONS:
            return None if is_installed(fullname) else alias(fullname, EXTENSIONS[fullname])
        if fullname in ROOTS:
            return alias(fullname, f"{HOME}.{fullname}") if self.forced or not is_installed(fullname) else None
        if root in ROOTS and is_own(sys.modules.get(root)):
            return alias(fullname, f"{HOME}.{fullname}")
        if TRITON in fullname and is_copy(fullname, path) and not runs_triton():
            own = f"{HOME}.mamba_ssm.{TRITON}{fullname.rpartition(TRITON)[2]}"
            return alias(fullname, own) if exists(own) else None
        if fullname.endswith("mamba_ssm.utils.generation"):
            restore_names()
        return None


def alias(fullname: str, own_name: str) -> ModuleSpec:
    own = importlib.util.find_spec(own_name) if exists(own_name) else None
    if own is None:
        raise ModuleNotFoundError(
            f"{fullname} is not covered by mambakit.compat, which stands in for {root_of(fullname)} here; "
            "docs/compat.md lists what is",
            name=fullname,
        )
    is_package = own.submodule_search_locations is not None
    return ModuleSpec(fullname, Alias(own), origin=own.origin, is_package=is_package)


def install(force: bool = False) -> tuple[str, ...]:
    """Let `mamba_ssm` and `causal_conv1d` be mambakit's from now on, each only if it is not installed.

    `force=True` takes the place of installed ones too, except where they are already imported by name. Returns the
    names that are mambakit's. Calling it again changes nothing. Where another package of the name is on the path, what
    in it needs a GPU is filled in: the compiled extensions, and without a GPU its modules of Triton kernels.
    """
    finder = next((f for f in sys.meta_path if isinstance(f, CompatFinder)), None)
    if finder is None:
        finder = CompatFinder()
        # First, or Python would find our packages' files by their folders and load them a second time.
        sys.meta_path.insert(0, finder)
    if force and not finder.forced:
        finder.forced = True
        for root in ROOTS:
            forget(root)
    return tuple(root for root in ROOTS if finder.forced or not is_installed(root))


def uninstall() -> None:
    """Undo `install`. What was imported in between stays with who imported it."""
    finders = [f for f in sys.meta_path if isinstance(f, CompatFinder)]
    for finder in finders:
        sys.meta_path.remove(finder)
    if finders:
        for name in [n for n, module in sys.modules.items() if root_of(n) != root_of(HOME) and is_own(module)]:
            del sys.modules[name]
        generation = vars(sys.modules.get("transformers.generation", ModuleType("none")))
        for name in GONE:
            if name in generation and generation[name].__name__ != name:
                del generation[name]


def is_installed(root: str) -> bool:
    """Whether another package of this name is imported or can be."""
    if sys.modules.get(root) is not None and not is_own(sys.modules[root]):
        return True
    for finder in sys.meta_path:
        if isinstance(finder, CompatFinder):
            continue
        spec = finder.find_spec(root, None)
        # Without an origin it is just a folder of that name, as a checkout of the sources may have.
        if spec is not None and spec.origin is not None:
            return True
    return False


def is_own(module: ModuleType | None) -> bool:
    return module is not None and getattr(module, "__name__", "").startswith(f"{HOME}.")


def is_copy(fullname: str, path: Sequence[str] | None) -> bool:
    """Whether this is part of a copy of mamba_ssm, not of another package with kernels of its own."""
    beside = (Path(folder).parent / "selective_scan_interface.py" for folder in path or ())
    return "mamba" in fullname.partition(TRITON)[0].lower() or any(file.exists() for file in beside)


def runs_triton() -> bool:
    return has_gpu() or os.environ.get("TRITON_INTERPRET") == "1"


def restore_names() -> None:
    """Let a copy's `utils.generation` import names that transformers has dropped."""
    try:
        from transformers import generation
    except ImportError:
        return
    for name in GONE:
        if not hasattr(generation, name):
            setattr(generation, name, getattr(generation, NOW))


def exists(own_name: str) -> bool:
    """Whether there is such a module of ours; its parents may not be packages."""
    try:
        return importlib.util.find_spec(own_name) is not None
    except ModuleNotFoundError:
        return False


def forget(root: str) -> None:
    for name in [name for name in sys.modules if root_of(name) == root]:
        del sys.modules[name]


def root_of(name: str) -> str:
    return name.partition(".")[0]
