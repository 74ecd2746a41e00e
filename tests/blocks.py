"""The blocks every claim about blocks is tested on: small, one per option that changes the computation."""

import torch
from torch import Tensor, nn

from mambakit import (
    Attention,
    AttentionConfig,
    Mamba1,
    Mamba1Config,
    Mamba2,
    Mamba2Config,
    Mamba3,
    Mamba3Config,
)

M2 = {"d_model": 8, "state_rank": 4, "per_head_dim": 4}
M3 = {"d_model": 8, "state_rank": 8, "per_head_dim": 4}

CONFIGS = {
    "mamba1": Mamba1Config(d_model=6, state_rank=3),
    "mamba1-bare": Mamba1Config(d_model=6, state_rank=4, conv_kernel=1, conv_bias=False, bias=True, dt_init="constant"),
    "mamba1-normed": Mamba1Config(d_model=6, state_rank=3, dt_rank=2, dt_b_c_norm=True),
    "mamba1-rms": Mamba1Config(d_model=6, state_rank=4, dt_rank=3, dt_b_c_norm=True, dt_b_c_norm_weight=False),
    "mamba2": Mamba2Config(**M2),
    "mamba2-groups": Mamba2Config(**M2, ngroups=2, norm_before_gate=True, bias=True, conv_kernel=2),
    "mamba2-mlp": Mamba2Config(**M2, d_ssm=8, D_has_hdim=True, dt_limit=(0.01, 0.08), conv_bias=False),
    "mamba2-learned": Mamba2Config(**M2, rmsnorm=False, learnable_init_states=True, norm_group_size=4),
    "mamba2-multipliers": Mamba2Config(
        **M2, d_inner=12, d_ssm=8, ssm_multipliers=(0.5, 1.25, 0.7, 1.5, 2.0), bias=True
    ),
    "mamba3": Mamba3Config(**M3),
    "mamba3-mimo": Mamba3Config(**M3, is_mimo=True, mimo_rank=3, ngroups=2, is_outproj_norm=True),
    "mamba3-rank1": Mamba3Config(**M3, is_mimo=True, mimo_rank=1, rope_fraction=1.0, a_activation="softplus"),
    "mamba3-still": Mamba3Config(**M3, rope_fraction=0.0, ngroups=4, dt_limit=(0.0, 0.05)),
    "mamba3-quaternion": Mamba3Config(**M3, rotation="quaternion", rotation_range=2.0),
    "mamba3-learned": Mamba3Config(
        **M3, rotation="quaternion", rope_fraction=1.0, is_mimo=True, learnable_init_states=True
    ),
    "mamba3-burn": Mamba3Config.burn(**M3, learnable_init_states=True),
    "attention": AttentionConfig(8, 2),
    "attention-rope": AttentionConfig(8, 4, 2, 4, rope_theta=100.0, rope_fraction=0.5, bias=True, key_scale=0.7),
    "attention-window": AttentionConfig(8, 2, 1, 6, 0.3, 50.0, window=3, in_scale=0.8, out_scale=1.5),
}
FAMILIES = ("mamba1", "mamba2", "mamba3", "mamba3-mimo", "mamba3-quaternion", "attention-rope", "attention-window")
MAMBAS = tuple(name for name in CONFIGS if name.startswith("mamba"))
"""Those with a state, scans and kernels of their own."""
MAKE = {Mamba1Config: Mamba1, Mamba2Config: Mamba2, Mamba3Config: Mamba3, AttentionConfig: Attention}


def make_block(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A block with every parameter moved off its initial value, so that none of them is idle."""
    config = CONFIGS[name]
    torch.manual_seed(0)
    block = MAKE[type(config)](config, dtype=dtype)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return block


def random_cache(block: nn.Module, batch: int, seed: int = 3):
    """A warm cache: what is left after a few random tokens."""
    make = torch.Generator().manual_seed(seed)
    dtype = next(block.parameters()).dtype
    tokens = torch.randn(batch, 5, block.config.d_model, generator=make, dtype=torch.float64).to(dtype)  # type: ignore[union-attr]
    with torch.no_grad():
        return block(tokens)[1]


def tokens(block: nn.Module, batch: int, length: int, seed: int = 4) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, block.config.d_model, generator=make, dtype=torch.float64)  # type: ignore[union-attr]
    return x.to(next(block.parameters()).dtype)


def tensors_of(cache) -> dict[str, Tensor]:
    """A cache's tensors by name, angles as the directions they stand for."""
    named = {name: t for name, t in cache._asdict().items() if isinstance(t, Tensor)}
    if "rotation" in named and named["rotation"].dim() == 3:
        angle = named.pop("rotation")
        named |= {"cos": angle.cos(), "sin": angle.sin()}
    return named


def differentiable(value) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def leaf_cache(cache):
    return type(cache)(*(t.detach().clone().requires_grad_() if differentiable(t) else t for t in cache))


def leaves_of(block: nn.Module, x: Tensor, entering) -> dict[str, Tensor]:
    """All that has a gradient, by name."""
    inputs = {"x": x, **dict(block.named_parameters())}
    if entering is not None:
        inputs |= {f"entering {n}": t for n, t in entering._asdict().items() if differentiable(t)}
    return inputs


def weighed(out: dict[str, Tensor]) -> Tensor:
    """A loss that every number takes part in."""
    make = torch.Generator().manual_seed(5)
    weighed = [
        (t * torch.randn(t.shape, generator=make, dtype=torch.float64).to(t.dtype)).sum()
        for t in out.values()
        if differentiable(t)
    ]
    return torch.stack(weighed).sum()


def results(block: nn.Module, run, x: Tensor, cache) -> dict[str, Tensor]:
    """Outputs, cache and every gradient (input, entering cache, parameters) of `run(block, x, cache) -> (y, cache)`."""
    x = x.detach().clone().requires_grad_()
    entering = None if cache is None else leaf_cache(cache)
    y, last = run(block, x, entering)
    out = {"y": y, **tensors_of(last)}
    inputs = leaves_of(block, x, entering)
    grads = torch.autograd.grad(weighed(out), list(inputs.values()), allow_unused=True)
    named = zip(inputs.items(), grads, strict=True)
    return out | {f"d {name}": torch.zeros_like(t) if grad is None else grad for (name, t), grad in named}
