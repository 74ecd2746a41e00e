"""States from chunk to chunk."""

from typing import Any

import torch
from torch import Tensor

from mambakit.compat.arguments import of_tensors, through_apply
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.references.chunks import state_passing_ref

__all__ = ["StatePassingFn", "_state_passing_bwd", "_state_passing_fwd", "state_passing", "state_passing_ref"]

__getattr__ = gpu_only(__name__, kernels="_state_passing_fwd_kernel _state_passing_bwd_kernel")


@of_tensors
def _state_passing_fwd(
    states: Tensor,
    dA_chunk_cumsum: Tensor,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk_size: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The states that enter each chunk, (b, n, h, d), and the last, (b, h, d), from what each writes.

    `dA_chunk_cumsum` (b, h, n) is the log-decay of a whole chunk. With `seq_idx` (b, s) a state ends where its sequence
    does; `initial_states` belong to the id 0.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    state = torch.zeros_like(states[:, 0]) if initial_states is None else initial_states
    state, entering = state.to(wide), []
    before_b = torch.zeros(len(states), dtype=torch.long, device=states.device)
    for n in range(states.shape[1]):
        entering.append(state)
        decay_bh = torch.exp(dA_chunk_cumsum[:, :, n])
        if seq_idx is not None:
            assert chunk_size is not None
            last_b = seq_idx[:, min((n + 1) * chunk_size, seq_idx.shape[1]) - 1]
            decay_bh = decay_bh * (last_b == before_b)[:, None]
            before_b = last_b
        state = decay_bh[..., None] * state + states[:, n]
    return torch.stack(entering, dim=1).to(out_dtype or states.dtype), state


@of_tensors
def _state_passing_bwd(
    states: Tensor,
    dA_chunk_cumsum: Tensor,
    dout: Tensor,
    dfinal_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    has_initial_states: bool | None = None,
    dstates_dtype: torch.dtype | None = None,
    states_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
) -> tuple[Any, ...]:
    """Gradients of what chunks write, of their log-decays and of the initial states, from the states that enter them.

    With `states_dtype` also the states in that dtype.
    """
    d_state = torch.zeros_like(dout[:, 0]) if dfinal_states is None else dfinal_states
    wide = torch.promote_types(dout.dtype, torch.float32)
    d_state, d_written, d_decay = d_state.to(wide), [], []
    for n in reversed(range(states.shape[1])):
        decay_bh = torch.exp(dA_chunk_cumsum[:, :, n])
        if seq_idx is not None:
            assert chunk_size is not None
            last_b = seq_idx[:, min((n + 1) * chunk_size, seq_idx.shape[1]) - 1]
            before_b = seq_idx[:, n * chunk_size - 1] if n else torch.zeros_like(last_b)
            decay_bh = decay_bh * (last_b == before_b)[:, None]
        d_written.append(d_state)
        d_decay.append(decay_bh * (d_state * states[:, n]).sum(-1))
        d_state = decay_bh[..., None] * d_state + dout[:, n]
    dstates = torch.stack(d_written[::-1], dim=1).to(dstates_dtype or dout.dtype)
    ddA = torch.stack(d_decay[::-1], dim=2).to(dA_chunk_cumsum.dtype)
    results = (dstates, ddA, d_state.to(dstates.dtype) if has_initial_states else None)
    return results if states_dtype is None else (*results, states.to(states_dtype))


@of_tensors
def state_passing(
    states: Tensor, dA_chunk_cumsum: Tensor, initial_states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`_state_passing_fwd` without packed sequences; differentiable, as it is."""
    return _state_passing_fwd(states, dA_chunk_cumsum, initial_states)


StatePassingFn = through_apply("StatePassingFn", state_passing)
