"""Argument combinations of the official functions against plain loops in float64, values and gradients."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from compare import check, gradients, leaves
from oracles.elementwise import conv_loop, norm_loop
from oracles.selective_scan import selective_scan_loop
from oracles.ssd import core
from test_compat import installed, official  # noqa: F401 - a fixture

VALUE, GRADIENT = 1e-10, 1e-9
B, S, G, R, K, H, P = 2, 7, 2, 3, 4, 4, 2
I = H * P
INF = float("inf")


def drawn(**shapes):
    """Float64 tensors by name; None stays None."""
    return {n: None if s is None else torch.randn(*s, dtype=torch.float64) for n, s in shapes.items()}


def agree(got, want, given):
    """Two functions of the same named tensors: equal outputs, and equal gradients of every tensor."""
    one, two = (leaves({n: t for n, t in given.items() if t is not None}) for _ in range(2))
    absent = {n: None for n, t in given.items() if t is None}
    outputs, expected = got(**one, **absent), want(**two, **absent)
    assert outputs.keys() == expected.keys()
    check(VALUE, outputs, expected)
    heads = {n: torch.randn_like(t) for n, t in expected.items() if t.requires_grad}
    check(GRADIENT, gradients(outputs, heads, one), gradients(expected, heads, two))


def silu(x):
    return x / (1 + torch.exp(-x))


def step_size(dt, bias, softplus, limit=(-INF, INF)):
    dt = dt if bias is None else dt + bias
    return (torch.log1p(torch.exp(dt)) if softplus else dt).clamp(*limit)


SHAPES = {"const": (I, R), "shared": (B, R, S), "groups": (B, G, R, S), "more": (B, H, R, S)}


def as_bsgr(x):
    if x.dim() == 2:
        return x.expand(B, S, *x.shape)
    return (x[:, None] if x.dim() == 3 else x).permute(0, 3, 1, 2)


SCANS = [
    (b, c, *flags)
    for (b, c), flags in product(
        [("const", "const"), ("const", "groups"), ("shared", "shared"), ("shared", "groups"), ("groups", "more")],
        [
            (True, True, True, True),
            (False, False, False, False),
            (True, False, False, True),
            (False, True, True, False),
        ],
    )
]


@pytest.mark.parametrize(("b", "c", "skip", "gate", "bias", "softplus"), SCANS)
def test_selective_scan_fn(b, c, skip, gate, bias, softplus):
    scan = official("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    given = drawn(
        u=(B, I, S), B=SHAPES[b], C=SHAPES[c], D=(I,) if skip else None, z=(B, I, S) if gate else None,
        delta_bias=(I,) if bias else None,
    )  # fmt: skip
    given |= {"A": -torch.rand(I, R).double() - 0.1, "delta": torch.rand(B, I, S).double()}

    def got(**x):
        out, state = scan(**x, delta_softplus=softplus, return_last_state=True)
        assert out.is_contiguous()
        return {"y": out, "state": state}

    def want(u, delta, A, B, C, D, z, delta_bias):
        dt = step_size(delta.mT, delta_bias, softplus)
        groups = max(as_bsgr(t).shape[2] for t in (B, C))
        b_bsgr, c_bsgr = (t.repeat_interleave(groups // t.shape[2], 2) for t in (as_bsgr(B), as_bsgr(C)))
        y, state = selective_scan_loop(u.mT, dt, A, b_bsgr, c_bsgr)
        y = y.mT if D is None else y.mT + D[:, None] * u
        return {"y": y if z is None else y * silu(z), "state": state}

    agree(got, want, given)


@pytest.mark.parametrize("constant", [False, True])
def test_selective_scan_fn_with_complex_A(constant):
    scan = official("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    u, delta, z = torch.randn(B, I, S).double(), torch.rand(B, I, S).double(), torch.randn(B, I, S).double()
    A = torch.complex(-torch.rand(I, R) - 0.1, torch.randn(I, R)).to(torch.complex128)
    pairs = torch.randn(2, B, G, R, S, 2).double()
    if constant:
        b_given, c_given = torch.randn(2, I, R, dtype=torch.complex128)
        b_bsgr, c_bsgr = as_bsgr(b_given), as_bsgr(c_given)
    else:
        b_given, c_given = pairs.flatten(-2)
        b_bsgr, c_bsgr = (torch.view_as_complex(t.contiguous()).permute(0, 3, 1, 2) for t in pairs)
    out, state = scan(u, delta, A, b_given, c_given, z=z, return_last_state=True)
    y, last = selective_scan_loop(u.mT, delta.mT, A, b_bsgr, c_bsgr)
    check(VALUE, {"y": out, "state": state}, {"y": y.mT * silu(z), "state": last})


CONVS = list(
    product([True, False], [None, "silu", "swish"], ["plain", "initial", "final", "both", "packed"], [True, False])
)


@pytest.mark.parametrize(("bias", "activation", "states", "channels_last"), CONVS)
def test_causal_conv1d_fn(bias, activation, states, channels_last):
    conv = official("causal_conv1d", "causal_conv1d_fn")
    given = drawn(x=(B, I, S), weight=(I, K), bias=(I,) if bias else None)
    given |= drawn(initial_states=(B, I, K - 1) if states in ("initial", "both") else None)
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 0, 0, 3]]) if states == "packed" else None
    final = states in ("final", "both")

    def got(x, weight, bias, initial_states):
        x = x.mT.contiguous().mT if channels_last else x
        out = conv(x, weight, bias, seq_idx, initial_states, final, activation=activation)
        return {"y": out[0], "state": out[1]} if final else {"y": out}

    def want(x, weight, bias, initial_states):
        window = None if initial_states is None else F.pad(initial_states, (1, 0))
        if seq_idx is None:
            y, window = conv_loop(x.mT, weight, bias, window)
        else:
            parts = [[conv_loop(x[r : r + 1, :, a:b].mT, weight, bias)[0] for a, b in spans]
                     for r, spans in enumerate((((0, 2), (2, 5), (5, 7)), ((0, 4), (4, 6), (6, 7))))]  # fmt: skip
            y = torch.cat([torch.cat(row, 1) for row in parts])
        y = y.mT if activation is None else silu(y.mT)
        return {"y": y, "state": window[:, :, 1:]} if final else {"y": y}

    agree(got, want, given)


def test_causal_conv1d_fn_writes_final_states():
    conv = official("causal_conv1d", "causal_conv1d_fn")
    x, weight, target = torch.randn(B, I, 2), torch.randn(I, K), torch.full((B, I, K - 1), 9.0)
    _, states = conv(x, weight, return_final_states=True, final_states_out=target)
    assert states is target
    torch.testing.assert_close(target, F.pad(x, (1, 0)))


UPDATES = list(product(["token", "tokens"], [K - 1, K, K + 2], ["plain", "ring", "rows"], [None, "silu"]))


@pytest.mark.parametrize(("tokens", "state_len", "order", "activation"), UPDATES)
def test_causal_conv1d_update(tokens, state_len, order, activation):
    """Several updates in a row equal one convolution of everything; the state ends with the newest inputs."""
    update = official("causal_conv1d", "causal_conv1d_update")
    x, weight, bias = torch.randn(B, I, 6).double(), torch.randn(I, K).double(), torch.randn(I).double()
    past = torch.randn(B, I, state_len).double()
    window = F.pad(past, (1, 0))[:, :, -K:]
    want, _ = conv_loop(x.mT, weight, bias, window)
    want = want.mT if activation is None else silu(want.mT)
    seen = torch.tensor([3, 11]) if order == "ring" else None
    rows = torch.tensor([2, 0]) if order == "rows" else None
    state = past.clone()
    if seen is not None:
        state = torch.stack([past[r].roll(int(seen[r]), dims=-1) for r in range(B)])
    if rows is not None:
        state = torch.full((4, I, state_len), 7.0).double()
        state[rows] = past
    address, y = state.data_ptr(), []
    for t in range(0, 6, 1 if tokens == "token" else 3):
        piece = x[..., t] if tokens == "token" else x[..., t : t + 3]
        out = update(piece, state, weight, bias, activation, seen, rows)
        y.append(out[..., None] if tokens == "token" else out)
        seen = None if seen is None else seen + y[-1].shape[-1]
    assert state.data_ptr() == address
    newest = torch.cat([past, x], -1)[..., -state_len:]
    if seen is not None:
        newest = torch.stack([newest[r].roll(int(seen[r]), dims=-1) for r in range(B)])
    if rows is not None:
        assert bool((state[[1, 3]] == 7).all())
        state = state[rows]
    check(VALUE, {"y": torch.cat(y, -1), "state": state}, {"y": want, "state": newest})


def test_causal_conv1d_varlen_states():
    states = official("causal_conv1d.causal_conv1d_varlen", "causal_conv1d_varlen_states")
    x, bounds = torch.randn(9, I), torch.tensor([0, 5, 6, 6, 9], dtype=torch.int32)
    got = states(x, bounds, K)
    pieces = [x[0:5], x[5:6], x[6:6], x[6:9]]
    want = torch.stack([F.pad(piece, (0, 0, K, 0))[-K:].T for piece in pieces])
    torch.testing.assert_close(got, want)


LIMIT = (0.2, 0.9)
SSD = [
    # D, gate, bias, softplus, limit, initial states, packing
    ("h", True, True, True, (0.0, INF), False, None),
    ("hp", False, True, True, LIMIT, True, None),
    (None, True, False, False, (0.0, INF), True, "seq_idx"),
    ("h", False, False, True, LIMIT, False, "seq_idx"),
    ("hp", True, True, False, (0.0, INF), True, "cu_seqlens"),
    (None, False, True, True, LIMIT, False, "both"),
]


@pytest.mark.parametrize(("skip", "gate", "bias", "softplus", "limit", "initial", "packing"), SSD)
def test_mamba_chunk_scan_combined(skip, gate, bias, softplus, limit, initial, packing):
    scan = official("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    b = 1 if packing in ("cu_seqlens", "both") else B
    given = drawn(
        x=(b, S, H, P), B=(b, S, G, R), C=(b, S, G, R), D={"h": (H,), "hp": (H, P), None: None}[skip],
        z=(b, S, H, P) if gate else None, dt_bias=(H,) if bias else None,
        initial_states=(b, H, P, R) if initial else None,
    )  # fmt: skip
    given |= {"A": -torch.rand(H).double(), "dt": torch.rand(b, S, H).double()}
    bounds = torch.tensor([0, 3, 4, 4, 7]) if packing in ("cu_seqlens", "both") else None
    # The second row does not start with the id 0, so its initial state counts for nothing.
    ids = torch.tensor([[0, 0, 0, 1, 3, 3, 3], [2, 2, 4, 4, 4, 4, 4]])[:b]
    options = {"dt_softplus": softplus, "dt_limit": limit, "return_final_states": True}
    options |= {"seq_idx": ids.int()} if packing in ("seq_idx", "both") else {}
    options |= {} if bounds is None else {"cu_seqlens": bounds, "return_varlen_states": True}

    def got(**x):
        return dict(zip(("y", "state", "states"), scan(**x, chunk_size=4, **options), strict=False))

    def want(x, dt, A, B, C, D, z, dt_bias, initial_states):
        dt = step_size(dt, dt_bias, softplus, limit)
        if packing == "seq_idx" and initial_states is not None:
            initial_states = initial_states * torch.tensor([1.0, 0.0])[:, None, None, None]
        per_rank = [t[:, :, None] for t in (x, B, C)]
        y, state = core(*per_rank, dt * A, dt, dt, initial_states, None if packing is None else ids)
        y = y[:, :, 0] if D is None else y[:, :, 0] + (D if D.dim() == 2 else D[:, None]) * x
        out = {"y": y if z is None else y * silu(z), "state": state}
        if bounds is not None:
            states = []
            for start, stop in ((0, 3), (3, 4), (4, 4), (4, 7)):
                part = [t[:, start:stop] for t in (*per_rank, dt * A, dt, dt)]
                states.append(core(*part, initial_states if start == 0 else None)[1][0])
            out["states"] = torch.stack(states)
        return out

    agree(got, want, given)


SPLITS = [
    # norm, gate after norm, projection, D, MLP channels, activation, initial states, packed
    (True, False, "bias", "h", 0, "silu", False, False),
    (True, True, "plain", "hp", 3, "swish", True, False),
    (False, False, None, "h", 2, "silu", False, True),
    (False, True, "bias", "hp", 0, None, True, True),
]


@pytest.mark.parametrize(("norm", "before", "projection", "skip", "mlp", "activation", "initial", "packed"), SPLITS)
def test_mamba_split_conv1d_scan_combined(norm, before, projection, skip, mlp, activation, initial, packed):
    block = official("mamba_ssm.ops.triton.ssd_combined", "mamba_split_conv1d_scan_combined")
    v = I + 2 * G * R
    given = drawn(
        zxbcdt=(B, S, 2 * mlp + I + v + H), conv1d_weight=(v, K), conv1d_bias=(v,), dt_bias=(H,),
        D=(H,) if skip == "h" else (H, P), initial_states=(B, H, P, R) if initial else None,
        rmsnorm_weight=(I,) if norm else None, outproj_weight=(5, mlp + I) if projection else None,
        outproj_bias=(5,) if projection == "bias" else None,
    )  # fmt: skip
    given["A"] = -torch.rand(H).double()
    ids = torch.tensor([[0] * 3 + [1] * 4] * B)

    def got(**x):
        out, state = block(
            **x, chunk_size=4, seq_idx=ids if packed else None, return_final_states=True, activation=activation,
            headdim=P if skip == "h" else None, ngroups=G, norm_before_gate=before, rmsnorm_eps=1e-3,
        )  # fmt: skip
        return {"y": out, "state": state}

    def want(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, rmsnorm_weight, **after):
        z0, x0, z, xbc, dt = zxbcdt.split((mlp, mlp, I, v, H), -1)
        spans = ((0, 3), (3, S)) if packed else ((0, S),)
        xbc = torch.cat([conv_loop(xbc[:, a:b], conv1d_weight, conv1d_bias)[0] for a, b in spans], 1)
        xbc = xbc if activation is None else silu(xbc)
        x, b, c = (t.unflatten(-1, (n, -1)) for t, n in zip(xbc.split((I, G * R, G * R), -1), (H, G, G), strict=True))
        dt = step_size(dt, dt_bias, True)
        per_rank = [t[:, :, None] for t in (x, b, c)]
        y, state = core(*per_rank, dt * A, dt, dt, initial_states, ids if packed else None)
        y = (y[:, :, 0] + (D if D.dim() == 2 else D[:, None]) * x).flatten(-2)
        y = norm_loop(y, z, rmsnorm_weight, 1e-3, I // G, before) if norm else y * silu(z)
        y = torch.cat([silu(z0) * x0, y], -1)
        if after["outproj_weight"] is not None:
            y = y @ after["outproj_weight"].T
        return {"y": y if after["outproj_bias"] is None else y + after["outproj_bias"], "state": state}

    agree(got, want, given)


@pytest.mark.parametrize(("per_channel", "limit"), [(False, (0.0, INF)), (True, LIMIT)])
def test_ssd_selective_scan(per_channel, limit):
    scan = official("mamba_ssm.ops.triton.ssd_combined", "ssd_selective_scan")
    given = drawn(x=(B, S, H, P), B=(B, S, G, R), C=(B, S, G, R), D=(H, P) if per_channel else (H,), z=(B, S, H, P))
    given |= {"dt": torch.rand(B, S, H, P).double() if per_channel else torch.rand(B, S, H).double()}
    given |= drawn(dt_bias=(H, P) if per_channel else (H,))
    given["A"] = -torch.rand(I, R).double() if per_channel else -torch.rand(H).double()

    def want(x, dt, A, B, C, D, z, dt_bias):
        wide = [t if per_channel else t[..., None].expand(*t.shape, P) for t in (dt, dt_bias, D)]
        dt = step_size(wide[0], wide[1], True, limit)
        A = A if per_channel else A[:, None, None].expand(H, P, R).flatten(0, 1)
        y, _ = selective_scan_loop(x.flatten(2), dt.flatten(2), A, B, C)
        return {"y": (y.unflatten(-1, (H, P)) + wide[2] * x) * silu(z)}

    agree(lambda **x: {"y": scan(**x, dt_softplus=True, dt_limit=limit)}, want, given)
