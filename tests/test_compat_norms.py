"""The official norms, Mamba-1's inner function and `selective_state_update` against plain loops in float64."""

from itertools import product

import pytest
import torch

from compare import check
from oracles.elementwise import conv_loop, norm_loop
from oracles.selective_scan import selective_scan_loop
from test_compat import installed, official  # noqa: F401 - a fixture
from test_compat_arguments import VALUE, B, G, H, I, K, P, R, S, agree, drawn, silu, step_size

EPS = 1e-3


def centred(x, weight, bias, group_size=None, z=None, before=True):
    """LayerNorm: RMSNorm of what is left after the mean of each group."""
    size = group_size or x.shape[-1]
    x = x if z is None or before else x * silu(z)
    groups = x.unflatten(-1, (-1, size))
    y = norm_loop((groups - groups.mean(-1, keepdim=True)).flatten(-2), None, weight, EPS, size)
    y = y if bias is None else y + bias
    return y if z is None or not before else y * silu(z)


ADDS = [
    # residual, x1, weight1, rowscale, prenorm
    (False, False, False, False, False),
    (True, False, False, True, True),
    (True, True, True, False, True),
    (False, True, False, False, False),
    (True, False, True, False, False),
]


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("residual", "x1", "weight1", "rowscale", "prenorm"), ADDS)
def test_layer_norm_fn(rms, bias, residual, x1, weight1, rowscale, prenorm):
    norm = official("mamba_ssm.ops.triton.layer_norm", "rms_norm_fn" if rms else "layer_norm_fn")
    shape = (B, S, I)
    given = drawn(x=shape, weight=(I,), bias=(I,) if bias else None, residual=shape if residual else None)
    given |= drawn(
        x1=shape if x1 else None, weight1=(I,) if weight1 else None, bias1=(I,) if weight1 and bias else None
    )
    given |= drawn(rowscale=(B, S) if rowscale else None)

    def got(**x):
        out = norm(**x, eps=EPS, prenorm=prenorm)
        out = out if isinstance(out, tuple) else (out,)
        names = ["y"] + ["y1"] * weight1 + ["sum"] * prenorm
        return dict(zip(names, out, strict=True))

    def want(x, weight, bias, residual, x1, weight1, bias1, rowscale):
        for factor, term in ((rowscale, None), (None, x1), (None, residual)):
            x = x if factor is None else x * factor[..., None]
            x = x if term is None else x + term

        def normed(weight, bias):
            y = norm_loop(x, None, weight, EPS) if rms else centred(x, weight, None)
            return y if bias is None else y + bias

        out = {"y": normed(weight, bias)}
        out |= {} if weight1 is None else {"y1": normed(weight1, bias1)}
        return out | ({"sum": x} if prenorm else {})

    agree(got, want, given)


def test_the_order_of_arguments_in_1_x():
    """Positional calls of both generations; the old ones have `eps` where the new ones have `x1`."""
    x, weight, bias, residual = torch.randn(3, 4), torch.randn(4), torch.randn(4), torch.randn(3, 4)
    new = official("mamba_ssm.ops.triton.layer_norm", "layer_norm_fn")(x, weight, bias, residual, None, None, None, EPS)
    old = official("mamba_ssm.ops.triton.layernorm", "layer_norm_fn")(x, weight, bias, residual, EPS)
    torch.testing.assert_close(old, new)
    old = official("mamba_ssm.ops.triton.layernorm", "rms_norm_fn")(x, weight, bias, residual, True, True, EPS)
    new = official("mamba_ssm.ops.triton.layer_norm", "rms_norm_fn")(
        *(x, weight, bias, residual, None, None, None, EPS, 0.0, None, True, True)
    )
    torch.testing.assert_close(old, new)


@pytest.mark.parametrize(("given", "in_fp32", "kept"), [
    (None, False, torch.bfloat16), (None, True, torch.float32), (torch.float32, False, torch.float32),
])  # fmt: skip
def test_dtype_of_the_residual(given, in_fp32, kept):
    norm = official("mamba_ssm.ops.triton.layer_norm", "RMSNorm")(I, dtype=torch.bfloat16)
    x = torch.randn(3, I, dtype=torch.bfloat16)
    residual = None if given is None else torch.randn(3, I, dtype=given)
    y, total = norm(x, residual=residual, prenorm=True, residual_in_fp32=in_fp32)
    assert (y.dtype, total.dtype) == (torch.bfloat16, kept)
    torch.testing.assert_close(total.float(), x.float() + (0 if residual is None else residual))


