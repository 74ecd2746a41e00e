"""The card of a published model: README.md with what it is, what it was trained on and how well it does."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mambakit.blocks.family import family_of
from mambakit.checkpoints.quantized import formats_of
from mambakit.models.language_model import LanguageModel

CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of how a model came about. What is None or empty is left out of its card."""

    data: Sequence[str] = ()
    """Names of files and folders."""
    text_hash: str | None = None
    """SHA-256 of the text."""
    steps: int | None = None
    tokens_per_step: int | None = None
    bits_per_byte: float | None = None
    """Of text that was held out."""
    optimizer: str | None = None
    license: str | None = None
    """As the hub spells it, like `mit` or `apache-2.0`."""
    base_model: str | None = None
    """The name on the hub of the model that this one was made of."""
    tags: Sequence[str] = ()


def card(model: LanguageModel, name: str, record: Record) -> str:
    """README.md of a model called `name`, like `owner/model`."""
    families = dict.fromkeys(family_of(block).title for blocks in model.config.blocks for block in blocks)
    quantized = sorted({one["format"] for one in formats_of(model).values()})
    tags = dict.fromkeys(["mambakit", *(title.lower() for title in families), *quantized, *record.tags])
    head: dict[str, Any] = {"library_name": "mambakit", "pipeline_tag": "text-generation", "tags": list(tags)}
    given = {"license": record.license, "base_model": record.base_model}
    head |= {key: value for key, value in given.items() if value is not None}
    if record.bits_per_byte is not None:
        head["model-index"] = [_results(name, record)]
    size = sum(parameter.numel() for parameter in model.parameters())
    size += sum(module.in_features * module.out_features for module in _quantized(model))
    facts = [
        f"- Blocks: {', '.join(families)}; {model.config.n_layer} layers, width {model.config.d_model}",
        f"- Parameters: {size:,}" + (f", matrices in {', '.join(quantized)}" if quantized else ""),
        f"- Vocabulary: {model.config.vocab_size:,} tokens",
    ]
    made = [
        *([f"- Base model: {record.base_model}"] if record.base_model else []),
        *([f"- Data: {', '.join(record.data)}"] if record.data else []),
        *([f"- SHA-256 of the text: `{record.text_hash}`"] if record.text_hash else []),
        *([f"- Steps: {_steps(record)}"] if record.steps is not None else []),
        *([f"- Optimizer: {record.optimizer}"] if record.optimizer else []),
        *([f"- Bits per byte, held-out text: {record.bits_per_byte:.4f}"] if record.bits_per_byte is not None else []),
    ]
    use = f'import mambakit as mk\n\nmodel = mk.load_model("{name}")'
    parts = [
        # JSON is YAML too, and quotes whatever needs it.
        "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items()) + "---",
        f"# {name.rpartition('/')[2]}",
        "\n".join(facts),
        *(["## Training", "\n".join(made)] if made else []),
        *(["## License", record.license] if record.license else []),
        "## Use",
        f"```python\n{use}\n```",
        f'```\nmambakit generate {name} --prompt "..."\n```',
    ]
    return "\n\n".join(parts) + "\n"


def _quantized(model: LanguageModel) -> list[Any]:
    return [model.get_submodule(name) for name in formats_of(model)]


def _steps(record: Record) -> str:
    each = "" if record.tokens_per_step is None else f" of {record.tokens_per_step:,} tokens"
    return f"{record.steps:,}{each}"


def _results(name: str, record: Record) -> dict[str, Any]:
    """As the hub shows results."""
    data = ", ".join(record.data) or "held-out text"
    return {
        "name": name.rpartition("/")[2],
        "results": [
            {
                "task": {"type": "text-generation"},
                "dataset": {"type": "text", "name": data},
                "metrics": [
                    {"type": "bits_per_byte", "name": "bits per byte", "value": round(record.bits_per_byte or 0, 4)}
                ],
            }
        ],
    }
