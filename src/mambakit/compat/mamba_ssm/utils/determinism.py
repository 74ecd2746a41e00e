"""Whether results are to be the same in every run. Here they are in either mode."""

import os

import torch

from mambakit.compat.gpu_only import gpu_only

__all__ = ["set_deterministic_mode", "use_deterministic_mode"]

__getattr__ = gpu_only(
    __name__,
    tiles="autotune_configs alloc_tile_workspace finalize_tile_workspace _estimate_config_cost "
    "_filter_configs_by_block_sizes",
)
chosen: list[bool | None] = [None]


def use_deterministic_mode() -> bool:
    """What was set, else what `MAMBA_DETERMINISTIC` says, else what torch does."""
    if chosen[0] is not None:
        return chosen[0]
    said = os.environ.get("MAMBA_DETERMINISTIC")
    return said.startswith("1") if said else torch.are_deterministic_algorithms_enabled()


def set_deterministic_mode(value: bool | None) -> None:
    chosen[0] = value
