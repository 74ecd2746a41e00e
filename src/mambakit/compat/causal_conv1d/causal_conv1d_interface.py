"""The short convolution in the official layout, `b v s`, with states of the `k - 1` inputs before the next one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.compat.arguments import by_version, check_activation, in_one_precision, of_tensors, through_apply
from mambakit.compat.packing import hide_padding, segments_of
from mambakit.compat.references.convolution import causal_conv1d_ref, causal_conv1d_update_ref
from mambakit.compat.slots import Slots, check_writable
from mambakit.ops.causal_conv import causal_conv
from mambakit.ops.shapes import bind, check_integers

__all__ = [
    "CausalConv1dFn",
    "causal_conv1d_fn",
    "causal_conv1d_ref",
    "causal_conv1d_update",
    "causal_conv1d_update_ref",
]


@of_tensors
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | str | None = None,
    initial_states: Tensor | str | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve `x` (b, v, s) with `weight` (v, k). Returns `out`, or `(out, final_states)` with states (b, v, k - 1).

    `final_states_out` is written to and returned. As officially, packed sequences (`seq_idx`) have no states, and where
    the id is negative the output is zero. `activation` may also come fourth or fifth, as in versions 1.0 and 1.1.
    """
    activation, ids_bs, states_bvk = by_version(activation, seq_idx, initial_states)
    with_silu = check_activation(activation)
    size = bind(x_bvs=x, weight_vk=weight, bias_v=bias)
    if ids_bs is not None and (states_bvk is not None or return_final_states):
        raise ValueError("seq_idx packs whole sequences: it goes with neither initial_states nor return_final_states")
    if final_states_out is not None:
        if not return_final_states:
            raise ValueError("final_states_out is only written with return_final_states=True")
        check_out(final_states_out, (size.b, size.v, size.k - 1))
    x_bsv, weight_vk, bias_v, window_bvk = in_one_precision(x.mT, weight, bias, states_bvk)
    if window_bvk is not None:
        if tuple(window_bvk.shape) != (size.b, size.v, size.k - 1):
            expected = (size.b, size.v, size.k - 1)
            raise ValueError(f"initial_states has shape {tuple(window_bvk.shape)}, expected {expected}")
        window_bvk = F.pad(window_bvk, (1, 0))
    segments_bs = segments_of(ids_bs, size.b, size.s)
    y_bsv, window_bvk = causal_conv(x_bsv, weight_vk, bias_v, window_bvk, segments_bs=segments_bs, silu=with_silu)
    y_bsv = hide_padding(y_bsv, ids_bs)
    # In the layout of `x`, as callers go on to `view` it.
    y_bvs = y_bsv.mT.to(x.dtype)
    out = y_bvs.contiguous() if x.is_contiguous() else y_bvs
    if not return_final_states:
        return out
    final_states = window_bvk[:, :, 1:].to(x.dtype)
    return out, final_states if final_states_out is None else final_states_out.copy_(final_states)


def check_out(final_states_out: Tensor, shape: tuple[int, ...]) -> None:
    in_one_precision(final_states_out)
    if tuple(final_states_out.shape) != shape:
        raise ValueError(f"final_states_out has shape {tuple(final_states_out.shape)}, expected {shape}")
    check_writable("final_states_out", final_states_out)
    if torch.is_grad_enabled() and final_states_out.is_leaf and final_states_out.requires_grad:
        raise ValueError("final_states_out requires a gradient and cannot be written to; detach() it")


CausalConv1dFn = through_apply("CausalConv1dFn", causal_conv1d_fn)


@of_tensors
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolve the next inputs `x`, (b, v) or (b, v, s), and put them into `conv_state` (b, v, at least k - 1).

    With `cache_seqlens` (b) the state is a ring into which a row's next input goes at `cache_seqlens % state_len`. With
    `conv_state_indices` (b) the rows of the batch are these rows of a larger state; negative ones are padding.
    """
    with_silu = check_activation(activation)
    x_bvs = x[..., None] if x.dim() == 2 else x
    slots = Slots("conv_state_indices", conv_state_indices, conv_state, x)
    state_bvL = slots.read(conv_state)
    size = bind(x_bvs=x_bvs, conv_state_bvL=state_bvL, weight_vk=weight, bias_v=bias)
    if size.k > size.L + 1:
        raise ValueError(f"conv_state holds {size.L} inputs, but a kernel of {size.k} taps needs {size.k - 1}")
    past_bvL = state_bvL
    if cache_seqlens is not None:
        past_bvL = state_bvL.gather(2, ring_order(cache_seqlens, size.L, state_bvL))
    # The oldest of the window's inputs is not read.
    window_bvk = F.pad(past_bvL, (1, 0)) if size.k - 1 == size.L else past_bvL[:, :, size.L - size.k :]
    x_bsv, weight_vk, bias_v, window_bvk = in_one_precision(x_bvs.mT, weight, bias, window_bvk)
    y_bsv, after_bvk = causal_conv(x_bsv, weight_vk, bias_v, window_bvk, silu=with_silu)
    y_bvs = slots.hide(y_bsv.mT).to(x.dtype)
    with torch.no_grad():
        after_bvL = after_bvk
        if size.k != size.L:
            after_bvL = torch.cat((past_bvL, x_bvs.to(conv_state.dtype)), dim=2)[:, :, size.s :]
        if cache_seqlens is not None:
            order_bvL = ring_order(cache_seqlens + size.s, size.L, state_bvL)
            after_bvL = torch.empty_like(after_bvL).scatter_(2, order_bvL, after_bvL)
        slots.write(conv_state, after_bvL)
    return y_bvs[..., 0] if x.dim() == 2 else y_bvs.contiguous()


def ring_order(seen_b: Tensor, length: int, state_bvL: Tensor) -> Tensor:
    """Columns of a ring after `seen` inputs, from the oldest to the newest, for every channel."""
    if tuple(seen_b.shape) != (len(state_bvL),):
        raise ValueError(
            f"cache_seqlens has shape {tuple(seen_b.shape)}, expected {(len(state_bvL),)}: one count per row"
        )
    check_integers("cache_seqlens", seen_b, "counts")
    order_bL = (torch.arange(length, device=state_bvL.device) + seen_b[:, None].long()) % max(length, 1)
    return order_bL[:, None].expand_as(state_bvL)
