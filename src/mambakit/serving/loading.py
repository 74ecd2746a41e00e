"""A service from what lies on the disk: a model's folder, and one for its sessions."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mambakit.checkpoints import load_model
from mambakit.inference import Engine
from mambakit.inference.prefix_cache import PrefixCache
from mambakit.inference.sessions import Sessions
from mambakit.models.language_model import LanguageModel
from mambakit.models.quantization import quantize
from mambakit.text.chat import Chat, read_chat
from mambakit.text.tokens import Tokens, read_tokens

if TYPE_CHECKING:
    from mambakit.serving.service import Limits, Service


class Loaded(NamedTuple):
    model: LanguageModel
    tokens: Tokens
    chat: Chat
    engine: Engine


def load(
    folder: Path,
    *,
    tokenizer: str | None = None,
    bits: int | None = None,
    max_rows: int = 64,
    speculate: str = "auto",
) -> Loaded:
    """A model, how it is talked to, and an engine for it."""
    tokens = read_tokens(folder, tokenizer)
    model = load_model(folder).eval()
    if tokens.vocab_size > model.config.padded_vocab_size:
        raise ValueError(f"the tokenizer has {tokens.vocab_size} tokens, but the model knows {model.config.vocab_size}")
    chat = read_chat(folder, tokens, model.config.vocab_size)
    if bits is not None:
        model = quantize(model, bits, in_place=True)
    engine = Engine(model, max_rows, PrefixCache(), tokenizer=tokens, speculate=speculate)
    return Loaded(model, tokens, chat, engine)


def make_service(
    name: str,
    loaded: Loaded,
    limits: "Limits",
    *,
    sessions: Path | None = None,
    max_session_bytes: int | None = None,
) -> "Service":
    """A service that keeps its responses and their states in `sessions`, or else in memory."""
    from mambakit.serving.metrics import Metrics
    from mambakit.serving.service import Service
    from mambakit.serving.store import Store, StoreOnDisk
    from mambakit.serving.worker import Worker

    store = Store()
    if sessions is not None:
        states = Sessions(sessions / "states", loaded.model, versions=1, max_bytes=max_session_bytes)
        store = StoreOnDisk(sessions, states)
    worker = Worker(loaded.engine)
    return Service(
        name=name,
        model=loaded.model,
        tokens=loaded.tokens,
        chat=loaded.chat,
        worker=worker,
        store=store,
        metrics=Metrics(lambda: worker.waiting, lambda: worker.active),
        limits=limits,
    )
