"""mambakit's `config.json` as transformers passes it around."""

from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from mambakit.checkpoints.formats import MODEL_TYPE, VERSION, read_own, write_own
from mambakit.models.language_model import ModelConfig

OF_ANY_CONFIG = ("name_or_path", "_commit_hash", "torch_dtype", "attn_implementation")
OF_ANY_CONFIG += ("pad_token_id", "bos_token_id", "eos_token_id")
"""What transformers hands to configs of all kinds, beside their fields."""


class MambakitConfig(PreTrainedConfig):
    """A `ModelConfig`, with the sizes that transformers looks for. `model` is `ModelConfig.to_dict()`.

    It is written to files as mambakit writes it. What transformers sets besides, such as `use_cache`, is not stored.
    """

    model_type: ClassVar[str] = MODEL_TYPE
    model: dict[str, Any]
    format: str = "mambakit"
    version: int = VERSION
    use_cache: bool = True

    def __post_init__(self, **options: Any) -> None:
        if options.pop("model_type", MODEL_TYPE) != MODEL_TYPE:
            raise ValueError(f'a MambakitConfig has the model_type "{MODEL_TYPE}"')
        unknown = sorted(options.keys() - set(OF_ANY_CONFIG))
        if unknown:
            raise ValueError(f"unknown fields {', '.join(unknown)}; the architecture's are inside model")
        super().__post_init__(**options)
        _ = self.model_config  # raises what is wrong with it

    @property
    def model_config(self) -> ModelConfig:
        return read_own({"format": self.format, "version": self.version, "model": self.model}).config

    @property
    def vocab_size(self) -> int:
        return self.model["vocab_size"]

    @property
    def hidden_size(self) -> int:
        return self.model_config.d_model

    @property
    def num_hidden_layers(self) -> int:
        return self.model["n_layer"]

    @property
    def tie_word_embeddings(self) -> bool:
        return self.model_config.tie_embeddings

    def to_dict(self) -> dict[str, Any]:
        return write_own(self.model_config).values

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()
