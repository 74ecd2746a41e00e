"""Functions inside of the official ones that other code imports: against plain loops, values and gradients."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from compare import check, gradients, leaves
from test_compat import installed, official  # noqa: F401 - a fixture

VALUE, GRADIENT = 1e-10, 1e-9
TRITON = "mamba_ssm.ops.triton"
B, S, H, P, G, R, L = 2, 11, 4, 3, 2, 5, 4
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2], [0, 0, 1, 2, 2, 3, 3, 3, 4, -1, -1]])


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def scan_inputs(gate, states):
    given = {"x": drawn(B, S, H, P), "dt": drawn(B, S, H), "A": -torch.rand(H, dtype=torch.float64)}
    given |= {"B": drawn(B, S, G, R), "C": drawn(B, S, G, R), "D": drawn(H), "dt_bias": drawn(H)}
    given |= {"z": drawn(B, S, H, P)} if gate else {}
    return given | ({"initial_states": drawn(B, H, P, R)} if states else {})


def plain(x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_states=None, ids=None):
    """Output, output before the gate, and last state of Mamba-2's scan, token by token."""
    dt = torch.log1p(torch.exp(dt if dt_bias is None else dt + dt_bias))
    B, C = (t.repeat_interleave(H // G, dim=2) for t in (B, C))
    state = torch.zeros(len(x), H, P, R, dtype=x.dtype) if initial_states is None else initial_states
    before, outputs = torch.zeros(len(x), dtype=torch.long), []
    for t in range(x.shape[1]):
        if ids is not None:
            state = state * (ids[:, t] == before)[:, None, None, None]
            before = ids[:, t]
        state = torch.exp(dt[:, t] * A)[..., None, None] * state
        write = dt[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, :, None]
        if ids is not None:
            write = write * (ids[:, t] >= 0)[:, None, None, None]
        state = state + write
        outputs.append((state * C[:, t, :, None]).sum(-1))
    y = torch.stack(outputs, dim=1)
    y = y if D is None else y + D[:, None] * x
    return y if z is None else y * F.silu(z), y, state


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_chunk_scan_combined(gate, packed, states):
    forward = official(f"{TRITON}.ssd_combined", "_mamba_chunk_scan_combined_fwd")
    backward = official(f"{TRITON}.ssd_combined", "_mamba_chunk_scan_combined_bwd")
    given, ids = scan_inputs(gate, states), IDS if packed else None
    if packed:
        ids = IDS.clone()
        ids[1, -2:] = 5
    inputs = leaves(given)
    want, ungated, last = plain(**inputs, ids=ids)
    out, out_x, dt, dA_cumsum, entering, final = forward(**given, chunk_size=L, seq_idx=ids, dt_softplus=True)
    check(VALUE, {"out": out, "final": final}, {"out": want, "final": last})
    assert (out_x is None) == (not gate)
    if gate:
        check(VALUE, {"out_x": out_x}, {"out_x": ungated})
    assert dt.shape == dA_cumsum.shape == (B, H, 3, L)
    assert entering.shape == (B, 3, H, P, R)
    heads = {"out": torch.randn_like(want), "last": torch.randn_like(last)}
    grads = gradients({"out": want, "last": last}, heads, inputs)
    dx = torch.full_like(given["x"], torch.nan)
    args = [given[n] for n in ("x", "dt", "A", "B", "C")]
    options = {n: given.get(n) for n in ("D", "z", "dt_bias", "initial_states")}
    found = backward(
        heads["out"],
        *args,
        out,
        L,
        **options,
        dfinal_states=heads["last"],
        seq_idx=ids,
        dt_softplus=True,
        dx=dx,
        recompute_output=True,
    )
    assert torch.equal(found[0], dx)
    check(VALUE, {"out": found[-1]}, {"out": want})
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    check(GRADIENT, {n: g for n, g in zip(names, found[:-1], strict=True) if g is not None}, grads)


def test_states_of_packed_sequences():
    forward = official(f"{TRITON}.ssd_combined", "_mamba_chunk_scan_combined_fwd")
    given = {n: t[:1] if t.shape[0] == B and n not in "AD" else t for n, t in scan_inputs(False, False).items()}
    given["dt_bias"], bounds = drawn(H), [0, 3, 9, 11]
    states = forward(
        **given, chunk_size=L, seq_idx=IDS[:1], cu_seqlens=torch.tensor(bounds, dtype=torch.int32), dt_softplus=True
    )[-1]
    for i, (start, end) in enumerate(pairwise(bounds)):
        cut = {n: t[:, start:end] if t.dim() > 1 and n != "A" else t for n, t in given.items()}
        check(VALUE, {"state": states[i : i + 1]}, {"state": plain(**cut)[2]})


def chunked(packed):
    """Inputs of the steps of the scan."""
    cumsum = official(f"{TRITON}.ssd_chunk_state", "_chunk_cumsum_fwd")
    given = scan_inputs(False, False)
    dA_cumsum, dt = cumsum(given["dt"], given["A"], L, given["dt_bias"], True)
    return given["x"], given["B"], given["C"], dt, dA_cumsum, IDS if packed else None


def test_steps_against_their_references():
    x, b, c, dt, dA_cumsum, _ = chunked(False)
    full = [t[:, :8] for t in (x, b, c)] + [t[:, :, :2] for t in (dt, dA_cumsum)]
    states, D, z = drawn(B, 2, H, P, R), drawn(H, P), drawn(B, 8, H, P)
    module = f"{TRITON}.ssd_chunk_state"
    for got, want in (
        (
            official(module, "chunk_state")(b, x, dt, dA_cumsum),
            official(module, "chunk_state_ref")(b, x, dt, dA_cumsum),
        ),
        tuple(
            official(f"{TRITON}.ssd_chunk_scan", name)(full[1], full[2], full[0], full[3], full[4], states, D, z)
            for name in ("chunk_scan", "chunk_scan_ref")
        ),
    ):
        check(VALUE, {"out": got}, {"out": want})
    passing = f"{TRITON}.ssd_state_passing"
    written, initial = drawn(B, 3, H, R), drawn(B, H, R)
    for i in range(2):
        got, want = (
            official(passing, name)(written, dA_cumsum[..., -1], initial)[i]
            for name in ("state_passing", "state_passing_ref")
        )
        check(VALUE, {"out": got}, {"out": want})


@pytest.mark.parametrize("packed", [False, True])
def test_steps_of_the_backward_pass(packed):
    """Put together as the official package does, they are the gradients of the whole."""
    x, b, c, dt, dA_cumsum, ids = chunked(packed)
    step = {
        name: official(f"{TRITON}.{module}", name)
        for module, names in (
            ("ssd_bmm", "_bmm_chunk_fwd _bmm_chunk_bwd"),
            ("ssd_chunk_state", "_chunk_state_fwd _chunk_state_bwd_dx _chunk_state_bwd_db"),
            ("ssd_state_passing", "_state_passing_fwd _state_passing_bwd"),
            ("ssd_chunk_scan", "_chunk_scan_fwd _chunk_scan_bwd_dstates _chunk_scan_bwd_dC _chunk_scan_bwd_dcb"),
            ("ssd_chunk_scan", "_chunk_scan_bwd_dx _chunk_scan_bwd_ddAcs_stable"),
        )
        for name in names.split()
    }

    def whole(x, b, c, dt, dA):
        cumsum = dA.cumsum(-1)
        states = step["_chunk_state_fwd"](b, x, dt, cumsum, ids).flatten(3)
        states, _ = step["_state_passing_fwd"](states, cumsum[..., -1], None, ids, L)
        cb = step["_bmm_chunk_fwd"](c, b, L, ids)
        return step["_chunk_scan_fwd"](cb, x, dt, cumsum, c, states.unflatten(-1, (P, R)), seq_idx=ids)[0]

    dA = torch.cat((dA_cumsum[..., :1], dA_cumsum.diff(dim=-1)), dim=-1)
    inputs = leaves({"x": x, "b": b, "c": c, "dt": dt, "dA": dA})
    out = whole(**inputs)
    head = torch.randn_like(out)
    want = gradients({"out": out}, {"out": head}, inputs)
    cb = step["_bmm_chunk_fwd"](c, b, L, ids)
    states = step["_chunk_state_fwd"](b, x, dt, dA_cumsum, ids)
    states = step["_state_passing_fwd"](states.flatten(3), dA_cumsum[..., -1], None, ids, L)[0]
    d_entering = step["_chunk_scan_bwd_dstates"](c, dA_cumsum, head, ids)
    dstates, d_chunk, _ = step["_state_passing_bwd"](
        states, dA_cumsum[..., -1], d_entering.flatten(3), seq_idx=ids, chunk_size=L
    )
    dstates, states = (t.unflatten(-1, (P, R)) for t in (dstates, states))
    db, d_next = step["_chunk_state_bwd_db"](x, dt, dA_cumsum, dstates, ids, b, G)
    dc, d_before = step["_chunk_scan_bwd_dC"](states, dA_cumsum, head, ids, c, G)
    dcb = step["_chunk_scan_bwd_dcb"](x, dt, dA_cumsum, head, ids, ngroups=G)
    found = {"b": step["_bmm_chunk_bwd"](c, dcb, residual=db)}
    found["c"] = step["_bmm_chunk_bwd"](b, dcb.mT, residual=dc)
    d_before[..., -1] += d_chunk
    d_before = d_before.flip(-1).cumsum(-1).flip(-1)
    found["dA"] = d_next + d_before + step["_chunk_scan_bwd_ddAcs_stable"](x, dt, dA_cumsum, head, cb)
    if not packed:
        inside = step["_chunk_scan_bwd_dx"](cb, x, dt, dA_cumsum, head)
        written = step["_chunk_state_bwd_dx"](b, x, dt, dA_cumsum, dstates)
        found |= {"x": inside[0] + written[0], "dt": inside[1] + written[1]}
    check(GRADIENT, found, {n: want[n] for n in found})


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("group_size", [None, 3])
def test_gated_norm(rms, before, group_size):
    module = f"{TRITON}.layernorm_gated"
    forward, backward = official(module, "_layer_norm_fwd"), official(module, "_layer_norm_bwd")
    given = {"x": drawn(5, 6), "weight": drawn(6), "bias": drawn(6), "z": drawn(5, 6)}
    inputs = leaves(given)
    y = inputs["x"] if before else inputs["x"] * F.silu(inputs["z"])
    groups = y.unflatten(-1, (-1, group_size or 6))
    mean = groups.mean(-1, keepdim=True) * (not rms)
    rstd = 1 / torch.sqrt((groups - mean).square().mean(-1, keepdim=True) + 1e-5)
    want = ((groups - mean) * rstd).flatten(-2) * inputs["weight"] + inputs["bias"]
    want = want * F.silu(inputs["z"]) if before else want
    options = {"z": given["z"], "group_size": group_size, "norm_before_gate": before, "is_rms_norm": rms}
    out = torch.full_like(given["x"], torch.nan)
    got, got_mean, got_rstd = forward(given["x"], given["weight"], given["bias"], 1e-5, out=out, **options)
    assert torch.equal(got, out)
    found = {"out": got, "rstd": got_rstd} | ({} if rms else {"mean": got_mean})
    check(
        VALUE,
        found,
        {"out": want, "rstd": rstd[..., 0].t().flatten(), "mean": mean[..., 0].t().flatten()}
        if not rms
        else {"out": want, "rstd": rstd[..., 0].t().flatten()},
    )
    head, dz = torch.randn_like(want), torch.full_like(given["z"], torch.nan)
    args = (head, given["x"], given["weight"], given["bias"], 1e-5, got_mean, got_rstd)
    *grads, again = backward(*args, **options, dz=dz, recompute_output=True)
    assert torch.equal(grads[3], dz)
    check(VALUE, {"out": again}, {"out": want})
    check(
        GRADIENT,
        dict(zip(("x", "weight", "bias", "z"), grads, strict=True)),
        gradients({"o": want}, {"o": head}, inputs),
    )


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("version", ["layernorm", "layer_norm"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm(rms, version, with_residual):
    module = f"{TRITON}.{version}"
    forward, backward = official(module, "_layer_norm_fwd"), official(module, "_layer_norm_bwd")
    given = {"x": drawn(5, 6), "weight": drawn(6), "bias": drawn(6)} | (
        {"residual": drawn(5, 6)} if with_residual else {}
    )
    inputs = leaves(given)
    total = inputs["x"] + inputs.get("residual", 0)
    mean = total.mean(-1, keepdim=True) * (not rms)
    rstd = 1 / torch.sqrt((total - mean).square().mean(-1, keepdim=True) + 1e-5)
    want = (total - mean) * rstd * inputs["weight"] + inputs["bias"]
    results = forward(**given, eps=1e-5, is_rms_norm=rms)
    y, got_mean, got_rstd, got_total = results if version == "layernorm" else (results[0], *results[2:5])
    assert (got_mean is None) == rms
    assert with_residual or got_total is given["x"]
    found = {"y": y, "rstd": got_rstd, "total": got_total}
    check(VALUE, found, {"y": want, "rstd": rstd[:, 0], "total": total})
    heads = {"y": torch.randn_like(want), "total": torch.randn_like(want)}
    args = (heads["y"], got_total, given["weight"], given["bias"], 1e-5, got_mean, got_rstd)
    grads = backward(*args, dresidual=heads["total"], has_residual=with_residual, is_rms_norm=rms)
    found = dict(zip(("x", "weight", "bias", "residual"), grads, strict=False))
    found = {n: g for n, g in found.items() if g is not None}
    check(GRADIENT, found, gradients({"y": want, "total": total}, heads, inputs))


def test_swiglu():
    module = f"{TRITON}.k_activations"
    xy, head = drawn(2, 3, 8), drawn(2, 3, 4)
    leaf = leaves({"xy": xy})
    want = F.silu(leaf["xy"][..., :4]) * leaf["xy"][..., 4:]
    out = torch.empty(2, 3, 4, dtype=torch.float64)
    check(VALUE, {"out": official(module, "_swiglu_fwd")(xy, out)}, {"out": want})
    grad, again = official(module, "_swiglu_bwd")(xy, head, recompute_output=True)
    check(VALUE, {"out": again, "into": out}, {"out": want, "into": want})
    check(GRADIENT, {"xy": grad}, gradients({"out": want}, {"out": head}, leaf))
    check(VALUE, {"out": official(module, "SwiGLU").apply(xy)}, {"out": want})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ssd_bmm._bmm_chunk_fwd_kernel", "kernel for a GPU"),
        ("ssd_chunk_scan._chunk_scan_bwd_ddAcs_unstable", "not to be used"),
        ("ssd_combined._chunk_scan_chunk_state_bwd_dx", "let autograd"),
        ("mamba3.mamba3_siso_bwd.compute_dqkv", "let autograd"),
        ("mamba3.utils.cos_approx", "Triton's compiler"),
    ],
)
def test_what_has_nothing_behind_it_raises_when_it_is_called(name, reason):
    function = official(*f"{TRITON}.{name}".rsplit(".", 1))
    for call in (function, function[(1,)]):
        with pytest.raises(NotImplementedError, match=rf"{name} does not run in mambakit.compat: .*{reason}"):
            call(1, x=2)
    assert reason in repr(function)
