"""Official names beside the main ones: other spellings of a function, and small functions that code imports."""

import math

import pytest
import torch

from compare import error
from test_compat import installed, official  # noqa: F401 - a fixture

TRITON, SCANS = "mamba_ssm.ops.triton", "mamba_ssm.ops.selective_scan_interface"
CONV = "causal_conv1d.causal_conv1d_interface"
SPELLINGS = {
    (CONV, "CausalConv1dFn"): "causal_conv1d_fn",
    (SCANS, "MambaInnerFn"): "mamba_inner_fn",
    (SCANS, "MambaInnerFnNoOutProj"): "mamba_inner_fn_no_out_proj",
    (SCANS, "BiMambaInnerFn"): "bimamba_inner_fn",
    (SCANS, "SelectiveScanFn"): "selective_scan_fn",
    (f"{TRITON}.layer_norm", "LayerNormFn"): "layer_norm_fn",
    (f"{TRITON}.layer_norm", "LayerNormLinearFn"): "layer_norm_linear_fn",
    (f"{TRITON}.layernorm", "LayerNormFn"): "layer_norm_fn",
    (f"{TRITON}.layernorm", "LayerNormLinearFn"): "layer_norm_linear_fn",
    (f"{TRITON}.layernorm_gated", "LayerNormFn"): "layernorm_fn",
    (f"{TRITON}.k_activations", "SwiGLU"): "swiglu",
    (f"{TRITON}.ssd_chunk_scan", "ChunkScanFn"): "chunk_scan",
    (f"{TRITON}.ssd_chunk_state", "ChunkStateFn"): "chunk_state",
    (f"{TRITON}.ssd_state_passing", "StatePassingFn"): "state_passing",
    (f"{TRITON}.ssd_combined", "MambaChunkScanCombinedFn"): "mamba_chunk_scan_combined",
    (f"{TRITON}.ssd_combined", "MambaSplitConv1dScanCombinedFn"): "mamba_split_conv1d_scan_combined",
}


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def check(got, want, tolerance):
    assert error(got, want) <= tolerance


@pytest.mark.parametrize(("module", "name"), SPELLINGS)
def test_an_autograd_function_is_its_function(module, name):
    assert official(module, name).apply is official(module, SPELLINGS[module, name])


def test_the_scan_of_an_inner_function_without_its_projection():
    """With the projection behind it, `mamba_inner_fn`; with both directions, `bimamba_inner_fn`."""
    b, i, s, r, q, d = 2, 3, 7, 4, 2, 5
    common = (drawn(b, 2 * i, s), drawn(i, 1, 3), drawn(i), drawn(q + 2 * r, i), drawn(i, q))
    out_weight, out_bias, skip, bias = drawn(d, i), drawn(d), drawn(i), drawn(i)
    A, A_back = (-torch.rand(i, r, dtype=torch.float64) for _ in range(2))
    inner = official(SCANS, "mamba_inner_fn_no_out_proj")(*common, A, None, None, skip, bias)
    whole = official(SCANS, "mamba_inner_ref")(*common, out_weight, out_bias, A, None, None, skip, bias)
    check(inner.mT @ out_weight.T + out_bias, whole, 1e-10)
    arguments = (*common, out_weight, out_bias, A, A_back, None, None, skip, bias)
    both = (official(SCANS, f"bimamba_inner_{kind}")(*arguments) for kind in ("fn", "ref"))
    check(*both, 1e-10)
    official(SCANS, "_check_selective_scan_cuda")()


def test_norm_of_a_forward_pass():
    x, weight = drawn(2, 6), drawn(6)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    check(official(SCANS, "rms_norm_forward")(x, weight, None), want, 1e-12)


def test_steps_of_the_convolution():
    """Forward, backward and update as one calls them inside of an `autograd.Function`."""
    x, weight, bias, first = drawn(2, 3, 8), drawn(3, 4), drawn(3), drawn(2, 3, 3)
    steps = "causal_conv1d.cpp_functions"
    final = torch.empty(2, 3, 3, dtype=torch.float64)
    out = official(steps, "causal_conv1d_fwd_function")(x, weight, bias, None, first, final, True)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, first)]
    want, want_final = official(CONV, "causal_conv1d_ref")(
        *leaves[:3], initial_states=leaves[3], return_final_states=True, activation="silu"
    )
    check(out, want, 1e-12)
    check(final, want_final, 1e-12)
    d_out, d_final, d_x = drawn(2, 3, 8), drawn(2, 3, 3), torch.empty_like(x)
    backward = official(steps, "causal_conv1d_bwd_function")
    got = backward(x, weight, bias, d_out, None, first, d_final, d_x, True, True)
    for one, two in zip(got, torch.autograd.grad((want, want_final), leaves, (d_out, d_final)), strict=True):
        check(one, two, 1e-10)
    assert torch.equal(got[0], d_x)
    state = torch.cat((first.new_zeros(2, 3, 1), first), dim=-1)
    for t in range(8):
        y = official(steps, "causal_conv1d_update_function")(x[..., t], state, weight, bias, True, None, None)
        check(y, want[..., t], 1e-12)


