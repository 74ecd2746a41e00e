"""A tokenizer as GGUF files have it: what llama.cpp needs to read and write a model's text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mambakit.checkpoints.fields import shown

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {LETTERS + r"\p{N}{1,3}" + REST: "llama-bpe", LETTERS + r"\p{N}" + REST: "qwen2"}
"""What llama.cpp calls the expressions by which text is cut before tokens are looked for."""
NEVER = ("ÿ", "þ")
"""The bytes 0xff and 0xfe, neither of which is in any UTF-8 text: a merge of them never happens."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Of byte-level BPE, "gpt2" in llama.cpp."""

    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    cut: str
    """How text is cut first."""
    end: int
    """Stands before every document and after its last token."""


def byte_vocabulary(end: int) -> Vocabulary:
    """A token for every byte, and one that ends a document."""
    tokens = [*byte_names(), *(f"<|unused_{i}|>" for i in range(256, end)), "<|endoftext|>"]
    types = [NORMAL] * 256 + [UNUSED] * (end - 256) + [CONTROL]
    # A list without entries cannot be stored, and llama.cpp looks for this one.
    return Vocabulary(tokens=tokens, types=types, merges=[" ".join(NEVER)], cut="gpt-2", end=end)


def byte_names() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself where it is visible, or one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def bpe_vocabulary(values: Mapping[str, Any], end: int) -> Vocabulary:
    """Of the values of a `tokenizer.json`; ValueError says why llama.cpp has nothing like it."""
    model = values.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        kind = model.get("type") if isinstance(model, dict) else model
        raise ValueError(f"the tokenizer is a {shown(kind)}, and only byte-level BPE is written to GGUF")
    cut = cut_of(values.get("normalizer"), values.get("pre_tokenizer"))
    added = {one["id"]: one for one in values.get("added_tokens") or []}
    texts = {i: text for text, i in model["vocab"].items()} | {i: one["content"] for i, one in added.items()}
    size = max(max(texts, default=-1), end) + 1
    if end not in texts:
        texts[end] = next(name for name in ("<|endoftext|>", f"<|end_{end}|>") if name not in texts.values())
    kinds = {i: CONTROL if one.get("special") else USER_DEFINED for i, one in added.items()}
    kinds = dict.fromkeys(texts, NORMAL) | kinds | {end: CONTROL}
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges") or []]
    return Vocabulary(
        tokens=[texts.get(i, f"<|unused_{i}|>") for i in range(size)],
        types=[kinds.get(i, UNUSED) for i in range(size)],
        merges=merges or [" ".join(NEVER)],
        cut=cut,
        end=end,
    )


def cut_of(normalizer: Any, cutting: Any) -> str:
    """llama.cpp's name for how text is cut before tokens are looked for."""
    # Text in its usual form is the same after NFC; llama.cpp's converter passes over it too.
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise ValueError(f"the tokenizer changes text by {shown(normalizer)}, which GGUF does not have")
    steps = cutting.get("pretokenizers", [cutting]) if isinstance(cutting, dict) else [cutting]
    *splits, last = steps
    if isinstance(last, dict) and last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        if not splits and last.get("use_regex", True):
            return "gpt-2"
        pattern = splits[0].get("pattern", {}).get("Regex") if len(splits) == 1 else None
        if not last.get("use_regex", True) and pattern in SPLITS:
            return SPLITS[pattern]
    known = ", ".join(("gpt-2", *SPLITS.values()))
    raise ValueError(f"the tokenizer cuts text by {shown(cutting)}, and what is written to GGUF is that of {known}")
