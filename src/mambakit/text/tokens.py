"""Text to token ids and back: bytes by default, a file of the `tokenizers` package where one is given."""

import codecs
import json
import reprlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

TEXT = "text.json"
"""Beside the weights, it says how the model's text is written in tokens."""
TOKENIZER = "tokenizer.json"
DESCRIPTION = (TEXT, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
DESCRIPTION += ("generation_config.json",)
"""All files that say how a model's text is written."""
BYTES = "bytes"
END_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")


class Tokens(Protocol):
    """How text is written in token ids."""

    vocab_size: int
    end: int
    """Stands before every document and so also says where one ends."""

    def encode(self, text: bytes) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def pieces(self, ids: Iterator[int]) -> Iterator[str]:
        """What each id adds to the text, as far as it is certain; together they are `decode` of all."""
        ...

    def save(self, directory: Path) -> None: ...


class Bytes:
    """A token is a byte; one more id is the end of a document."""

    vocab_size = 257
    end = 256

    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def pieces(self, ids: Iterator[int]) -> Iterator[str]:
        # A character's bytes come one by one: shown when the last of them is there.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for i in ids:
            yield decoder.decode(bytes([i]) if i < 256 else b"")
        yield decoder.decode(b"", final=True)

    def save(self, directory: Path) -> None:
        _describe(directory, BYTES, self.end)


class TokenizerFile:
    """A `tokenizer.json`. Its end token is one with a usual name, or an id of its own after the last."""

    def __init__(self, path: Path, end: int | None = None):
        self.path = path
        self._tokenizer = _read_tokenizer(path)
        # Not their number: ids may have gaps.
        size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        named = [end, *(self._tokenizer.token_to_id(name) for name in END_NAMES), size]
        self.end: int = next(i for i in named if i is not None)
        self.vocab_size: int = max(size, self.end + 1)

    def encode(self, text: bytes) -> list[int]:
        try:
            return self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids
        except UnicodeDecodeError as error:
            where = f"byte 0x{text[error.start]:02x} at {error.start}"
            raise ValueError(f"not UTF-8 ({where}); without a tokenizer, bytes are read as they are") from error

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i != self.end], skip_special_tokens=False)

    def pieces(self, ids: Iterator[int]) -> Iterator[str]:
        # How a token is shown may depend on those before it: decode all since the last line, show what is new.
        known: list[int] = []
        shown = ""
        for i in ids:
            known.append(i)
            text = self.decode(known)
            if text.endswith("�"):  # part of a character
                yield ""
                continue
            yield text[len(shown) :]
            shown = text
            if text.endswith("\n"):
                known, shown = [], ""
        yield self.decode(known)[len(shown) :]

    def save(self, directory: Path) -> None:
        shutil.copyfile(self.path, directory / TOKENIZER)
        _describe(directory, TOKENIZER, self.end)


def read_tokens(model_dir: Path, chosen: str | None = None) -> Tokens:
    """What a model's directory says of its text. `chosen` is `"bytes"` or a tokenizer file, and comes first."""
    if chosen is not None:
        return Bytes() if chosen == BYTES else TokenizerFile(Path(chosen))
    described = model_dir / TEXT
    if described.is_file():
        kind, end = _read_description(described)
        return Bytes() if kind == BYTES else TokenizerFile(model_dir / TOKENIZER, end)
    if (model_dir / TOKENIZER).is_file():
        return TokenizerFile(model_dir / TOKENIZER)
    raise ValueError(
        f"{model_dir} does not say how its text is written in tokens: no {TEXT} and no {TOKENIZER}; "
        "give --tokenizer FILE, or --tokenizer bytes"
    )


def _describe(directory: Path, tokens: str, end: int) -> None:
    (directory / TEXT).write_text(json.dumps({"tokens": tokens, "end": end}) + "\n", encoding="utf-8")


def _read_description(path: Path) -> tuple[str, int]:
    """What `_describe` wrote."""
    try:
        values = json.loads(path.read_bytes())
        tokens, end = values["tokens"], values["end"]
    except (ValueError, LookupError, TypeError, RecursionError, OSError) as error:
        raise ValueError(f'{path} is not {{"tokens": ..., "end": ...}} in JSON: {error}') from error
    if tokens not in (BYTES, TOKENIZER) or type(end) is not int or not 0 <= end < 2**31:
        expected = f'tokens: "{BYTES}" or "{TOKENIZER}", end: a token id'
        raise ValueError(f"{path} has tokens: {reprlib.repr(tokens)}, end: {reprlib.repr(end)}; expected {expected}")
    return tokens, end


def _read_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise ValueError(f"there is no tokenizer file {path}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"{path} is not a file of the tokenizers package: {error}") from error


def describes_text(model_dir: Path) -> bool:
    return (model_dir / TEXT).is_file() or (model_dir / TOKENIZER).is_file()


def copy_description(source: Path, target: Path) -> None:
    """Take along what a model's directory says of its text and of conversations, if it does."""
    for name in DESCRIPTION:
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
