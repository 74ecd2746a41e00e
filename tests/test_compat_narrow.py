"""The official functions in narrow dtypes: what they compute from such inputs is rounded once, at the end."""

from collections.abc import Iterator

import pytest
import torch

from mambakit.ops.backends import use_backend
from test_compat import MAMBA3, installed, official  # noqa: F401 - a fixture

B, S, H, P, R, M = 2, 70, 4, 8, 16, 2
NARROW = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, params=["auto", "torch"])
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with use_backend(request.param):
        yield


def check_once_rounded(call, dtype, narrow, wide=None):
    """`call(**tensors)` returns its output last in `dtype`; float32 inputs of the same values give its exact digits."""
    narrow = {name: t.to(dtype) for name, t in narrow.items()}
    got = call(**{name: t.clone() for name, t in narrow.items()}, **(wide or {}))
    want = call(**{name: t.float() for name, t in narrow.items()}, **(wide or {}))
    assert (got.dtype, want.dtype) == (dtype, torch.float32)
    assert torch.equal(got, want.to(dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("heads", ["none", "apart", "tied"])
def test_selective_state_update(heads, dtype):
    update = official("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
    axes, group = ((P,), ()) if heads == "none" else ((H, P), (1,))
    given = {name: torch.randn(B, *axes) for name in ("x", "dt", "z")}
    given |= {"B": torch.randn(B, *group, R), "C": torch.randn(B, *group, R), "D": torch.randn(axes)}
    A = -torch.rand(*axes, R)
    if heads == "tied":
        A = A[:, :1, :1].expand(H, P, R)
    state = torch.randn(B, *axes, R)

    def call(dt, **x):
        dt = dt[..., :1].expand(B, H, P) if heads == "tied" else dt
        return update(state=state.clone(), A=A, dt=dt, **x, dt_softplus=True)

    check_once_rounded(call, dtype, given)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_mamba_chunk_scan_combined(dtype):
    scan = official("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    given = {"x": torch.randn(B, S, H, P), "z": torch.randn(B, S, H, P), "B": torch.randn(B, S, 1, R)}
    given |= {"C": torch.randn(B, S, 1, R), "D": torch.randn(H), "dt": torch.rand(B, S, H)}
    check_once_rounded(lambda **x: scan(A=-torch.ones(H), chunk_size=16, **x), dtype, given)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("parts", [(), ("D",), ("z",), ("D", "z")], ids=str)
def test_selective_scan_fn(parts, dtype):
    scan = official("mamba_ssm", "selective_scan_fn")
    more = {"D": torch.randn(P), "z": torch.randn(B, P, S)}
    given = {"u": torch.randn(B, P, S), "delta": torch.rand(B, P, S), "B": torch.randn(B, R, S)}
    given |= {"C": torch.randn(B, R, S)} | {name: more[name] for name in parts}
    check_once_rounded(lambda **x: scan(A=-torch.ones(P, R), **x), dtype, given)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("tokens", [S, 1])
def test_mamba3(tokens, dtype):
    """Without biases and rotations, which are rounded to the dtype of `V`."""
    combined = official(f"{MAMBA3}.mamba3_siso_combined", "mamba3_siso_combined")
    mimo = official("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo", "mamba3_mimo")
    given = {"V": torch.randn(B, tokens, H, P), "Z": torch.randn(B, tokens, H, P), "D": torch.randn(H)}
    given |= {"Q": torch.randn(B, tokens, 1, R), "K": torch.randn(B, tokens, 1, R)}
    dt = torch.rand(B, H, tokens)
    steps = {"ADT": -dt, "DT": dt, "Trap": torch.randn(B, H, tokens), "Angles": torch.zeros(B, tokens, H, R // 2)}

    def siso(**x):
        return combined(**x, **steps, Q_bias=torch.zeros(H, R), K_bias=torch.zeros(H, R))

    def several(Q, K, V, **x):
        ranks = {"Q": Q[:, :, None].expand(-1, -1, M, -1, -1), "K": K[:, :, None].expand(-1, -1, M, -1, -1)}
        biases = {"Q_bias": torch.zeros(H, M, R), "K_bias": torch.zeros(H, M, R)}
        maps = {"MIMO_V": torch.ones(H, M, P), "MIMO_Z": torch.full((H, M, P), 0.7), "MIMO_Out": torch.ones(H, M, P)}
        sizes = {"chunk_size": 16, "rotary_dim_divisor": 2, "dtype": V.dtype}
        return mimo(**ranks, V=V, **x, **steps, **biases, **maps, **sizes)

    check_once_rounded(siso, dtype, given)
    check_once_rounded(several, dtype, given)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_mamba3_step_fn(dtype):
    step = official("mamba_ssm.ops.cute.mamba3.mamba3_step_fn", "mamba3_step_fn")
    given = {name: torch.randn(B, H, P) for name in ("Xstate", "x", "z")}
    given |= {name: torch.randn(B, M, H, R) for name in ("Bstate", "B", "C")} | {"D": torch.randn(H)}
    given |= {name: torch.randn(M, H, P) for name in ("xproj", "zproj", "outproj")}
    dt = torch.rand(B, H)

    def call(x, **more):
        out = torch.empty_like(x)
        step(torch.ones(B, H, P, R), A=-dt, dt=dt, trap=torch.sigmoid(dt), x=x, out=out, **more)
        return out

    check_once_rounded(call, dtype, given)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("tokens", [S, 1])
def test_causal_conv1d_fn(tokens, dtype):
    convolve = official("causal_conv1d", "causal_conv1d_fn")
    given = {"x": torch.randn(B, P, tokens), "weight": torch.randn(P, 4), "bias": torch.randn(P)}
    check_once_rounded(lambda **x: convolve(**x, activation="silu"), dtype, given)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_causal_conv1d_update(dtype):
    update = official("causal_conv1d", "causal_conv1d_update")
    given = {"x": torch.randn(B, P), "weight": torch.randn(P, 4), "bias": torch.randn(P)}
    given |= {"conv_state": torch.randn(B, P, 3)}
    check_once_rounded(lambda **x: update(**x, activation="silu"), dtype, given)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("before", [False, True])
def test_gated_norms(before, dtype):
    norm = official("mamba_ssm.ops.triton.layernorm_gated", "layernorm_fn")
    given = {"x": torch.randn(B, S, 8), "z": torch.randn(B, S, 8), "weight": torch.randn(8), "bias": torch.randn(8)}
    for is_rms_norm in (False, True):
        check_once_rounded(lambda **x: norm(**x, norm_before_gate=before, is_rms_norm=is_rms_norm), dtype, given)  # noqa: B023
