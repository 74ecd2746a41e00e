"""The convolution's forward, backward and update, for callers that have an `autograd.Function` of their own."""

from typing import Any

import torch
from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.gradients import pulled_back, written

__all__ = ["causal_conv1d_bwd_function", "causal_conv1d_fwd_function", "causal_conv1d_update_function"]

__getattr__ = gpu_only(__name__, operators="_causal_conv1d_fwd_cpp _causal_conv1d_bwd_cpp _causal_conv1d_update_cpp")


@of_tensors
@torch.no_grad()
def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    """`out`; the final states are written if there is a tensor for them."""
    given = (x, weight, bias, seq_idx, initial_states)
    out: Any = causal_conv1d_fn(*given, final_states_out is not None, final_states_out, activation(silu_activation))
    return out if final_states_out is None else out[0]


@of_tensors
def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Any, ...]:
    """`(dx, dweight, dbias, dinitial_states)`, the last only if asked for; `dx` is written if it is given."""

    def forward(x: Tensor, weight: Tensor, bias: Any, initial_states: Any) -> Any:
        final = dfinal_states is not None
        return causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, final, None, activation(silu_activation))

    upstream = (dout,) if dfinal_states is None else (dout, dfinal_states)
    d_x, d_weight, d_bias, d_initial = pulled_back(forward, (x, weight, bias, initial_states), upstream)
    return written(d_x, dx), d_weight, d_bias, d_initial if return_dinitial_states else None


@of_tensors
@torch.no_grad()
def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """`out`; `conv_state` is updated."""
    chosen = activation(silu_activation)
    return causal_conv1d_update(x, conv_state, weight, bias, chosen, cache_seqlens, conv_state_indices)


def activation(silu: bool) -> str | None:
    return "silu" if silu else None
