"""A tiny model, a tiny text and a run of them, for the tests of training."""

from pathlib import Path

import torch

import mambakit as mk
from mambakit.text.documents import Document
from mambakit.text.tokens import Bytes
from mambakit.training.batches import Rows, encode
from mambakit.training.loop import HeldOut, Step, Trainer
from mambakit.training.processes import Ranks
from mambakit.training.run import LOG, read_log
from mambakit.training.settings import TrainSettings

TINY = {"steps": 12, "batch": 4, "seq_len": 16, "lr": 0.01, "warmup": 3, "evaluate_every": 6, "save_every": 4}

REFUSED = (
    (("--context-parallel=3",), "4 processes cannot be divided into groups of 3 that share sequences"),
    (("--context-parallel=2", "--tensor-parallel=4"), "groups of 8 that share sequences and heads"),
    (("--tensor-parallel=4", "--head-dim=16"), "nheads = 2 in Mamba2Config cannot be divided among 4"),
    (("--tensor-parallel=4", "--layers=F", "--mlp=6"), "d_hidden = 6 in MLPConfig cannot be divided among 4"),
    (("--context-parallel=2", "--seq-len=15"), "seq_len = 15 tokens of a row cannot be divided among 2 ranks"),
    (("--batch=2",), "batch = 2 rows cannot be divided among 4 ranks"),
    (("--batch=6", "--context-parallel=2", "--accumulate=2"), "make it a multiple of 4"),
    (("--context-parallel=2", "--segment-len=4"), "leave out --segment-len or --context-parallel"),
    (("--parallel=fsdp", "--optimizer=muon", "--lora=2"), "--lora says how to fine-tune, and --init MODEL says what"),
    (("--resume",), "holds no run to resume"),
)
"""Options that four ranks cannot run with, and what is said then."""


def make_documents(count: int = 30) -> list[Document]:
    words = [b"scan", b"state", b"gate", b"read", b"write"]
    return [Document(f"d{i}", b" ".join(words[(i * j + j) % 5] for j in range(1, 8 + i))) for i in range(count)]


def make_model(dtype: torch.dtype = torch.float32) -> mk.LanguageModel:
    torch.manual_seed(0)
    block = mk.Mamba3Config(d_model=16, state_rank=8, per_head_dim=8)
    return mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=257), dtype=dtype)


def make_trainer(
    ranks: Ranks | None = None, dtype: torch.dtype = torch.float32, lora: int | None = None, **changed
) -> Trainer:
    settings = TrainSettings(**{**TINY, **changed})
    tokens, documents = Bytes(), make_documents()
    encoded = encode(documents, tokens)
    held_out = HeldOut(encoded[:3], [len(document.content) for document in documents[:3]])
    model = make_model(dtype)
    if lora is not None:
        torch.manual_seed(1)
        mk.add_lora(model, lora)
    return Trainer(model, settings, Rows(encoded, tokens.end, settings), held_out, ranks)


def make_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["to be or not to be"] * 20, trainer)
    tokenizer.save(str(folder / "tok.json"))
    return folder / "tok.json"


class Silent:
    """Watches without a word."""

    def __init__(self):
        self.notes: list[str] = []

    def step(self, step: Step) -> None:
        pass

    def evaluation(self, step: int, bits_per_byte: float) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


def losses(folder: Path) -> list[float]:
    """Of all steps in a run's log."""
    return [line["loss"] for line in read_log(folder / LOG) if "loss" in line]
