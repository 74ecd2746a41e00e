"""Packages that only some of mambakit needs: extras in pyproject.toml, imported where they are used."""

import importlib
import importlib.util
from typing import Any

CALLED = {"sklearn": "scikit-learn", "prometheus_client": "prometheus-client", "ray": "'ray[serve]'"}
"""Where a package is installed by another name than it is imported by."""


class MissingPackageError(ImportError, ValueError):
    """What was asked for needs a package that is not installed; the message says how to get it."""


def need(what: str, *modules: str) -> Any:
    """The first of `modules`, once all are found; `MissingPackageError` says that `what` needs them.

    It names the packages themselves: that command works beside a clone as well as beside a wheel.
    """
    missing = [name for name in dict.fromkeys(module.split(".")[0] for module in modules) if not has(name)]
    if missing:
        packages = [CALLED.get(name, name) for name in missing]
        raise MissingPackageError(f"{what} needs {' and '.join(packages)}: pip install {' '.join(packages)}")
    return importlib.import_module(modules[0])


def has(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # in sys.modules, but without a spec: a stand-in, or None to hide it
        return False
