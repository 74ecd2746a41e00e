"""Calls of official functions, with the tensors each takes: by their shapes, in letters of `SIZES`."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mambakit.compat.causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update
from mambakit.compat.causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
from mambakit.compat.mamba_ssm.modules.ssd_minimal import ssd_minimal_discrete
from mambakit.compat.mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
from mambakit.compat.mamba_ssm.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
from mambakit.compat.mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from mambakit.compat.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mambakit.compat.mamba_ssm.ops.triton.ssd_combined import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)

SIZES = {"b": 2, "s": 6, "v": 8, "i": 6, "k": 4, "K": 3, "L": 5, "h": 4, "p": 4, "g": 2, "r": 5, "n": 7, "R": 3}
SIZES |= {"P": 4 * 4 * 2 + 2 * 2 * 5 + 4, "c": 4 * 4 + 2 * 2 * 5, "q": 16, "d": 6, "x": 3 + 2 * 5, "j": 12}
"""P, c and q are the widths of a Mamba-2 block's projection, convolution and gate; x and j are Mamba-1's."""
FUNCTIONS: dict[Callable[..., Any], tuple[dict[str, str], dict[str, str], dict[str, tuple[Any, ...]]]] = {
    causal_conv1d_fn: (
        {"x": "bvs", "weight": "vk"},
        {"bias": "v", "initial_states": "bvK", "seq_idx": "ids bs"},
        {"activation": ("silu", "swish", None), "return_final_states": (True, False)},
    ),
    causal_conv1d_update: (
        {"x": "bv", "conv_state": "bvL", "weight": "vk"},
        {"bias": "v", "cache_seqlens": "ids b", "conv_state_indices": "rows b"},
        {"activation": ("silu", None)},
    ),
    causal_conv1d_varlen_states: ({"x": "nv", "cu_seqlens": "cuts"}, {}, {"state_len": (0, 3, 9)}),
    selective_scan_fn: (
        {"u": "bis", "delta": "bis", "A": "-ir", "B": "bgrs", "C": "bgrs"},
        {"D": "i", "z": "bis", "delta_bias": "i"},
        {"delta_softplus": (True, False), "return_last_state": (True, False)},
    ),
    selective_state_update: (
        {"state": "bir", "x": "bi", "dt": "bi", "A": "-ir", "B": "br", "C": "br"},
        {"D": "i", "z": "bi", "dt_bias": "i", "state_batch_indices": "rows b"},
        {"dt_softplus": (True,)},
    ),
    mamba_chunk_scan_combined: (
        {"x": "bshp", "dt": "bsh", "A": "-h", "B": "bsgr", "C": "bsgr"},
        {"D": "h", "z": "bshp", "dt_bias": "h", "initial_states": "bhpr", "seq_idx": "ids bs"},
        {
            "chunk_size": (4, 256),
            "dt_softplus": (True,),
            "return_final_states": (True, False),
            "dt_limit": ((0.0, 1.0),),
        },
    ),
    mamba_split_conv1d_scan_combined: (
        {"zxbcdt": "bsP", "conv1d_weight": "ck", "conv1d_bias": "c", "dt_bias": "h", "A": "-h", "D": "h"},
        {"rmsnorm_weight": "q", "outproj_weight": "dq", "initial_states": "bhpr", "seq_idx": "ids bs"},
        {"chunk_size": (4,), "ngroups": (2,), "headdim": (4,), "activation": ("silu",), "norm_before_gate": (True,)},
    ),
    ssd_minimal_discrete: (
        {"X": "bshp", "A": "-bsh", "B": "bshr", "C": "bshr"},
        {"initial_states": "b1hpr"},
        {"block_len": (2, 3, 6)},
    ),
    mamba_inner_fn: (
        {
            **{"xz": "bjs", "conv1d_weight": "i1k", "conv1d_bias": "i", "x_proj_weight": "xi"},
            **{"delta_proj_weight": "iR", "out_proj_weight": "di", "out_proj_bias": "d", "A": "-ir"},
        },
        {"D": "i", "delta_bias": "i"},
        {"delta_softplus": (True,)},
    ),
    rms_norm_fn: ({"x": "bsd", "weight": "d", "bias": "d"}, {"residual": "bsd"}, {"prenorm": (True, False)}),
    layer_norm_fn: ({"x": "bsd", "weight": "d", "bias": "d"}, {"residual": "bsd"}, {"is_rms_norm": (True, False)}),
    rmsnorm_fn: ({"x": "bsd", "weight": "d", "bias": "d"}, {"z": "bsd"}, {"group_size": (2, None)}),
}
"""Each with the tensors it needs, those it may get, and what else may be asked of it."""


def official_call(draw: random.Random) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    function = draw.choice(list(FUNCTIONS))
    needed, optional, options = FUNCTIONS[function]
    shapes = {**needed, **{name: shape for name, shape in optional.items() if draw.random() < 0.4}}
    arguments: dict[str, Any] = {name: made(shape, draw) for name, shape in shapes.items()}
    # What has no default is named all the same.
    always = ("chunk_size", "state_len", "block_len", "ngroups", "headdim", "bias")
    for name, values in options.items():
        if name in always or draw.random() < 0.4:
            arguments[name] = draw.choice(values)
    if "rmsnorm_weight" not in arguments:
        arguments.pop("norm_before_gate", None)
    return function.__name__, lambda **given: with_states(function, given), arguments


def with_states(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Also what the function left in the states it writes to."""
    return function(**given), [given[name] for name in ("state", "conv_state") if name in given]


def made(shape: str, draw: random.Random) -> Tensor:
    make = torch.Generator().manual_seed(draw.randrange(1 << 30))
    if shape == "cuts":
        return torch.tensor([0, 2, 2, SIZES["n"]], dtype=torch.int32)
    kind, _, axes = shape.rpartition(" ")
    sizes = [int(axis) if axis.isdigit() else SIZES[axis] for axis in axes.removeprefix("-")]
    if kind == "rows":
        return torch.tensor([draw.choice((1, -1)), 0], dtype=torch.int32)
    if kind == "ids":
        return torch.randint(0, 2, sizes, generator=make).cumsum(-1).to(torch.int32)
    x = torch.randn(sizes, generator=make)
    return -x.abs() if shape.startswith("-") else x
