"""The options of hybrid models' Mamba blocks equal their formulas, and transformers' mixers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocks import make_block, random_cache, tokens
from compare import check, with_gradients
from mambakit import Mamba1, Mamba1Config, Mamba2, Mamba2Config, SsdPath
from oracles.blocks import mamba1_block, mamba2_block

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()


def oracle(block: Any, x: Tensor) -> Tensor:
    config, weights = block.config, dict(block.named_parameters())
    if isinstance(block, Mamba1):
        return mamba1_block(weights, x, config.norm_eps if config.dt_b_c_norm else None)
    return mamba2_block(weights, x, config.ngroups, config.ssm_multipliers or (1, 1, 1, 1, 1), config.norm_eps)


@pytest.mark.parametrize("name", ["mamba1", "mamba1-normed", "mamba1-rms", "mamba2", "mamba2-multipliers"])
def test_equals_the_formula(name):
    block = make_block(name)
    x = tokens(block, 2, 9)
    got = with_gradients(block, lambda block, x: block(x)[0], x)
    check(1e-10, got, with_gradients(block, oracle, x))


@pytest.mark.parametrize("name", ["mamba1-normed", "mamba1-rms", "mamba2-multipliers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow(name, dtype):
    """Norms and multipliers are as exact as the dtype's numbers, and give its dtype back; autocast included."""
    block = make_block(name, torch.float32)
    wide = copy.deepcopy(block).double()
    x = tokens(wide, 2, 9)
    with torch.no_grad():
        want = {"y": wide(x)[0]}
        with torch.autocast("cpu", dtype):
            y, cache = block(x.float())
            assert cache[1].dtype == torch.float32
        check(5e-2, {"y": y}, want)
        assert y.dtype == dtype
        y, _ = block.to(dtype)(x.to(dtype))
        assert y.dtype == dtype
    check(5e-2, {"y": y}, want)


@pytest.mark.parametrize("name", ["mamba1-normed", "mamba1-rms", "mamba2-multipliers"])
def test_the_fused_step_is_taken(name, monkeypatch):
    """And equals torch's operators."""
    block = make_block(name, torch.float32)
    cache, x = random_cache(block, 3), tokens(block, 3, 1)
    taken, step = [], type(block).fused_step
    monkeypatch.setattr(type(block), "fused_step", lambda *given: taken.append(step(*given)) or taken[-1])
    with torch.no_grad():
        y, after = block(x, cache)
        want, state = block(x, cache, path=SsdPath(backend="torch"))
    assert len(taken) == 1
    check(1e-5, {"y": y, **after._asdict()}, {"y": want, **state._asdict()})


def test_norms_do_not_decay_and_are_no_maps():
    block: Any = make_block("mamba1-normed")
    norms = {id(norm.weight) for norm in (block.dt_norm, block.B_norm, block.C_norm)}
    for muon in (False, True):
        groups = block.param_groups(muon=muon)
        of_norms = [g for g in groups if norms & {id(p) for p in g["params"]}]
        assert [(g["optimizer"], g["weight_decay"]) for g in of_norms] == [("adamw", 0.0)]
    assert not any("norm" in name for name, _ in make_block("mamba1-rms").named_parameters())
    block = make_block("mamba2-multipliers")
    maps = block.independent_maps["in_proj"]
    assert maps == {"z0": 4, "x0": 4, "z": 8, "x": 8, "B": 4, "C": 4, "dt": 2}


def test_multipliers_of_one_are_none():
    torch.manual_seed(0)
    plain = Mamba2(Mamba2Config(d_model=8, state_rank=4, per_head_dim=4))
    ones = Mamba2(Mamba2Config(d_model=8, state_rank=4, per_head_dim=4, d_inner=16, ssm_multipliers=(1, 1, 1, 1, 1)))
    ones.load_state_dict(plain.state_dict())
    x = tokens(plain, 2, 5)
    assert torch.equal(plain(x)[0], ones(x)[0])


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
JAMBA = {"b_layernorm": "B_norm", "c_layernorm": "C_norm", "dt_layernorm": "dt_norm"}


def jamba() -> tuple[nn.Module, Any]:
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer

    config = transformers.JambaConfig(
        **SIZES, mamba_d_state=3, mamba_dt_rank=2, rms_norm_eps=1e-3, mamba_proj_bias=True
    )
    ours = Mamba1Config(d_model=8, state_rank=3, dt_rank=2, dt_b_c_norm=True, norm_eps=1e-3, bias=True)
    return JambaMambaMixer(config, 0), ours


def falcon_mamba() -> tuple[nn.Module, Any]:
    config = transformers.FalconMambaConfig(**SIZES, state_size=3, time_step_rank=2, mixer_rms_eps=1e-4)
    norms = {"dt_b_c_norm": True, "dt_b_c_norm_weight": False, "norm_eps": 1e-4}
    return transformers.FalconMambaModel(config).layers[0].mixer, Mamba1Config(
        d_model=8, state_rank=3, dt_rank=2, **norms
    )


def falcon_h1(normed: bool) -> tuple[nn.Module, Any]:
    heads = {"mamba_n_heads": 6, "mamba_d_head": 2, "mamba_n_groups": 2, "mamba_d_state": 3, "mamba_d_ssm": 12}
    multipliers = [0.5, 1.25, 0.7, 1.5, 2.0]
    scales = {"ssm_multipliers": multipliers, "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.5}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8}
    config = transformers.FalconH1Config(
        **{**SIZES, **heads, **scales, **attention, "mamba_rms_norm": normed, "rms_norm_eps": 1e-3},
        **{"mamba_proj_bias": True, "projectors_bias": True},
    )
    # Of a whole model: its multipliers are written when this is made.
    mixer = transformers.FalconH1Model(config).layers[0].mamba
    sizes = {"d_model": 8, "d_inner": 12, "per_head_dim": 2, "ngroups": 2, "state_rank": 3, "bias": True}
    norm = {"rmsnorm": normed, "norm_before_gate": True, "norm_eps": 1e-3}
    return mixer, Mamba2Config(**sizes, **norm, ssm_multipliers=tuple(multipliers), in_scale=0.8)


MIXERS = {
    "jamba": jamba,
    "falcon_mamba": falcon_mamba,
    "falcon_h1": lambda: falcon_h1(True),
    "falcon_h1-gate": lambda: falcon_h1(False),
}


@pytest.mark.parametrize("name", MIXERS)
def test_equals_transformers(name):
    torch.manual_seed(0)
    mixer, config = MIXERS[name]()
    block = (Mamba1 if isinstance(config, Mamba1Config) else Mamba2)(config)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    weights = {}
    for key, tensor in mixer.state_dict().items():
        module, _, rest = key.partition(".")
        weights[f"{JAMBA[module]}.{rest}" if module in JAMBA else key] = tensor
    weights.pop("mup_vector", None)
    block.load_state_dict(weights)
    x = torch.randn(2, 11, 8)
    with torch.no_grad():
        want = mixer.eval()(x)
        got, cache = block(x[:, :10])
        last, _ = block.step(x[:, 10], cache)
    check(1e-5, {"y": got, "last": last}, {"y": want[:, :10], "last": want[:, 10]}, floor=1e-3)
