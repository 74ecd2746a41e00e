"""A tokenizer as Python calls it: text to ids and back, conversations to ids. See docs/generation.md, "Text"."""

import os
import re
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

from mambakit.arguments import encoded, find_path, shown
from mambakit.text.chat import Chat, read_chat
from mambakit.text.tokens import BYTES, TEXT, TOKENIZER, Tokens, read_tokens

MAX_ID = 1 << 31
PLACES = ("", "model", "adapter")
"""Where in a folder a tokenizer may be: in itself, or in what a training run made."""


class Tokenizer:
    """`encode` and `decode` text; `apply_chat_template` writes conversations as the model's template does.

    Examples:
        >>> tokenizer = mk.load_tokenizer("bytes")
        >>> tokenizer.decode(tokenizer.encode("Hi"))
        'Hi'
    """

    def __init__(self, tokens: Tokens, chat: Chat):
        self.tokens, self.chat = tokens, chat

    @property
    def vocab_size(self) -> int:
        return self.tokens.vocab_size

    @property
    def end(self) -> int:
        """The id that ends a document."""
        return self.tokens.end

    def encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"encode takes a str, got a {type(text).__name__}")
        return self.tokens.encode(encoded("text", text))

    def decode(self, ids: Sequence[int]) -> str:
        """Of a list or a tensor with one axis; the end token is left out."""
        given: Any = ids
        try:
            numbers = [index(one) for one in (given.tolist() if hasattr(given, "tolist") else given)]
        except Exception as error:  # of a list of something else, or a tensor without numbers
            raise ValueError(f"ids is {shown(ids)}, expected a list or a tensor with one axis of token ids") from error
        if not all(0 <= one < MAX_ID for one in numbers):
            raise ValueError(f"ids holds {shown(min(numbers))} to {shown(max(numbers))}, which are no token ids")
        return self.tokens.decode(numbers)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, by default up to where the assistant is to answer.

        Without a template every message is a line `role: content`.
        """
        return self.chat.encode(self.chat.text(messages, add_generation_prompt))


def load_tokenizer(path_or_hub_name: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a file, in a folder of a model or a training run, or on the hub; `"bytes"` has no file.

    tokenizer = mk.load_tokenizer("run")
    assert tokenizer.decode(tokenizer.encode("text")) == "text"

    Examples:
        >>> mk.load_tokenizer("bytes").encode("Hi")
        [72, 105]
    """
    tokens, folder = find_tokens(path_or_hub_name)
    return Tokenizer(tokens, read_chat(folder, tokens, tokens.vocab_size))


def find_tokens(path_or_hub_name: str | os.PathLike[str]) -> tuple[Tokens, Path]:
    """And the folder that may say more of it."""
    path = find_path("path_or_hub_name", path_or_hub_name)
    if path_or_hub_name == BYTES or path.is_file():
        return read_tokens(path.parent, str(path)), path.parent if path.is_file() else Path(os.devnull)
    if not path.is_dir():
        path = _download(str(path_or_hub_name))
    places = [path / place for place in PLACES]
    described = (place for place in places if any((place / name).is_file() for name in (TEXT, TOKENIZER)))
    place = next(described, path)
    return read_tokens(place), place


def _download(name: str) -> Path:
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ValueError(f"there is no file or folder {name}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(
            f"there is no file or folder {name}; to get it from the hub, pip install huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja"]))
    except Exception as error:  # the hub's client raises its own and its transport's
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"there is no file or folder {name}, and the hub did not give it: {reason}") from error
