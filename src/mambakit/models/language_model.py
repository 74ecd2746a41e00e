"""A language model: embedding, stack, norm, head; parameters named as in official checkpoints."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from mambakit.blocks.block import Options, check_options, resets
from mambakit.blocks.config import check_config, check_positive
from mambakit.blocks.modules import Linear
from mambakit.models.layer import make_norm
from mambakit.models.pretrained import Pretrained
from mambakit.models.stack import Stack, StackCache, StackConfig
from mambakit.ops.shapes import check_beside, check_dense
from mambakit.ops.ssd_path import SsdPath


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(StackConfig):
    """The layers of a language model, and what is around them.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> short = mk.ModelConfig(block=block, n_layer=2, vocab_size=256)
        >>> mlp, attention = mk.MLPConfig(64, 128), mk.AttentionConfig(64, n_heads=4)
        >>> hybrid = mk.ModelConfig(layers=((block, mlp), (attention, mlp)), vocab_size=256)
    """

    vocab_size: int
    pad_vocab_size_multiple: int = 8
    """The embedding has a multiple of this many rows; ids at or above `vocab_size` are never used."""
    tie_embeddings: bool = True
    embedding_scale: float = 1.0
    """What embeddings are multiplied by before the first layer."""
    logits_scale: float = 1.0

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        check_positive(self, "vocab_size", "pad_vocab_size_multiple", "embedding_scale", "logits_scale")

    @property
    def padded_vocab_size(self) -> int:
        multiple = self.pad_vocab_size_multiple
        return -(-self.vocab_size // multiple) * multiple


class Backbone(Stack):
    """The stack with what stands before and after it."""

    def __init__(self, config: ModelConfig, **made: Any):
        super().__init__(config, **made)
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model, **made)
        self.norm_f = make_norm(config.d_model, config.rms_norm, config.norm_eps, **made)


class LanguageModel(Pretrained):
    """Token ids to logits: `logits_bsw, cache = model(ids_bs, cache)`.

    Examples:
        >>> block = mk.Mamba3Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> ids_bs = torch.randint(256, (2, 100))
        >>> logits_bsw, cache = model(ids_bs)
        >>> logits_bw, cache = model.step(ids_bs[:, 0], cache)
        >>> logits_bsw.shape, logits_bw.shape
        (torch.Size([2, 100, 256]), torch.Size([2, 256]))
    """

    def __init__(self, config: ModelConfig, *, device: Any = None, dtype: Any = None):
        super().__init__()
        check_config(self, config, ModelConfig)
        self.config = config
        made = {"device": device, "dtype": dtype}
        self.backbone = Backbone(config, **made)
        self.lm_head = Linear(config.d_model, config.padded_vocab_size, bias=False, **made)
        if config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The official initialisation of embedding, head and what leads back into the residual."""
        with torch.no_grad():
            nn.init.normal_(self.backbone.embedding.weight, std=0.02)
            for name, parameter in self.backbone.named_parameters():
                if name.endswith(("out_proj.weight", "fc2.weight", "experts_out")):
                    # Each expert is a matrix of its own.
                    for matrix in parameter if parameter.dim() == 3 else (parameter,):
                        nn.init.kaiming_uniform_(matrix, a=5**0.5)
                    parameter /= self.config.n_layer**0.5
                elif name.endswith(("in_proj.bias", "out_proj.bias")):
                    nn.init.zeros_(parameter)

    def fresh_cache(self, batch: int) -> StackCache:
        return self.backbone.fresh_cache(batch)

    def forward(
        self, ids_bs: Tensor, cache: StackCache | None = None, **options: Unpack[Options]
    ) -> tuple[Tensor, StackCache]:
        """Logits over the real vocabulary, and the cache after the last token; `options` are a block's."""
        check_axes("ids_bs", ids_bs, "batch", "sequence")
        check_options(self, options)
        with SsdPath.of(options.get("path")).around():
            x_bsd, after = self.backbone(self.embed(ids_bs), cache, **options)
            return self.logits(x_bsd), after

    def step(
        self, ids_b: Tensor, cache: StackCache | None = None, *, reset_b: Tensor | None = None
    ) -> tuple[Tensor, StackCache]:
        """One token; rows of `reset_b` start afresh before it."""
        check_axes("ids_b", ids_b, "batch")
        if self.backbone.levels:
            # Without cursors, a step leaves class latents out and a call does not.
            x_bd, after = self.backbone.step(self.embed(ids_b), cache, reset_b=reset_b)
            return self.logits(x_bd), after
        logits_bsw, after = self(ids_b[:, None], cache, **resets(reset_b, ids_b))
        return logits_bsw[:, 0], after

    def embed(self, ids: Tensor) -> Tensor:
        embedding = self.backbone.embedding
        if ids.is_meta or embedding.weight.is_meta or type(ids) is not Tensor:
            # Of ids on the meta device torch would return what happens to be in memory.
            check_beside("embedding", embedding.weight, "ids_bs", ids)
        try:
            x = embedding(ids)
        except (IndexError, RuntimeError) as error:
            # Not looked for at the door: on other devices that would wait for them.
            wrong = wrong_ids(ids, self.config.vocab_size)
            raise error if wrong is None else ValueError(wrong) from error
        scale = self.config.embedding_scale
        return x if scale == 1 else x * scale

    def logits(self, x: Tensor) -> Tensor:
        """Of the residual stream; rows of the head that only pad the vocabulary are left out."""
        logits = self.lm_head(self.backbone.norm_f(x))[..., : self.config.vocab_size]
        scale = self.config.logits_scale
        return logits if scale == 1 else logits * scale


def check_axes(name: str, ids: Tensor, *axes: str) -> None:
    check_dense(name, ids)
    if not isinstance(ids, Tensor) or ids.dim() != len(axes):
        given = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        needs = f"{len(axes)} {'axis' if len(axes) == 1 else 'axes'} ({', '.join(axes)})"
        raise ValueError(f"{name} needs {needs}, got {given}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {ids.dtype}, expected {torch.int64}")


def wrong_ids(ids: Tensor, vocab_size: int) -> str | None:
    """Why they have no embeddings, or None if that has other reasons."""
    if ids.numel() == 0:
        return None
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        return f"the ids go from {low} to {high}, but the vocabulary is 0 to {vocab_size - 1}"
    return None


def check_language_model(model: Any) -> None:
    """That it has the parts of a `LanguageModel`, which others may have too."""
    if not all(hasattr(model, name) for name in ("backbone", "embed", "logits", "config")):
        raise ValueError(f"model is a {type(model).__name__}, expected a LanguageModel")
