"""Over how many channels Mamba-2's gated norm is taken, which files of transformers with several groups do not say.

Its `mamba2`, `bamba` and `granitemoehybrid` take it per group from 5.23 on. Before, they do so in fused kernels only,
and over all channels otherwise.
"""

from typing import Any

from mambakit.blocks.family import family_of
from mambakit.models.language_model import ModelConfig

SINCE = "5.23"


def groups_assumed(n_groups: int, width: int) -> str:
    group = width // n_groups
    return (
        f"n_groups = {n_groups}: the gated norm is taken per group, over {group} channels, as in the official code and "
        f"in transformers from {SINCE} on. transformers before {SINCE} without fused kernels takes it over all "
        f"{width}; pass norm_group_size={width} to reproduce that, or {group} to keep the groups"
    )


def whole_assumed(n_groups: int, width: int) -> str:
    return (
        f"mamba_n_groups = {n_groups}: the gated norm is taken over all {width} channels, as transformers before "
        f"{SINCE} computes it without fused kernels. With them, and from {SINCE} on, it is taken per group; pass "
        f"norm_group_size={width // n_groups} for that, or {width} to keep this"
    )


def not_stored(config: ModelConfig) -> str:
    block = normed_blocks(config)[0]
    width, every = block.norm_width, block.ssm_width
    if width == every:
        here = f"over all {every} channels"
        there = f"before {SINCE} without fused kernels computes the same; from {SINCE} on it norms each group by itself"
    else:
        here = f"per group, over {width} channels"
        there = f"from {SINCE} on computes the same; before, without fused kernels, it norms all {every} together"
    return (
        f"the gated norm of this model is taken {here}, which files of transformers do not say. transformers {there}. "
        f"Pass norm_group_size={width} to load_model to get this model back"
    )


def known_width(config: ModelConfig, stored: ModelConfig) -> int | None:
    """The channels that `config` norms together, if some release of transformers does so with what was stored."""
    block, widths = normed_blocks(stored)[0], {block.norm_width for block in normed_blocks(config)}
    known = (block.ssm_width, block.ssm_width // block.ngroups)
    return next((width for width in known if widths == {width}), None)


def normed_blocks(config: ModelConfig) -> list[Any]:
    return [block for blocks in config.blocks for block in blocks if family_of(block).has("norm_group_size")]
