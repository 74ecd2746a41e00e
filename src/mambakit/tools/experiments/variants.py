"""The models that are compared: Mamba-3 whole, with parts of its rotation taken away, with quaternions, and Mamba-2."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from mambakit.blocks.config import BlockConfig
from mambakit.blocks.mamba2 import Mamba2Config
from mambakit.blocks.mamba3 import Mamba3, Mamba3Cache, Mamba3Config, Token
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.ops.backends import use_backend
from mambakit.tools.experiments.recipe import Recipe
from mambakit.tools.experiments.tasks import Task


def fix_frequencies(block: Mamba3) -> None:
    """Let the block turn by the same angles at every token, whatever the token says: rotary position embedding.

    Pair `q` turns by `10000 ** (-q / pairs)`.
    """
    config = block.config
    pairs = config.rope_dim // 2
    frequency_a = 10000 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    # What a step size of one makes into these angles.
    rot_a = torch.atanh(frequency_a / (config.rotation_range * math.pi))

    def rotate(token: Token, carried: Tensor, segments_bs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        rot_bsR = rot_a.to(token.rot_bsR).expand_as(token.rot_bsR)
        told = token._replace(rot_bsR=rot_bsR, dt_bsh=torch.ones_like(token.dt_bsh))
        return Mamba3.rotate(block, told, carried, segments_bs)

    # A step in fused kernels would not ask `rotate`.
    def run(*args: Any) -> tuple[Tensor, Mamba3Cache]:
        with use_backend("torch"):
            return Mamba3.run(block, *args)

    block.rotate, block.run = rotate, run  # type: ignore[method-assign, assignment]


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    title: str
    block: Callable[[dict[str, Any]], BlockConfig]
    """The block's config for the sizes that all have."""
    fixed_frequency: bool = False

    def build(self, task: Task, recipe: Recipe, d_model: int, seed: int) -> LanguageModel:
        """A fresh model whose logits are over the task's classes; the same seed gives the same weights."""
        torch.manual_seed(seed)
        sizes = {"d_model": d_model, "state_rank": recipe.state_rank, "per_head_dim": recipe.per_head_dim}
        low, high = recipe.dt_range
        config = ModelConfig(
            block=self.block({**sizes, "dt_min": low, "dt_max": high}),
            n_layer=recipe.n_layer or task.n_layer,
            vocab_size=max(task.vocab_size, task.classes),
            pad_vocab_size_multiple=1,
            tie_embeddings=False,
        )
        model = LanguageModel(config)
        if self.fixed_frequency:
            for layer in model.backbone.layers:
                fix_frequencies(cast(Mamba3, layer.mixer))
        return model


def mamba3(sizes: dict[str, Any]) -> Mamba3Config:
    """All of the state turns; the decay is the one that the official code had at the paper's time."""
    return Mamba3Config(**sizes, rope_fraction=1.0, a_activation="softplus")


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(name="mamba3", title="Mamba-3", block=mamba3),
        Variant(name="mamba3-fixed", title="Mamba-3, fixed rotation", block=mamba3, fixed_frequency=True),
        Variant(
            name="mamba3-still",
            title="Mamba-3, no rotation",
            block=lambda sizes: replace(mamba3(sizes), rope_fraction=0.0),
        ),
        Variant(
            name="mamba3-quaternion",
            title="Mamba-3, quaternions",
            block=lambda sizes: replace(mamba3(sizes), rotation="quaternion"),
        ),
        Variant(name="mamba2", title="Mamba-2", block=lambda sizes: Mamba2Config(**sizes)),
    )
}
