"""The cases of the official test suites, from their published parameters and with their tolerances, on the CPU.

A sample of each grid by default; in the published sizes all of it with MAMBAKIT_OFFICIAL_GRID=full, or so many cases of
each grid with a number.
"""

import os
import random
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from test_compat import installed, official  # noqa: F401 - a fixture

ASKED = os.environ.get("MAMBAKIT_OFFICIAL_GRID", "")
FULL = ASKED != ""
HALF, BHALF, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = [SINGLE, HALF, BHALF]
BOTH = [False, True]
CONV = "causal_conv1d.causal_conv1d_interface"
TRITON = "mamba_ssm.ops.triton"


def grid(names, sample, published, small=None):
    """All combinations of published values; by default a sample, with smaller values where some are given."""
    axes = published if FULL else {**published, **(small or {})}
    cases = list(product(*(axes[name] for name in names.split(", "))))
    count = int(ASKED) if ASKED.isdigit() else len(cases) if FULL else sample
    return pytest.mark.parametrize(names, random.Random(0).sample(cases, min(count, len(cases))))


def sized(published, small):
    return published if FULL else small


def conv_tolerance(dtype):
    return {SINGLE: (3e-4, 1e-3), HALF: (3e-3, 5e-3), BHALF: (1e-2, 5e-2)}[dtype]


def close(got, want, rtol, atol):
    assert got.shape == want.shape
    assert torch.allclose(got.float(), want.float(), rtol=rtol, atol=atol), (got.float() - want.float()).abs().max()


