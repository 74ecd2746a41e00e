"""The short convolution, tap by tap and token by token."""

import torch
from torch import Tensor

from mambakit.compat.arguments import by_version, check_activation


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`out` (b, v, s), or `(out, final_states)` with the last `k - 1` inputs (b, v, k - 1)."""
    activation, initial_states = by_version(activation, initial_states)
    check_activation(activation)
    taps = weight.shape[1]
    wide = widest(x, weight)
    before = x.new_zeros(*x.shape[:2], taps - 1) if initial_states is None else initial_states
    past = torch.cat((before.to(wide), x.to(wide)), dim=-1)
    out = torch.zeros_like(x, dtype=wide) if bias is None else bias.to(wide)[:, None].expand(x.shape)
    for tap in range(taps):
        out = out + weight[:, tap, None].to(wide) * past[..., tap : tap + x.shape[-1]]
    out = activated(out, activation).to(x.dtype)
    if not return_final_states:
        return out
    final_states = past[..., past.shape[-1] - (taps - 1) :].to(x.dtype)
    return out, final_states if final_states_out is None else final_states_out.copy_(final_states)


def causal_conv1d_update_ref(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """The next outputs, one input after the other; with `cache_seqlens` the state is a ring."""
    check_activation(activation)
    taps, length, wide = weight.shape[1], conv_state.shape[2], widest(x, weight)
    outputs = []
    for t, x_bv in enumerate((x[..., None] if x.dim() == 2 else x).unbind(-1)):
        seen_b = length + torch.zeros(len(x), dtype=torch.long) if cache_seqlens is None else cache_seqlens.long() + t
        window = [conv_state[torch.arange(len(x)), :, (seen_b - back) % length] for back in range(taps - 1, 0, -1)]
        out_bv = sum(w.to(wide) * v.to(wide) for w, v in zip(weight.unbind(1), [*window, x_bv], strict=True))
        assert isinstance(out_bv, Tensor)
        outputs.append(activated(out_bv if bias is None else out_bv + bias.to(wide), activation).to(x.dtype))
        with torch.no_grad():
            if cache_seqlens is None:
                conv_state.copy_(conv_state.roll(-1, dims=2))
            conv_state[torch.arange(len(x)), :, (seen_b if cache_seqlens is not None else seen_b - 1) % length] = (
                x_bv.to(conv_state.dtype)
            )
    return outputs[0] if x.dim() == 2 else torch.stack(outputs, dim=-1)


def causal_conv1d_varlen_states_ref(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last inputs of every packed sequence, (sequences, v, state_len), zeros before a shorter one."""
    states = x.new_zeros(len(cu_seqlens) - 1, x.shape[1], state_len)
    for i, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        for back in range(1, min(state_len, end - start) + 1):
            states[i, :, -back] = x[end - back]
    return states


def activated(x: Tensor, activation: str | None) -> Tensor:
    return x if activation is None else x * torch.sigmoid(x)


def widest(*tensors: Tensor | None) -> torch.dtype:
    """The dtype to compute in: at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    return dtype
