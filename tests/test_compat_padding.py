"""Padding in the official functions, negative indices and ids: outputs of zero, and nobody's state changes."""

import pytest
import torch

from test_compat import installed, official  # noqa: F401 - a fixture

SLOTS = torch.tensor([2, -1, 0, -7], dtype=torch.int32)
THERE, ROWS = [0, 2], [2, 0]
"""The rows of the batch that are no padding, and those of the state that they are."""
H, P, R, V, K = 2, 3, 4, 5, 4
PARTS = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [-1, 2, 2, 2, -1, 4, 4]], dtype=torch.int32)


def check_slots(update, state, **batch):
    """`update(state, slots, **batch)` is that of the rows which are there, alone."""
    got, want = state.clone(), state.clone()
    out = update(got, SLOTS, **batch)
    alone = update(want, torch.tensor(ROWS), **{name: t[THERE] for name, t in batch.items()})
    torch.testing.assert_close(out[THERE], alone)
    assert bool((out[[1, 3]] == 0).all())
    torch.testing.assert_close(got, want)
    assert torch.equal(got[[1, 3]], state[[1, 3]])
    assert not torch.equal(got[[0, 2]], state[[0, 2]])


@pytest.mark.parametrize("tokens", [None, 1, 3])
@pytest.mark.parametrize("ring", [False, True])
def test_causal_conv1d_update(tokens, ring):
    update = official("causal_conv1d", "causal_conv1d_update")
    weight, bias = torch.randn(V, K), torch.randn(V)
    batch = {"x": torch.randn(4, V) if tokens is None else torch.randn(4, V, tokens)}
    if ring:
        batch["cache_seqlens"] = torch.tensor([3, 5, 7, 9])

    def run(state, slots, x, cache_seqlens=None):
        return update(x, state, weight, bias, "silu", cache_seqlens, slots)

    check_slots(run, torch.randn(4, V, 6), **batch)


def test_a_state_that_is_overwritten_has_gradients():
    """What the derivative needs of the state is that of before."""
    update = official("causal_conv1d", "causal_conv1d_update")
    x, state, weight = torch.randn(2, V), torch.randn(2, V, 6), torch.randn(V, K, requires_grad=True)
    past = torch.cat([state[:, :, 7 - K :], x[..., None]], 2)
    update(x, state, weight).sum().backward()
    torch.testing.assert_close(weight.grad, past.sum(0))
    torch.testing.assert_close(state[:, :, -1], x)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("heads", [False, True])