def test_dropout_says_what_it_kept():
    norm = official("mamba_ssm.ops.triton.layer_norm", "layer_norm_fn")
    reference = official("mamba_ssm.ops.triton.layer_norm", "layer_norm_ref")
    x, x1, weight, bias = torch.randn(50, I), torch.randn(50, I), torch.randn(I), torch.randn(I)
    y, total, mask, mask1 = norm(x, weight, bias, x1=x1, dropout_p=0.3, prenorm=True, return_dropout_mask=True)
    assert 0.6 < mask.float().mean() < 0.8
    assert not torch.equal(mask, mask1)
    torch.testing.assert_close(total, (x * mask + x1 * mask1) / 0.7)
    again = reference(x, weight, bias, x1=x1, dropout_p=0.3, dropout_mask=mask, dropout_mask1=mask1)
    torch.testing.assert_close(y, again)
    module = official("mamba_ssm.ops.triton.layer_norm", "RMSNorm")(I, dropout_p=0.5)
    assert not torch.equal(module(x), module.eval()(x))


GATED = list(product([True, False], [True, False], [None, I // 2], [True, False], [True, False]))


@pytest.mark.parametrize(("rms", "before", "group_size", "gate", "bias"), GATED)
def test_layernorm_gated(rms, before, group_size, gate, bias):
    norm = official("mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn" if rms else "layernorm_fn")
    given = drawn(x=(B, S, I), weight=(I,), bias=(I,) if bias else None, z=(B, S, I) if gate else None)

    def want(x, weight, bias, z):
        if not rms:
            return {"y": centred(x, weight, bias, group_size, z, before)}
        y = norm_loop(x if z is None or before else x * silu(z), None, weight, EPS, group_size)
        y = y if bias is None else y + bias
        return {"y": y if z is None or not before else y * silu(z)}

    agree(lambda **x: {"y": norm(**x, eps=EPS, group_size=group_size, norm_before_gate=before)}, want, given)
    if bias and not rms:
        module = official("mamba_ssm.ops.triton.layernorm_gated", "LayerNorm")(I, EPS, group_size, before)
        assert dict(module.named_parameters()).keys() == {"weight", "bias"}


def test_layer_norm_linear_fn():
    fn = official("mamba_ssm.ops.triton.layer_norm", "layer_norm_linear_fn")
    given = drawn(x=(S, I), norm_weight=(I,), norm_bias=(I,), linear_weight=(3, I), linear_bias=(3,), residual=(S, I))

    def want(x, norm_weight, norm_bias, linear_weight, linear_bias, residual):
        total = x + residual
        return {"y": centred(total, norm_weight, norm_bias) @ linear_weight.T + linear_bias, "sum": total}

    agree(lambda **x: dict(zip(("y", "sum"), fn(**x, eps=EPS, prenorm=True), strict=True)), want, given)


RANK = 2
INNER = [
    # B given, C given, projection biases, norms of B, C and dt, softplus, out bias
    (False, False, False, False, True, True),
    (False, False, True, True, True, False),
    (True, False, False, False, False, True),
    (True, True, False, False, True, False),
]


@pytest.mark.parametrize(("b_given", "c_given", "biases", "norms", "softplus", "out_bias"), INNER)
def test_mamba_inner_fn(b_given, c_given, biases, norms, softplus, out_bias):
    inner = official("mamba_ssm", "mamba_inner_fn")
    given = drawn(
        xz=(B, 2 * I, S), conv1d_weight=(I, 1, K), conv1d_bias=(I,), x_proj_weight=(RANK + 2 * R, I),
        delta_proj_weight=(I, RANK), out_proj_weight=(5, I), out_proj_bias=(5,) if out_bias else None,
        B=(I, R) if b_given else None, C=(B, R, S) if c_given else None, D=(I,), delta_bias=(I,) if softplus else None,
        B_proj_bias=(R,) if biases else None, C_proj_bias=(R,) if biases else None,
        b_rms_weight=(R,) if norms else None, c_rms_weight=(R,) if norms else None,
        dt_rms_weight=(I,) if norms else None,
    )  # fmt: skip
    given["A"] = -torch.rand(I, R).double()
    # Without softplus, step sizes have to be small for the scan to stay tame.
    given["delta_proj_weight"] *= 0.1

    def want(xz, A, B, C, D, **x):
        u, z = xz.chunk(2, 1)
        u = silu(conv_loop(u.mT, x["conv1d_weight"][:, 0], x["conv1d_bias"])[0])
        projected = u @ x["x_proj_weight"].T
        dt = projected[..., :RANK] @ x["delta_proj_weight"].T
        dt = dt if x["dt_rms_weight"] is None else norm_loop(dt, None, x["dt_rms_weight"], EPS)
        sides = []
        for fixed, own, name in ((B, projected[..., RANK : RANK + R], "B"), (C, projected[..., -R:], "C")):
            own = own if x[f"{name}_proj_bias"] is None else own + x[f"{name}_proj_bias"]
            weight = x[f"{name.lower()}_rms_weight"]
            own = own if weight is None else norm_loop(own, None, weight, EPS)
            if fixed is None:
                sides.append(own[:, :, None])
            else:
                sides.append(fixed.expand(len(u), S, I, R) if fixed.dim() == 2 else fixed.permute(0, 2, 1)[:, :, None])
        groups = max(side.shape[2] for side in sides)
        sides = [side.repeat_interleave(groups // side.shape[2], 2) for side in sides]
        y, _ = selective_scan_loop(u, step_size(dt, x["delta_bias"], softplus), A, *sides)
        out = ((y + D * u) * silu(z.mT)) @ x["out_proj_weight"].T
        return {"y": out if x["out_proj_bias"] is None else out + x["out_proj_bias"]}

    agree(lambda **x: {"y": inner(**x, delta_softplus=softplus, b_c_dt_rms_eps=EPS)}, want, given)


def test_mamba_inner_fn_with_complex_A():
    inner = official("mamba_ssm", "mamba_inner_fn")
    x = drawn(xz=(B, 2 * I, S), conv=(I, 1, K), x_proj=(RANK + 4 * R, I), dt_proj=(I, RANK), out_proj=(5, I), bias=(I,))
    A = torch.complex(-torch.rand(I, R), torch.randn(I, R)).to(torch.complex128)
    got = inner(x["xz"], x["conv"], None, x["x_proj"], x["dt_proj"], x["out_proj"], None, A, delta_bias=x["bias"])
    u, z = x["xz"].chunk(2, 1)
    u = silu(conv_loop(u.mT, x["conv"][:, 0])[0])
    dt, b, c = (u @ x["x_proj"].T).split((RANK, 2 * R, 2 * R), -1)
    b, c = (torch.view_as_complex(t.unflatten(-1, (R, 2)).contiguous())[:, :, None] for t in (b, c))
    y, _ = selective_scan_loop(u, step_size(dt @ x["dt_proj"].T, x["bias"], True), A, b, c)
    check(VALUE, {"y": got}, {"y": (y * silu(z.mT)) @ x["out_proj"].T})


UPDATES = list(product([True, False], [True, False], [True, False], [True, False]))


@pytest.mark.parametrize(("heads", "extras", "softplus", "rows"), UPDATES)
def test_selective_state_update(heads, extras, softplus, rows):
    update = official("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
    channels = (H, P) if heads else (I,)
    x = drawn(x=(B, *channels), B=(B, G, R) if heads else (B, R), C=(B, G, R) if heads else (B, R))
    x |= drawn(D=channels, z=(B, *channels), dt_bias=channels) if extras else {}
    x |= {"dt": torch.rand(B, *channels).double(), "A": -torch.rand(*channels, R).double()}
    before = torch.randn(B, *channels, R).double()
    index = torch.tensor([3, 1]) if rows else None
    state = torch.full((4, *channels, R), 7.0).double() if rows else before.clone()
    if rows:
        state[index] = before
    got = update(state, **x, dt_softplus=softplus, state_batch_indices=index)
    dt = step_size(x["dt"], x.get("dt_bias"), softplus)
    sides = [x[n][:, None] if heads else x[n][:, None, None] for n in ("B", "C")]
    flat = [t.flatten(1)[:, None] for t in (x["x"], dt)]
    y, after = selective_scan_loop(*flat, x["A"].reshape(I, R), *sides, before.reshape(B, I, R))
    y = y[:, 0].view(B, *channels)
    if extras:
        y = (y + x["D"] * x["x"]) * silu(x["z"])
    if rows:
        assert bool((state[[0, 2]] == 7).all())
    check(VALUE, {"y": got, "state": state[index] if rows else state}, {"y": y, "state": after.view_as(before)})
