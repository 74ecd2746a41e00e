"""Configs: checked when made, JSON without loss, unknown keys refused; and how blocks start."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from blocks import CONFIGS, MAKE
from mambakit import (
    AttentionConfig,
    Cyclic,
    Mamba1,
    Mamba1Config,
    Mamba2,
    Mamba2Config,
    Mamba3,
    Mamba3Config,
    MLPConfig,
    MoEConfig,
    MultiGateConfig,
    StackConfig,
)


@pytest.mark.parametrize("name", CONFIGS)
def test_json_without_loss(name):
    config = CONFIGS[name]
    assert type(config).from_json(config.to_json()) == config
    assert hash(type(config).from_dict(config.to_dict())) == hash(config)
    with pytest.raises(AttributeError):
        config.d_model = 3


@pytest.mark.parametrize("text", ["x", "", "[" * 100_000, None, 3, b"\xff"])
def test_what_is_no_json(text):
    with pytest.raises(ValueError, match=r"^Mamba2Config.from_json got .*, which is no JSON: "):
        Mamba2Config.from_json(text)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"'])
def test_json_of_something_else(text):
    with pytest.raises(ValueError, match=r"Mamba2Config"):
        Mamba2Config.from_json(text)


def test_values_that_are_no_config():
    block = Mamba2Config(d_model=8, per_head_dim=4).to_dict()
    stack = StackConfig(block=Mamba2Config(d_model=8, per_head_dim=4), n_layer=2).to_dict()
    wrong: dict[str, tuple[Any, Any]] = {
        "Mamba2Config needs d_model": (Mamba2Config, {}),
        "Mamba2Config cannot be read from {1: 2}": (Mamba2Config, {1: 2}),
        "expand = 1e[+]308 is too large beside d_model = 8": (Mamba2Config, {**block, "expand": 1e308}),
        r"block.family is \[\], expected one of": (StackConfig, {**stack, "block": {"family": []}}),
        "layers has to be a list of layers": (StackConfig, {**stack, "layers": 3}),
        "a schedule cannot be read from 3": (StackConfig, {**stack, "virtual": 3}),
        "schedule is {}, expected one of": (StackConfig, {**stack, "virtual": {"schedule": {}}}),
        "indices is 3, expected a list": (StackConfig, {**stack, "virtual": {"schedule": "Custom", "indices": 3}}),
    }
    for message, (kind, values) in wrong.items():
        with pytest.raises(ValueError, match=message):
            kind.from_dict(values)


def test_unknown_keys_are_all_named():
    named = r"Mamba2Config has no field 'd_state' \(here: state_rank\), 'headdim' \(here: per_head_dim\)$"
    with pytest.raises(ValueError, match=named):
        Mamba2Config.from_dict({"d_model": 8, "headdim": 4, "d_state": 4})
    with pytest.raises(ValueError, match=r"'what'; known are A_init_range, .*ssm_multipliers, state_rank$"):
        Mamba2Config.from_dict({"d_model": 8, "what": 4})
    with pytest.raises(TypeError, match="d_state"):
        Mamba2Config(d_model=8, d_state=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Mamba1Config(8)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            Mamba2Config,
            {"d_model": 768, "per_head_dim": 100},
            "d_inner = 1536 is not a multiple of per_head_dim = 100; try 96 or 128",
        ),
        (
            Mamba2Config,
            {"d_model": 64, "per_head_dim": 32, "ngroups": 3},
            "nheads = 4 is not a multiple of ngroups = 3",
        ),
        (Mamba2Config, {"d_model": 64, "d_ssm": 256}, "d_ssm = 256 is above d_inner = 128"),
        (Mamba2Config, {"d_model": 64, "d_ssm": 256, "d_inner": 192}, "d_ssm = 256 is above d_inner = 192"),
        (Mamba2Config, {"d_model": 64, "d_inner": 0}, "d_inner = 0 has to be positive"),
        (Mamba2Config, {"d_model": 64, "d_inner": -64}, "d_inner = -64 has to be positive"),
        (Mamba2Config, {"d_model": 64, "d_inner": 100}, "d_inner = 100 is not a multiple of per_head_dim = 64"),
        (Mamba2Config, {"d_model": 64, "ssm_multipliers": (1.0, 2.0)}, "five numbers, for z, x, B, C and dt"),
        (Mamba1Config, {"d_model": 64, "dt_b_c_norm": True, "norm_eps": 0.0}, "norm_eps = 0.0 has to be positive"),
        (
            Mamba2Config,
            {"d_model": 64, "A_init_range": (0, 4)},
            r"A_init_range = \(0, 4\) has to be a pair with 0 < low",
        ),
        (Mamba2Config, {"d_model": 64, "dt_limit": (1.0, 0.5)}, r"dt_limit = \(1.0, 0.5\) has to be a pair"),
        (Mamba2Config, {"d_model": 64, "state_rank": 0}, "state_rank = 0 has to be positive"),
        (Mamba2Config, {"d_model": 64, "norm_group_size": 48}, "d_ssm = 128 is not a multiple of norm_group_size = 48"),
        (Mamba1Config, {"d_model": -2}, "d_model = -2 has to be positive"),
        (Mamba1Config, {"d_model": 8, "dt_init": "zero"}, "dt_init = 'zero' is unknown"),
        (Mamba1Config, {"d_model": 8, "dt_rank": 0}, "dt_rank = 0 has to be a positive integer"),
        (Mamba1Config, {"d_model": 8, "dt_min": 0.5, "dt_max": 0.1}, "dt_min = 0.5 is above dt_max = 0.1"),
        (Mamba3Config, {"d_model": 64, "state_rank": 7}, "state_rank = 7 is not a multiple of 2"),
        (
            Mamba3Config,
            {"d_model": 64, "a_activation": "relu"},
            "a_activation = 'relu' is unknown; choose from heavy_tail, softplus",
        ),
        (
            Mamba3Config,
            {"d_model": 64, "rotation": "octonion"},
            "rotation = 'octonion' is unknown; choose from complex, quaternion",
        ),
        (Mamba3Config, {"d_model": 64, "rope_fraction": 0.3}, "rope_fraction = 0.3 has to be 0, 0.5 or 1"),
        (Mamba3Config, {"d_model": 64, "rotation": "quaternion", "state_rank": 12}, "quaternions turn blocks of 4"),
        (Mamba3Config, {"d_model": 64, "mimo_rank": 0}, "mimo_rank = 0 has to be positive"),
        (Mamba1Config, {"d_model": torch.zeros(2, 2)}, "d_model = tensor.* is not an integer"),
        (Mamba1Config, {"d_model": 8.0}, "d_model = 8.0 is not an integer"),
        (Mamba2Config, {"d_model": 64, "dt_limit": 3}, "dt_limit = 3 is not a list of 2 numbers"),
        (Mamba2Config, {"d_model": 64, "rmsnorm": None}, "rmsnorm = None is not true or false"),
        (Mamba2Config, {"d_model": 64, "ssm_multipliers": "abcde"}, "five numbers, for z, x, B, C and dt"),
        (Mamba3Config, {"d_model": 64, "rotation_range": 1e30}, r"rotation_range is 1e\+30, expected at most 10000"),
        (Mamba3Config, {"d_model": 64, "rotation": []}, r"rotation = \[\] is not a string"),
        (AttentionConfig, {"d_model": 8, "n_heads": 2, "window": 1 << 63}, "window = 9223372036854775808 is too large"),
        (MLPConfig, {"d_model": 8, "d_hidden": 0.5}, "d_hidden = 0.5 is not an integer"),
        (MoEConfig, {"d_model": 8, "d_hidden": 6, "n_experts": 4, "top_k": True}, "top_k = True is not an integer"),
        (Mamba1Config, {"d_model": 8, "dt_scale": -1.0}, "dt_scale = -1.0 has to be 0 or more"),
        (Mamba1Config, {"d_model": 8, "dt_scale": math.inf}, "dt_scale = inf has to be 0 or more, and a number"),
        (MultiGateConfig, {"n_streams": "x"}, "n_streams = 'x' is not an integer"),
        (StackConfig, {"layers": 5}, "layers = 5 has to be a tuple of layers"),
        (StackConfig, {"block": Mamba1Config(d_model=8), "n_layer": "x"}, "n_layer = 'x' is not an integer"),
        (StackConfig, {"block": Mamba1Config(d_model=8), "n_layer": 10**9}, "n_layer = 1000000000 is more than"),
        (
            StackConfig,
            {"block": Mamba1Config(d_model=8), "n_layer": 2, "virtual": Cyclic(10**9)},
            "is more than 1048576",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_official_defaults():
    one, two, three = Mamba1Config(d_model=768), Mamba2Config(d_model=768), Mamba3Config(d_model=768)
    assert (one.state_rank, one.conv_kernel, one.d_inner, one.dt_width) == (16, 4, 1536, 48)
    assert (two.state_rank, two.per_head_dim, two.nheads, two.conv_dim, two.dt_limit) == (
        128,
        64,
        24,
        1792,
        (0, math.inf),
    )
    assert (three.state_rank, three.ranks, three.rope_dim, three.rotation_channels) == (128, 1, 64, 32)
    assert (three.a_activation, three.a_floor, three.rotation_range, three.norm_eps) == ("heavy_tail", 1e-4, 1.0, 1e-5)


def test_burn_preset():
    config = Mamba3Config.burn(d_model=64, state_rank=16)
    assert (config.rope_fraction, config.rotation_range, config.a_activation) == (1.0, 2.0, "softplus")
    assert (config.dt_limit, config.state_rank) == ((0.0, 65504.0), 16)
    assert Mamba3Config.burn(d_model=64, rotation_range=1.0).rotation_range == 1.0


def starts_officially(block: nn.Module) -> None:
    config = block.config
    if isinstance(block, Mamba1):
        step_sizes = nn.functional.softplus(block.dt_proj.bias)
        assert torch.allclose(block.A_log.exp()[0], torch.arange(1.0, config.state_rank + 1))
        assert block.dt_proj.weight.abs().max() <= config.dt_width**-0.5
    else:
        step_sizes = nn.functional.softplus(block.dt_bias)
    assert (step_sizes >= config.dt_min * 0.999).all()
    assert (step_sizes <= config.dt_max * 1.001).all()
    assert step_sizes.std() > 0
    if isinstance(block, Mamba2):
        assert (block.A_log.exp() >= 1).all()
        assert (block.A_log.exp() <= 16).all()
    if isinstance(block, Mamba3):
        assert (block.B_bias == 1).all()
        assert (block.C_bias == 1).all()
    assert (block.D == 1).all()
    assert block.in_proj.weight.abs().max() <= config.d_model**-0.5
    assert block.out_proj.weight.abs().max() <= block.out_proj.in_features**-0.5


@pytest.mark.parametrize("config", [Mamba1Config(d_model=64), Mamba2Config(d_model=64), Mamba3Config(d_model=64)])
def test_initialisation_survives_what_trainers_do(config):
    """`model.apply` with reset_parameters, the official re-initialisation of biases, and a start on the meta device."""
    block = MAKE[type(config)](config)
    starts_officially(block)

    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(77.0)
    nn.Sequential(block).apply(
        lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None
    )
    starts_officially(block)

    def official(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None and not getattr(module.bias, "_no_reinit", False):
            nn.init.zeros_(module.bias)

    block.apply(official)
    starts_officially(block)

    with torch.device("meta"):
        empty = MAKE[type(config)](config)
    assert empty.in_proj.weight.is_meta
    empty = empty.to_empty(device="cpu")
    empty.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    starts_officially(empty)


def test_mimo_starts():
    block = Mamba3(Mamba3Config(d_model=64, is_mimo=True, mimo_rank=4))
    assert (block.mimo_x == 0.25).all()
    assert (block.mimo_o == 0.25).all()
    assert (block.mimo_z == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_decays_and_skips_stay_wide(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for config in (Mamba1Config(d_model=64), Mamba2Config(d_model=64), Mamba3Config(d_model=64)):
        block = MAKE[type(config)](config, dtype=dtype)
        assert block.in_proj.weight.dtype == dtype
        assert block.D.dtype == wide
        y, cache = block(torch.randn(1, 3, 64, dtype=dtype))
        assert y.dtype == dtype
        state = cache.ssm_bir if isinstance(block, Mamba1) else cache.ssm_bhpr
        assert state.dtype == wide
        assert block.step(torch.randn(1, 64, dtype=dtype), cache)[0].dtype == dtype