def test_selective_state_update(heads, tied):
    update = official("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
    axes = (H, P) if heads else (P,)
    A, dt = -torch.rand(*axes, R), torch.randn(4, *axes)
    if heads and tied:
        A, dt = A[:, :1, :1].expand(H, P, R), dt[..., :1].expand(4, H, P)
    group = (1,) if heads else ()
    batch = {"x": torch.randn(4, *axes), "dt": dt, "z": torch.randn(4, *axes)}
    batch |= {"B": torch.randn(4, *group, R), "C": torch.randn(4, *group, R)}
    batch["x"][1] = float("nan")
    D = torch.randn(axes)

    def run(state, slots, x, dt, B, C, z):
        return update(state, x, dt, A, B, C, D, z, dt_softplus=True, state_batch_indices=slots)

    check_slots(run, torch.randn(4, *axes, R), **batch)


def test_causal_conv1d_fn():
    convolve = official("causal_conv1d", "causal_conv1d_fn")
    x, weight, bias = torch.randn(2, V, 7, requires_grad=True), torch.randn(V, K), torch.randn(V)
    out = convolve(x, weight, bias, PARTS, activation="silu")
    for row, start, end in ((0, 0, 3), (0, 3, 5), (1, 1, 4), (1, 5, 7)):
        alone = convolve(x[row : row + 1, :, start:end], weight, bias, activation="silu")
        torch.testing.assert_close(out[row : row + 1, :, start:end], alone)
    absent = (PARTS < 0)[:, None].expand_as(out)
    assert bool((out[absent] == 0).all())
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert bool((grad[absent] == 0).all())


def test_mamba_split_conv1d_scan_combined():
    """Padding has nothing to scan, so its output is zero as well."""
    block = official("mamba_ssm.ops.triton.ssd_combined", "mamba_split_conv1d_scan_combined")
    width = H * P
    zxbcdt = torch.randn(2, 7, 2 * width + 2 * R + H)
    weights = (torch.randn(width + 2 * R, K), torch.randn(width + 2 * R), torch.randn(H), -torch.rand(H))
    out = block(zxbcdt, *weights, torch.randn(H), 4, seq_idx=PARTS, headdim=P)
    assert bool((out[PARTS < 0] == 0).all())
    assert bool((out[PARTS >= 0] != 0).any(-1).all())


def test_mamba2_with_bounds():
    block = official("mamba_ssm.modules.mamba2", "Mamba2")(8, d_state=4, headdim=4)
    x, bounds = torch.randn(1, 7, 8), torch.tensor([0, 3, 5, 7])
    out = block(x, seq_idx=PARTS[:1], cu_seqlens=bounds)
    torch.testing.assert_close(out, block(x, seq_idx=PARTS[:1]))
    assert bool((out[:, 5:] == 0).all())


@pytest.mark.parametrize("name", ["Mamba2", "Mamba2Simple", "Mamba2 with an MLP"])
def test_mamba2(name):
    where = "mamba_ssm.modules.mamba2_simple" if name == "Mamba2Simple" else "mamba_ssm.modules.mamba2"
    more = {"d_ssm": 8} if name.endswith("MLP") else {}
    block = official(where, name.split()[0])(8, d_state=4, headdim=4, **more)
    x = torch.randn(2, 7, 8)
    out = block(x, seq_idx=PARTS)
    for row, start, end in ((0, 0, 3), (0, 3, 5), (1, 1, 4), (1, 5, 7)):
        torch.testing.assert_close(out[row, start:end], block(x[row : row + 1, start:end])[0])
    absent = out[PARTS < 0]
    if more:
        # The MLP's channels know nothing of sequences.
        gate, value = block.in_proj(x)[PARTS < 0].split((8, 8, 8, 16, 2), -1)[:2]
        absent = absent - (torch.nn.functional.silu(gate) * value) @ block.out_proj.weight[:, :8].T
    torch.testing.assert_close(absent, torch.zeros_like(absent))


ENDS = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
"""Sequences of three, no and two tokens, then padding."""


@pytest.mark.parametrize("tail", [None, [7, 7], [7, 8], [-1, -1], [8, -1]])
@pytest.mark.parametrize("name", ["mamba2.Mamba2", "mamba3.Mamba3"])
def test_blocks_with_padding_after_the_last_sequence(name, tail):
    """Sequences and states are those of the tokens before it; what `seq_idx` calls a sequence there has outputs."""
    Params = official("mamba_ssm.utils.generation", "InferenceParams")
    block = official(*f"mamba_ssm.modules.{name}".rsplit(".", 1))(16, d_state=8, headdim=8, layer_idx=0)
    x = torch.randn(1, 7, 16)
    seq_idx = None if tail is None else torch.tensor([[0, 0, 0, 2, 2, *tail]], dtype=torch.int32)
    got, want = Params(9, 3), Params(9, 3)
    out = block(x, seq_idx=seq_idx, cu_seqlens=ENDS, inference_params=got)
    torch.testing.assert_close(out[:, :5], block(x[:, :5], cu_seqlens=ENDS, inference_params=want))
    for one, two in zip(got.key_value_memory_dict[0], want.key_value_memory_dict[0], strict=True):
        torch.testing.assert_close(one, two)
    rest = torch.zeros(1, 2, 16) if seq_idx is None else block(x[:, 5:], seq_idx=seq_idx[:, 5:])
    torch.testing.assert_close(out[:, 5:], rest)


@pytest.mark.parametrize("tail", [None, [7, 8]])
def test_chunk_scan_with_padding_after_the_last_sequence(tail):
    scan = official("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    given = [torch.randn(1, 7, H, P), torch.rand(1, 7, H), -torch.rand(H), *torch.randn(2, 1, 7, 1, R)]
    cut = [t if t.dim() == 1 else t[:, :5] for t in given]
    seq_idx = None if tail is None else torch.tensor([[0, 0, 0, 2, 2, *tail]], dtype=torch.int32)
    options = {"cu_seqlens": ENDS, "return_varlen_states": True}
    out, states = scan(*given, 4, seq_idx=seq_idx, **options)
    want, want_states = scan(*cut, 4, **options)
    torch.testing.assert_close(out[:, :5], want)
    torch.testing.assert_close(states, want_states)
    if seq_idx is None:
        assert not out[:, 5:].any()
    else:
        torch.testing.assert_close(out, scan(*given, 4, seq_idx=seq_idx))
        final = scan(*given, 4, seq_idx=seq_idx, cu_seqlens=ENDS, return_final_states=True)[1]
        torch.testing.assert_close(final, scan(*given, 4, seq_idx=seq_idx, return_final_states=True)[1])


def test_functions_with_padding_after_the_last_sequence():
    states = official("causal_conv1d.causal_conv1d_varlen", "causal_conv1d_varlen_states")
    x = torch.randn(7, V)
    assert torch.equal(states(x, ENDS, 2), states(x[:5], ENDS, 2))
    angle_dt = official("mamba_ssm.ops.triton.mamba3.angle_dt", "angle_dt_fwd")
    angle, dt = torch.randn(1, 7, H, R), torch.rand(1, H, 7)
    out, last = angle_dt(angle, dt, return_output_state=True, cu_seqlens=ENDS)
    want, want_last = angle_dt(angle[:, :5], dt[..., :5], return_output_state=True, cu_seqlens=ENDS)
    torch.testing.assert_close(out[:, :5], want)
    torch.testing.assert_close(last, want_last)
    assert not out[:, 5:].any()


@pytest.mark.parametrize("bounds", [[0, 9], [1, 5], [0, 6, 5], [0.0, 5.0], [5], [0j, 5j]])
def test_bounds_that_are_none(bounds):
    block = official("mamba_ssm.modules.mamba2", "Mamba2")(16, d_state=8, headdim=8)
    with pytest.raises(ValueError, match="cu_seqlens"):
        block(torch.randn(1, 7, 16), cu_seqlens=torch.tensor(bounds))


def test_a_batch_of_padding_needs_no_state():
    update = official("causal_conv1d", "causal_conv1d_update")
    padding = torch.tensor([-1, -1])
    out = update(torch.randn(2, V), torch.zeros(0, V, 6), torch.randn(V, K), conv_state_indices=padding)
    assert torch.equal(out, torch.zeros(2, V))
    update = official("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
    x, B = torch.randn(2, P), torch.randn(2, R)
    out = update(torch.zeros(0, P, R), x, x, -torch.rand(P, R), B, B, state_batch_indices=padding)
    assert torch.equal(out, torch.zeros(2, P))
