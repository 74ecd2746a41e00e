"""Text in, text out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mambakit.arguments import check_kind, encoded
from mambakit.inference.generation import Stream
from mambakit.models.language_model import LanguageModel, check_language_model
from mambakit.text.tokenizer import Tokenizer

MAX_NEW_TOKENS = 256


def generate_text(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]], **options: Any
) -> str:
    """What follows a prompt, without it, up to the end of the document.

    A list of messages is a conversation, which the assistant answers. `options` are those of `mk.generate`;
    `max_new_tokens` is 256 unless given, and `stop` may hold texts, with which the result then ends.

        model, tokenizer = mk.load_model("run"), mk.load_tokenizer("run")
        mk.generate_text(model, tokenizer, "Once ", max_new_tokens=50, temperature=0.8)

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=257))
        >>> text = mk.generate_text(model, mk.load_tokenizer("bytes"), "Once upon", max_new_tokens=20, seed=1)
    """
    return "".join(stream_text(model, tokenizer, prompt, **options))


def stream_text(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]], **options: Any
) -> Iterator[str]:
    """`generate_text` piece by piece, as tokens come.

    for piece in mk.stream_text(model, tokenizer, "Once "):
        print(piece, end="", flush=True)

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=257))
        >>> pieces = mk.stream_text(model, mk.load_tokenizer("bytes"), "Once upon", max_new_tokens=20, seed=1)
        >>> text = "".join(pieces)
    """
    check_language_model(model)
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}; load_tokenizer gives one")
    if tokenizer.vocab_size > model.config.padded_vocab_size and tokenizer.end >= model.config.vocab_size:
        known = model.config.vocab_size
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, but the model knows {known}")
    tokens, chat = tokenizer.tokens, tokenizer.chat
    given = options.pop("stop", None)
    given = [] if given is None else [given] if isinstance(given, str | int) else given
    check_kind("stop", given, Sequence, "an id, a text, or a list of these and of sequences of ids")
    stops = [tokens.encode(encoded("stop", stop)) if isinstance(stop, str) else stop for stop in given]
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt) or [tokens.end]
        ends = {tokens.end}
    else:
        ids = tokenizer.apply_chat_template(prompt)
        ends = {tokens.end, *chat.stop_ids}
    ends = {end for end in ends if end < model.config.vocab_size}
    options.setdefault("max_new_tokens", MAX_NEW_TOKENS)
    if options.get("constraint") is not None:
        options.setdefault("tokenizer", tokens)
    run = Stream(model, ids, stop=[*stops, *sorted(ends)] or None, **options)
    new = (int(token_b[0]) for token_b in run)
    pieces = tokens.pieces(one for one in new if one not in ends)
    return pieces if isinstance(prompt, str) else before(pieces, chat.stops)


def before(pieces: Iterator[str], stops: Sequence[str]) -> Iterator[str]:
    """The text before the first of `stops` in it, piece by piece, as far as it is certain that none has begun."""
    text, given, longest = "", 0, max(map(len, stops), default=1)
    for piece in pieces:
        text += piece
        found = [text.index(stop) for stop in stops if stop in text]
        certain = min(found) if found else len(text) - longest + 1
        if certain > given:
            yield text[given:certain]
            given = certain
        if found:
            return
    yield text[given:]
