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
TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
BYTES = "bytes"
BESIDE = (CONFIG, "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
"""What else a folder says of a tokenizer: names of its tokens, how chats are written, where texts end."""
END = "<|endoftext|>"
MAX_VOCABULARY = 1 << 24
END_NAMES = (END, "</s>", "<eos>", "<|end_of_text|>", "[SEP]")

LEAST_KNOWN, MOST_KNOWN = 16, 64
"""Tokens before a new one that are decoded with it: more than one character takes, and so many at most."""


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


def certain(text: str) -> str:
    """Without what may be characters whose bytes have not all come. Some tokenizers show all bytes in a row so then."""
    return text.rstrip("\ufffd")


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
        """With the files by which transformers' `AutoTokenizer` and `pipeline` read bytes as this does."""
        _describe(directory, BYTES, self.end)
        files = {
            TOKENIZER: byte_tokenizer(self.end),
            CONFIG: {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END,
                "bos_token": END,
                "pad_token": END,
            },
            "generation_config.json": {f"{name}_token_id": self.end for name in ("bos", "eos", "pad")},
        }
        for name, values in files.items():
            (directory / name).write_text(json.dumps(values) + "\n", encoding="utf-8")


class TokenizerFile:
    """A `tokenizer.json`. Its end token is one with a usual name, or an id of its own after the last."""

    def __init__(self, path: Path, end: int | None = None):
        self.path = path
        self._tokenizer = _read_tokenizer(path)
        # Not their number: ids may have gaps.
        size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if size > MAX_VOCABULARY:
            raise ValueError(f"{path} has ids up to {size - 1:,}, and at most {MAX_VOCABULARY:,} are read")
        named = [end, *(self._tokenizer.token_to_id(name) for name in END_NAMES), size]
        self.end: int = next(i for i in named if i is not None)
        self.vocab_size: int = max(size, self.end + 1)

    def encode(self, text: bytes) -> list[int]:
        try:
            return self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids
        except UnicodeDecodeError as error:
            where = f"byte 0x{text[error.start]:02x} at {error.start}"
            raise ValueError(f"not UTF-8 ({where}); without a tokenizer, bytes are read as they are") from error
        except Exception as error:  # the package raises bare Exception
            raise ValueError(f"the tokenizer {self.path} does not take this text: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        try:
            return self._tokenizer.decode([i for i in ids if i != self.end], skip_special_tokens=False)
        except Exception as error:
            raise ValueError(f"the tokenizer {self.path} does not take these ids: {error}") from error

    def pieces(self, ids: Iterator[int]) -> Iterator[str]:
        # How a token is shown may depend on those before it, such as whether a space before it is: decode some of these
        # too, and show what is new. Not all of them, which would take ever longer.
        known: list[int] = []
        shown = text = ""
        for i in ids:
            known.append(i)
            text = self.decode(known)
            sure = certain(text)
            yield sure[len(shown) :]
            shown = max(shown, sure, key=len)
            if len(known) >= MOST_KNOWN and shown == text:
                known, text = self._end_of(known, text)
                shown = text
        yield text[len(shown) :]

    def _end_of(self, known: list[int], text: str) -> tuple[list[int], str]:
        """The last tokens and what they say, from the beginning of a character on; all, where none is found."""
        for count in range(LEAST_KNOWN, LEAST_KNOWN + 4):
            said = self.decode(known[-count:])
            if not said.startswith("\ufffd"):
                return known[-count:], said
        return known, text

    def save(self, directory: Path) -> None:
        shutil.copyfile(self.path, directory / TOKENIZER)
        _copy(self.path.parent, directory, BESIDE)
        _describe(directory, TOKENIZER, self.end)


def is_special(tokens: Tokens, text: str) -> bool:
    """Whether `text` is one token that stands for no text of its own."""
    if not isinstance(tokens, TokenizerFile):
        return False
    added = tokens._tokenizer.get_added_tokens_decoder().values()
    return any(one.content == text and one.special for one in added)


def byte_tokenizer(end: int) -> dict[str, Any]:
    """A `tokenizer.json` in which a token is a byte, whose id it is, and `end` is the end of a document.

    The package reads bytes as printable characters: those that are none stand from 256 on, in their order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: byte for byte in printable} | {byte: 256 + place for place, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": end, "content": END, **flags}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {chr(shown[byte]): byte for byte in range(256)}, "merges": []},
    }


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
    """Take along what a model's directory says of its text, if it does."""
    if source.resolve() == target.resolve():
        return
    if (
        (source / TEXT).is_file()
        and not (source / TOKENIZER).is_file()
        and _read_description(source / TEXT)[0] == BYTES
    ):
        Bytes().save(target)  # from before bytes had files for transformers
    _copy(source, target, (TEXT, TOKENIZER, *BESIDE))


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    for name in names:
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
