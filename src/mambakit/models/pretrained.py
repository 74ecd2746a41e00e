"""A model's ways to disk and to the hub, as methods; the parts above models say how."""

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from mambakit.models.language_model import LanguageModel

WAYS: dict[str, Callable[..., Any]] = {}
"""By the names of the methods. Who knows one puts it here."""


def way(name: str) -> Callable[..., Any]:
    if name not in WAYS:
        importlib.import_module("mambakit").__getattr__("load_model")
    return WAYS[name]


class Pretrained(nn.Module):
    """What a model has from here."""

    @staticmethod
    def from_pretrained(path_or_hub_name: str | os.PathLike[str], **options: Any) -> "LanguageModel":
        """`mk.load_model`: from a folder or the hub, safetensors and JSON; `revision=` pins a version of the hub's."""
        return way("from_pretrained")(path_or_hub_name, **options)

    def save_pretrained(self, directory: str | os.PathLike[str], **options: Any) -> None:
        """`mk.save_model`: a folder that `from_pretrained` reads."""
        way("save_pretrained")(self, directory, **options)

    def push_to_hub(self, name: str, **options: Any) -> str:
        """`mk.push_to_hub`: to the hub under a name like `owner/model`, with a card. Returns its address."""
        return way("push_to_hub")(self, name, **options)
