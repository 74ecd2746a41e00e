"""How `import mamba_ssm` finds the modules of the same names in this package."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HOME = "mambakit.compat"
ROOTS = ("mamba_ssm", "causal_conv1d")


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
    def __init__(self) -> None:
        self.roots: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if root_of(fullname) not in self.roots:
            return None
        own = importlib.util.find_spec(f"{HOME}.{fullname}")
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

    `force=True` takes the place of an installed one too, except where it is already imported by name. Returns the names
    that are mambakit's. Calling it again changes nothing.
    """
    finder = next((f for f in sys.meta_path if isinstance(f, CompatFinder)), None)
    if finder is None:
        finder = CompatFinder()
        # First, or Python would find our packages' files by their folders and load them a second time.
        sys.meta_path.insert(0, finder)
    for root in ROOTS:
        if root not in finder.roots and (force or not is_installed(root)):
            forget(root)
            finder.roots.add(root)
    return tuple(root for root in ROOTS if root in finder.roots)


def uninstall() -> None:
    """Undo `install`. What was imported in between stays with who imported it."""
    for finder in [f for f in sys.meta_path if isinstance(f, CompatFinder)]:
        sys.meta_path.remove(finder)
        for root in finder.roots:
            forget(root)


def is_installed(root: str) -> bool:
    """Whether another package of this name is imported or can be."""
    if sys.modules.get(root) is not None:
        return True
    for finder in sys.meta_path:
        if isinstance(finder, CompatFinder):
            continue
        spec = finder.find_spec(root, None)
        # Without an origin it is just a folder of that name, as a checkout of the sources may have.
        if spec is not None and spec.origin is not None:
            return True
    return False


def forget(root: str) -> None:
    for name in [name for name in sys.modules if root_of(name) == root]:
        del sys.modules[name]


def root_of(name: str) -> str:
    return name.partition(".")[0]
