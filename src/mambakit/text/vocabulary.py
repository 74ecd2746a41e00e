"""A tokenizer learned from text: byte-level BPE of the `tokenizers` package."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mambakit.text.documents import Found
from mambakit.text.tokens import END

SMALLEST = 257
"""Every byte, and the end of a document."""


def texts(found: Found) -> Iterator[str]:
    """All documents and messages; ValueError names what is not UTF-8."""
    for name, content in found.documents:
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 (byte 0x{content[error.start]:02x} at {error.start})") from error
    for conversation in found.conversations:
        yield from (message.get("content") or "" for message in conversation.messages)


def learn(texts: Iterable[str], vocab_size: int) -> Any:
    """A `tokenizers.Tokenizer` of at most so many tokens, which writes any text and gives it back byte for byte.

    The same texts give the same tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST:
        raise ValueError(f"vocab_size = {vocab_size}, but {SMALLEST} are needed for all bytes and the end of a text")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def save(tokenizer: Any, path: Path) -> None:
    """Under its name when it is whole."""
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    fresh.replace(path)