def test_choices_of_logits():
    """Each changes its logits in place; the names and what they leave are those of the official loop."""
    logits, infinity = torch.tensor([[0.0, 2.0, 1.0, -1.0]]), -math.inf

    def changed(name, *arguments):
        given = logits.clone()
        result = official("mamba_ssm.utils.generation", name)(given, *arguments)
        assert result is None or result is given
        return given.tolist()[0]

    assert changed("modify_logits_for_top_k_filtering", 2) == [infinity, 2, 1, infinity]
    assert changed("modify_logits_for_min_p_filtering", 0.5) == [infinity, 2, 1, infinity]
    assert changed("modify_logits_for_min_p_filtering", 0.0) == logits.tolist()[0]
    # Probabilities are 0.087, 0.644, 0.237 and 0.032.
    assert changed("modify_logits_for_top_p_filtering", 0.7) == [infinity, 2, 1, infinity]
    assert changed("modify_logits_for_top_p_filtering", 0.95) == [0, 2, 1, infinity]
    assert changed("modify_logits_for_top_p_filtering", 1.0) == logits.tolist()[0]
    assert changed("modify_logit_for_repetition_penalty", torch.tensor([[1, 3]]), 2.0) == [0, 1, 1, -2]
    assert changed("modify_logit_for_repetition_penalty", torch.tensor([[1, 3]]), 1.0) == logits.tolist()[0]


def test_deterministic_mode(monkeypatch):
    use, choose = (official("mamba_ssm.utils.determinism", f"{verb}_deterministic_mode") for verb in ("use", "set"))

    monkeypatch.delenv("MAMBA_DETERMINISTIC", raising=False)
    assert use() == torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("MAMBA_DETERMINISTIC", "1")
    assert use()
    choose(False)
    assert not use()
    choose(None)
    assert use()


def test_decorators_of_autograd_functions():
    custom_fwd, custom_bwd = (official("mamba_ssm.utils.torch", f"custom_{way}") for way in ("fwd", "bwd"))

    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx, *inputs):
            return 2 * inputs[0]

        @staticmethod
        @custom_bwd
        def backward(ctx, *grads):
            return 2 * grads[0]

    x = drawn(3).requires_grad_()
    Double.apply(x).sum().backward()
    assert (x.grad == 2).all()


def test_gradients_of_angles():
    angle, dt, state = drawn(2, 5, 3, 4), torch.rand(2, 3, 5, dtype=torch.float64), drawn(2, 3, 4)
    leaves = [t.clone().requires_grad_() for t in (angle, dt, state)]
    total, outputs = leaves[2], []
    for t in range(5):
        total = total + math.pi * torch.tanh(leaves[0][:, t]) * leaves[1][:, :, t, None]
        outputs.append(total)
    d_out, d_state = drawn(2, 5, 3, 4), drawn(2, 3, 4)
    want = torch.autograd.grad((torch.stack(outputs, dim=1), total), leaves, (d_out, d_state))
    backward = official(f"{TRITON}.mamba3.angle_dt", "angle_dt_bwd")
    for one, two in zip(backward(d_out, angle, dt, True, grad_output_state=d_state), want, strict=True):
        check(one, two, 1e-10)


def test_gradients_of_heads_add_up_in_their_groups():
    reduce = official(f"{TRITON}.mamba3.grouped_head_reduction", "reduce_grouped_qk_grads")
    grads = drawn(2, 6, 4)
    check(reduce(grads, 2), torch.stack((grads[:, :3].sum(1), grads[:, 3:].sum(1)), dim=1), 1e-12)
    with pytest.raises(ValueError, match="6 heads are not a multiple of num_qk_groups = 4"):
        reduce(grads, 4)