def twins(*tensors):
    """Two sets of leaves with the same values and strides."""
    return tuple(
        [None if t is None else t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
        for _ in range(2)
    )


def cut(batch, dim, seqlen, dtype, channel_last):
    """Channels in the middle of a wider tensor, in either layout."""
    before = sized(4096, 8)
    if channel_last:
        return torch.randn(batch, seqlen, before + dim + 64, dtype=dtype)[:, :, before : before + dim].transpose(1, 2)
    return torch.randn(batch, before + dim + 64, seqlen, dtype=dtype)[:, before : before + dim]


def check_conv_gradients(got, want, dtype, names="x weight bias initial_states"):
    rtol, atol = conv_tolerance(dtype)
    for name, one, two in zip(names.split(), got, want, strict=False):
        if one is not None:
            close(one.grad, two.grad, *((1e-3, 1e-3) if name in ("weight", "bias") else (rtol, atol)))


SEQLENS = [1, 2, 8, 16, 32, 64, 128, 129, 130, 151, 256, 372, 512, 784, 1024, 1134, 2048, 4096]
WIDE = {"dim": [64, 4096 + 32], "seqlen": SEQLENS, "width": [2, 3, 4], "dtype": DTYPES}
NARROW = {"dim": [64], "seqlen": SEQLENS[:13]}
FLAGS = dict.fromkeys(("has_bias", "silu", "channel_last", "has_initial", "has_final"), BOTH)


@grid("dim, seqlen, width, dtype, has_bias, silu, channel_last, has_initial, has_final", 40, WIDE | FLAGS, NARROW)
def test_causal_conv1d(dim, seqlen, width, dtype, has_bias, silu, channel_last, has_initial, has_final):
    torch.manual_seed(0)
    x, weight = cut(2, dim, seqlen, dtype, channel_last), torch.randn(dim, width)
    bias = torch.randn(dim) if has_bias else None
    initial = torch.randn(2, width - 1, dim, dtype=dtype).transpose(1, 2) if has_initial else None
    got, want = twins(x, weight, bias, initial)
    activation = "silu" if silu else None
    results = []
    for name, (x, weight, bias, initial) in (("causal_conv1d_fn", got), ("causal_conv1d_ref", want)):
        options = {"initial_states": initial, "return_final_states": has_final, "activation": activation}
        out = official(CONV, name)(x, weight, bias, **options)
        out, final = out if has_final else (out, None)
        results.append((out, final))
    (out, final), (out_ref, final_ref) = results
    close(out, out_ref, *conv_tolerance(dtype))
    if has_final:
        close(final, final_ref, *conv_tolerance(dtype))
        out = out + torch.sigmoid(final).sum(dim=-1, keepdim=True)
        out_ref = out_ref + torch.sigmoid(final_ref).sum(dim=-1, keepdim=True)
    g = torch.randn_like(out)
    out.backward(g)
    out_ref.backward(g)
    check_conv_gradients(got, want, dtype)


UPDATE = {"dim": [2048, 2048 + 16, 4096], "width": [2, 3, 4], "seqlen": [1, 4, 5], "dtype": DTYPES}
UPDATE |= {"rows": ["all", "gathered", "padded"], "ring": BOTH, "has_bias": BOTH, "silu": BOTH}


@grid("dim, width, seqlen, dtype, rows, ring, has_bias, silu", 30, UPDATE, {"dim": [2048 + 16]})
def test_causal_conv1d_update(dim, width, seqlen, dtype, rows, ring, has_bias, silu):
    """Whole batches, batches gathered from a larger state, and with padding among them (then without a ring)."""
    ring = ring and rows != "padded"
    torch.manual_seed(0)
    batch = sized(64, 6)
    x = torch.randn(batch, seqlen, dim, dtype=dtype).transpose(-1, -2)
    length = torch.randint(width - 1, width + 10, (1,)).item()
    entries = batch if rows == "all" else sized(10, 2) * batch
    state = torch.randn(entries, length, dim, dtype=dtype).transpose(-1, -2)
    index = None if rows == "all" else torch.randperm(entries)[:batch].to(torch.int32)
    if rows == "padded":
        index[torch.randperm(batch)[: batch // 2]] = -1
    weight, bias = torch.randn(dim, width), torch.randn(dim) if has_bias else None
    seen = torch.randint(0, 1024, (batch,), dtype=torch.int32) if ring else None
    there = torch.ones(batch, dtype=torch.bool) if index is None else index >= 0
    places = torch.arange(batch) if index is None else index.long()[there]
    expected, part, out_ref = state.clone(), state[places].clone(), torch.zeros_like(x)
    activation = "silu" if silu else None
    args = (part, weight, bias, activation, None if seen is None else seen[there])
    out_ref[there] = official(CONV, "causal_conv1d_update_ref")(x[there], *args)
    expected[places] = part
    out = official(CONV, "causal_conv1d_update")(x, state, weight, bias, activation, seen, index)
    assert torch.equal(state, expected)
    close(out, out_ref, *conv_tolerance(dtype))


@grid("dim, dtype", 2, {"dim": [2048, 2048 + 16, 4096], "dtype": DTYPES}, {"dim": [64, 80]})
def test_causal_conv1d_get_states(dim, dtype):
    torch.manual_seed(0)
    bounds = F.pad(torch.randint(1, 32, (100,)).cumsum(0), (1, 0))
    x = torch.randn(int(bounds[-1]), dim, dtype=dtype)
    module = "causal_conv1d.causal_conv1d_varlen"
    got, want = (official(module, f"causal_conv1d_varlen_states{ref}")(x, bounds, 20) for ref in ("", "_ref"))
    assert torch.equal(got, want)


PACKED = {**WIDE, "seqlen": [8, 16, *SEQLENS[4:7], *SEQLENS[9:]], "has_bias": BOTH, "silu": BOTH, "padded": BOTH}


@grid("dim, seqlen, width, dtype, has_bias, silu, padded", 20, PACKED, {"dim": [64], "seqlen": [8, 64, 151, 372]})
def test_causal_conv1d_varlen(dim, seqlen, width, dtype, has_bias, silu, padded):
    """Several sequences in each row, with or without padding behind them."""
    torch.manual_seed(seqlen + dim + width)
    batch, parts, ids = 3, [], torch.full((3, seqlen), -1, dtype=torch.int32)
    for b in range(batch):
        length = int(torch.randint(seqlen // 2, seqlen, (1,))) if padded else seqlen
        ends = torch.randperm(length - 1)[: int(torch.randint(1, 4, (1,)))].sort().values + 1
        parts.append(torch.tensor([0, *ends.tolist(), length]).diff().tolist())
        ids[b, :length] = torch.repeat_interleave(torch.arange(len(parts[b])), torch.tensor(parts[b]))
    got, want = twins(
        cut(batch, dim, seqlen, dtype, True), torch.randn(dim, width), torch.randn(dim) if has_bias else None
    )
    activation = "silu" if silu else None
    out = official(CONV, "causal_conv1d_fn")(*got, seq_idx=ids, activation=activation)
    ref, rows = official(CONV, "causal_conv1d_ref"), []
    for b in range(batch):
        pieces = want[0][[b], :, : sum(parts[b])].split(parts[b], dim=2)
        row = torch.cat([ref(piece, *want[1:], activation=activation) for piece in pieces], dim=2)
        rows.append(F.pad(row, (0, seqlen - sum(parts[b]))))
    out_ref = torch.cat(rows)
    close(out, out_ref, *conv_tolerance(dtype))
    g = torch.randn_like(out)
    out.backward(g)
    out_ref.backward(g)
    check_conv_gradients(got, want, dtype)


SCAN = {"seqlen": [128, 256, 512, 1024, 2048, 4096], "groups": [1, 2], "wtype": [SINGLE, torch.complex64]}
SCAN |= dict.fromkeys(("has_D", "has_z", "has_bias", "softplus", "variable_B", "variable_C"), BOTH) | {"dtype": DTYPES}


@grid(
    "seqlen, groups, wtype, dtype, has_D, has_z, has_bias, softplus, variable_B, variable_C",
    16,
    SCAN,
    {"seqlen": [128]},
)
def test_selective_scan(seqlen, groups, wtype, dtype, has_D, has_z, has_bias, softplus, variable_B, variable_C):
    """The published options with those beside them that are commented out there, complex weights included."""
    if groups > 1 and not (variable_B and variable_C):
        groups = 1
    torch.manual_seed(0)
    rtol, atol = {SINGLE: (6e-4, 2e-3), HALF: (3e-3, 5e-3), BHALF: (3e-2, 5e-2)}[dtype]
    rtolw, atolw = (max(1e-3, rtol), max(1e-3, atol)) if has_z else (1e-3, 1e-3)
    batch, dim, state = 2, 4, 8
    length = seqlen * (2 if wtype.is_complex else 1)

    def weights(variable):
        if not variable:
            return torch.randn(dim, state, dtype=wtype)
        return torch.randn(batch, *([groups] if groups > 1 else []), state, length, dtype=dtype)

    given = {
        "u": torch.randn(batch, dim, seqlen, dtype=dtype),
        "delta": 0.5 * torch.rand(batch, dim, seqlen, dtype=dtype),
    }
    given |= {"A": -0.5 * torch.rand(dim, state, dtype=wtype), "B": weights(variable_B), "C": weights(variable_C)}
    given |= {"D": torch.randn(dim)} if has_D else {}
    given |= {"z": torch.randn(batch, dim, seqlen, dtype=dtype)} if has_z else {}
    given |= {"delta_bias": 0.5 * torch.rand(dim)} if has_bias else {}
    got, want = (dict(zip(given, leaves, strict=True)) for leaves in twins(*given.values()))
    module = "mamba_ssm.ops.selective_scan_interface"
    (out, last), (out_ref, last_ref) = (
        official(module, name)(**inputs, delta_softplus=softplus, return_last_state=True)
        for name, inputs in (("selective_scan_fn", got), ("selective_scan_ref", want))
    )
    close(out, out_ref, rtol, atol)
    assert torch.allclose(last, last_ref, rtol=rtol, atol=atol)
    g = torch.randn_like(out)
    out.backward(g)
    out_ref.backward(g)
    limits = {"u": (2 * rtol, 2 * atol), "delta": (5 * rtol, 10 * atol), "A": (rtolw, 5 * atolw)}
    limits |= {"B": (rtol, atol) if variable_B else (rtolw, atolw), "C": (rtol, atol) if variable_C else (rtolw, atolw)}
    for name in given:
        r, a = limits.get(name, (rtolw, atolw))
        grad, grad_ref = got[name].grad, want[name].grad
        assert torch.allclose(grad, grad_ref, rtol=r, atol=a), (name, (grad - grad_ref).abs().max())


@grid("wtype, variable_B, variable_C", 3, {"wtype": SCAN["wtype"], "variable_B": BOTH, "variable_C": BOTH})
def test_mamba_inner(wtype, variable_B, variable_C):
    torch.manual_seed(0)
    seqlen, dim, state, rank = 128, sized(768, 96), 8, sized(48, 12)
    entries = state * (2 if wtype.is_complex else 1)
    given = [torch.randn(2, 2 * dim, seqlen), torch.randn(dim, 1, 3), torch.randn(dim)]
    given += [torch.randn(rank + (variable_B + variable_C) * entries, dim), torch.randn(dim, rank)]
    given += [torch.randn(dim // 2, dim), None, -0.5 * torch.rand(dim, state, dtype=wtype)]
    given += [None if variable else torch.randn(dim, state, dtype=wtype) for variable in (variable_B, variable_C)]
    given += [torch.randn(dim), 0.5 * torch.rand(dim)]
    inner, inner_ref = (official("mamba_ssm.ops.selective_scan_interface", f"mamba_inner_{n}") for n in ("fn", "ref"))

    def in_parts(xz, conv_weight, conv_bias, x_proj, dt_proj, out_proj, out_bias, A, B, C, D, delta_bias):
        """As the published reference puts it together, from the functions that are tested above."""
        x, z = xz.chunk(2, dim=1)
        x = official(CONV, "causal_conv1d_fn")(x, conv_weight[:, 0], conv_bias, activation="silu")
        dt, *BC = F.linear(x.mT, x_proj).split((rank, *[entries] * (variable_B + variable_C)), dim=-1)
        BC = [t.unflatten(-1, (state, -1)).transpose(1, 2).flatten(2) for t in BC]
        B, C = BC.pop(0) if B is None else B, BC.pop(0) if C is None else C
        scan = official("mamba_ssm", "selective_scan_fn")
        return F.linear(scan(x, F.linear(dt, dt_proj).mT, A, B, C, D, z, delta_bias, True).mT, out_proj, out_bias)

    close(inner(*given, delta_softplus=True), in_parts(*given), 6e-4, 2e-3)
    wide = [t if t is None else t.to(torch.complex128 if t.is_complex() else torch.float64) for t in given]
    torch.testing.assert_close(inner(*wide), inner_ref(*wide), rtol=1e-8, atol=1e-6)


STATES = {"dim": [2048, 2048 + 16, 4096], "dstate": [16, 32, 64], "has_z": BOTH, "dtype": DTYPES, "indexed": BOTH}


@grid("dim, dstate, has_z, dtype, indexed", 8, STATES, {"dim": [2048 + 16]})
def test_selective_state_update(dim, dstate, has_z, dtype, indexed):
    rtol, atol = (3e-4, 1e-3) if dtype == SINGLE else (5e-3, 1e-2)
    if dtype == BHALF:
        rtol, atol = (6e-2, 6e-2) if indexed else (1e-2, 5e-2)
    check_update((dim,), (), dstate, has_z, dtype, indexed, False, rtol, atol)


HEADS = {**STATES, "dim": [2048, 4096], "ngroups": [1, 2, 4], "tied": BOTH}


@grid("dim, dstate, has_z, dtype, indexed, ngroups, tied", 10, HEADS, {"dim": [2048]})
def test_selective_state_update_with_heads(dim, dstate, has_z, dtype, indexed, ngroups, tied):
    rtol, atol = (3e-4, 1e-3) if dtype == SINGLE else (5e-3, 3e-2)
    if dtype == BHALF:
        rtol, atol = (1e-1, 1e-1) if indexed else (1e-2, 1e-1)
    check_update((dim // 64, 64), (ngroups,), dstate, has_z, dtype, indexed, tied, rtol, atol)


def check_update(axes, group, dstate, has_z, dtype, indexed, tied, rtol, atol):
    torch.manual_seed(0)
    batch = 16 if indexed else 2
    entries = 10 * batch if indexed else batch
    state = torch.randn(entries, *axes, dstate, dtype=dtype)
    index = torch.randperm(entries)[:batch].to(torch.int32) if indexed else None
    x, dt = torch.randn(batch, *axes, dtype=dtype), torch.randn(batch, *axes, dtype=dtype)
    bias, A, D = torch.rand(*axes) - 4.0, -torch.rand(*axes, dstate) - 1.0, torch.randn(*axes)
    if tied:
        dt, bias, D = (t[..., :1].expand(t.shape) for t in (dt, bias, D))
        A = A[:, :1, :1].expand(A.shape)
    B, C = torch.randn(2, batch, *group, dstate)
    z = torch.randn_like(x) if has_z else None
    kept = state[index.long()].clone() if indexed else state.clone()
    module = f"{TRITON}.selective_state_update"
    options = (D, z, bias, True)
    out = official(module, "selective_state_update")(state, x, dt, A, B, C, *options, index)
    out_ref = official(module, "selective_state_update_ref")(kept, x, dt, A, B, C, *options)
    close(state[index.long()] if indexed else state, kept, rtol, atol)
    close(out, out_ref, rtol, atol)


GATED = {"d": [2048, 4096], "group_size": [None, 64]} | dict.fromkeys(("has_bias", "has_z", "rms", "before"), BOTH)


@grid("d, group_size, has_bias, has_z, rms, before", 10, GATED, {"d": [256]})
def test_gated_norms(d, group_size, has_bias, has_z, rms, before):
    """Float16 within twice the error of plain float16 code."""
    if (not has_z and not before) or (not before and not rms):
        before = True
    torch.manual_seed(0)
    shape = (sized(16, 2), sized(1024, 64), d)
    given = [torch.randn(shape, dtype=HALF), torch.randn(d), torch.randn(d) if has_bias else None]
    given.append(torch.randn(shape, dtype=HALF) if has_z else None)
    (got, want), (plain, _) = twins(*given), twins(*given)

    def reference(x, weight, bias, z, upcast):
        if rms:
            ref = official(f"{TRITON}.layernorm_gated", "rms_norm_ref")
            return ref(x, weight, bias, z, 1e-5, group_size, before, upcast)
        wide = torch.float32 if upcast else x.dtype
        groups = x.to(wide).unflatten(-1, (-1, group_size or d))
        y = F.layer_norm(groups, groups.shape[-1:], eps=1e-5).flatten(-2) * weight
        y = y if bias is None else y + bias
        return (y if z is None else y * F.silu(z.to(wide))).to(x.dtype)

    x, weight, bias, z = got
    fn = official(f"{TRITON}.layernorm_gated", "layernorm_fn")
    out = fn(x, weight, bias, z, 1e-5, group_size, before, rms)
    out_ref, out_plain = reference(*want, True), reference(*plain, False)
    g = torch.randn_like(out)
    for result in (out, out_ref, out_plain):
        result.backward(g)
    triples = [(out, out_ref, out_plain)]
    triples += [(a.grad, b.grad, c.grad) for a, b, c in zip(got, want, plain, strict=True) if a is not None]
    for ours, ref, theirs in triples:
        assert (ours - ref).abs().max() <= 2 * (theirs - ref).abs().max() + 8e-3


@grid("chunk_size, ngroups, dtype", 4, {"chunk_size": [64, 128], "ngroups": [1, 2, 8, "max"], "dtype": DTYPES})
def test_chunk_states_of_packed_sequences(chunk_size, ngroups, dtype):
    torch.manual_seed(0)
    sequences, heads, p, r = sized(300, 12), sized(64, 8), sized(64, 16), 32
    ngroups = heads if ngroups == "max" else ngroups
    bounds = F.pad(torch.randint(1, 200, (sequences,)).cumsum(0), (1, 0))
    total = int(bounds[-1])
    ids = torch.repeat_interleave(torch.arange(sequences), bounds.diff())[None]
    B, x = torch.randn(total, ngroups, r, dtype=dtype) / 5, torch.randn(total, heads, p, dtype=dtype)
    A, dt = -0.1 * torch.rand(heads), F.softplus(torch.randn(total, heads) - 4)
    cumsum, write = (official(f"{TRITON}.ssd_chunk_state", f"_chunk_{n}_fwd") for n in ("cumsum", "state"))
    passing = official(f"{TRITON}.ssd_state_passing", "_state_passing_fwd")
    dA, step = cumsum(dt[None], A, chunk_size)
    states = write(B[None], x[None], step, dA, seq_idx=ids)
    states, _ = passing(states.flatten(3), dA[..., -1], seq_idx=ids, chunk_size=chunk_size)
    varlen = official(f"{TRITON}.ssd_chunk_state", "chunk_state_varlen")
    out = varlen(B, x, step[0], dA[0], bounds, states[0].unflatten(-1, (p, r)))
    ref = official(f"{TRITON}.ssd_chunk_state", "chunk_state_ref")
    for i in range(sequences):
        one = slice(int(bounds[i]), int(bounds[i + 1]))
        dA_i, step_i = cumsum(dt[None, one], A, chunk_size)
        written = ref(B[None, one].float(), x[None, one].float(), step_i, dA_i)
        _, last = official(f"{TRITON}.ssd_state_passing", "state_passing_ref")(written.flatten(3), dA_i[..., -1])
        close(out[i], last[0].unflatten(-1, (p, r)), 1e-2, 3e-3)
